"""The train step's options, checked before anything is built."""

from typing import Any

from mindspore import Tensor, nn
from mindspore import dtype as mstype

from cells.checks import scale_tensor
from cells.ema import EMA
from cells.scale_update import LossScaleUpdateCell

OUTPUTS = ("loss", "overflow", "loss_scale", "grad_norm", "learning_rate", "updated")


def checked_scale_sense(scale_sense: Any, owner: str) -> Any:
    """Return `scale_sense` as MindSpore's cell takes it: an update cell, or a float32 Tensor."""
    if scale_sense is None:
        return Tensor(1.0, mstype.float32)
    if isinstance(scale_sense, Tensor):
        return scale_tensor("scale_sense", scale_sense, owner)
    if not isinstance(scale_sense, nn.Cell):
        raise TypeError(
            f"For '{owner}', 'scale_sense' must be an update cell, a Tensor of shape () or (1,), or None, but got "
            f"{scale_sense!r} of type {type(scale_sense).__name__}. For a fixed scale write Tensor(1024.0) or "
            "FixedLossScaleUpdateCell(1024)."
        )
    if isinstance(scale_sense, LossScaleUpdateCell):
        scale_sense.check_unbound()
    return scale_sense


def checked_outputs(outputs: Any, optimizer: nn.Cell, owner: str) -> tuple:
    """Return the names of `outputs` as a tuple."""
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    unknown = [name for name in names if name not in OUTPUTS]
    if unknown or not names or len(set(names)) < len(names):
        raise ValueError(f"For '{owner}', 'outputs' must be different names from {OUTPUTS}, but got {outputs!r}.")
    if "learning_rate" in names and (not hasattr(optimizer, "get_lr") or getattr(optimizer, "is_group_lr", False)):
        raise ValueError(
            f"For '{owner}', 'learning_rate' in 'outputs' needs an optimizer with one learning rate and get_lr(), but "
            f"got {type(optimizer).__name__}, which has none or several."
        )
    return names


def check_options(
    owner: str,
    accumulate_steps: int,
    clip_grad: Any,
    ema: Any,
    outputs: tuple,
    sparse: bool,
    self_scaled: bool,
) -> None:
    """Raise TypeError or ValueError for options of a wrong kind, or that exclude each other."""
    if clip_grad is not None and not isinstance(clip_grad, nn.Cell):
        raise TypeError(
            f"For '{owner}', 'clip_grad' must be a Cell or None, but got {clip_grad!r}; write "
            "ClipByGlobalNorm(max_norm=1.0)."
        )
    if ema is not None and not isinstance(ema, EMA):
        raise TypeError(f"For '{owner}', 'ema' must be an EMA or None, but got {ema!r}; write EMA(0.999).")
    if self_scaled and accumulate_steps > 1:
        raise ValueError(
            f"For '{owner}', accumulate_steps={accumulate_steps} needs 'scale_sense': the scale is constant inside a "
            "window, so calls can't bring their own."
        )
    if sparse and (accumulate_steps > 1 or clip_grad is not None or "grad_norm" in outputs):
        raise ValueError(
            f"For '{owner}', the network has sparse gradients, which can be neither accumulated, clipped nor measured. "
            "Build its embeddings with sparse=False."
        )
