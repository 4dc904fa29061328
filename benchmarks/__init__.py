"""Measurements and comparisons with PyTorch and Flax; see `make bench`."""
