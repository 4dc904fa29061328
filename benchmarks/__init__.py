"""What loss scaling costs: this library, stock MindSpore, PyTorch and Flax, each against its own plain step."""
