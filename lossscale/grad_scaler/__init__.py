"""`GradScaler`: PyTorch's way to scale losses by hand."""

from lossscale.grad_scaler.scaler import GradScaler

__all__ = ["GradScaler"]
