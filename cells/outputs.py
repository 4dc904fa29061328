"""A train step's arguments, checked before anything is built, and what it returns."""

from dataclasses import dataclass
from typing import Any, Optional

from mindspore import Tensor, nn
from mindspore import dtype as mstype

from cells.checks import check_bool, check_positive_int, scale_tensor
from cells.clip import ClipByNormBase
from cells.ema import EMA
from cells.gradient_ops import may_have_sparse_gradients
from cells.optimizers import check_disjoint, learning_rates
from cells.ranks import has_shards
from cells.scale_update import LossScaleUpdateCell

OUTPUTS = ("loss", "overflow", "loss_scale", "grad_norm", "learning_rate", "updated", "grad_norms")
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True)
class StepOptions:
    """What a train step was built with, for callbacks and monitors: `train_cell.step_options`."""

    scale_sense: Any  # an update cell, or a float32 Tensor
    scale_every_call: bool  # whether each call brings its scale as the last input
    accumulate_steps: int
    clip_grad: Optional[nn.Cell]
    ema: Optional[EMA]
    drop_overflow_update: bool
    outputs: tuple  # names from OUTPUTS
    bare_output: bool  # whether one value is returned without a tuple
    sparse: bool  # whether gradients may be RowTensors
    calculate_per_token_loss: bool  # whether the network returns its loss as numerator and denominator

    @property
    def norms(self) -> bool:
        """Whether norms are reported."""
        return "grad_norm" in self.outputs or "grad_norms" in self.outputs


def checked_options(
    owner: str,
    network: Any,
    optimizer: Any,
    scale_sense: Any,
    accumulate_steps: Any,
    clip_grad: Any,
    ema: Any,
    drop_overflow_update: Any,
    outputs: Any,
    calculate_per_token_loss: Any,
) -> StepOptions:
    """Return the arguments of a train step, or raise TypeError or ValueError. Nothing is built or changed."""
    check_cells(network, optimizer, owner)
    options = StepOptions(
        _checked_scale_sense(scale_sense, owner),
        scale_sense is None,
        check_positive_int("accumulate_steps", accumulate_steps, owner),
        clip_grad,
        ema,
        check_bool("drop_overflow_update", drop_overflow_update, owner),
        _checked_outputs(outputs, optimizer, owner),
        isinstance(outputs, str),
        may_have_sparse_gradients(network),
        check_bool("calculate_per_token_loss", calculate_per_token_loss, owner),
    )
    if options.accumulate_steps > _LARGEST_INT32:
        raise ValueError(f"For '{owner}', 'accumulate_steps' must be < 2**31, but got {accumulate_steps}.")
    if clip_grad is not None and not isinstance(clip_grad, nn.Cell):
        raise TypeError(
            f"For '{owner}', 'clip_grad' must be a Cell or None, but got {clip_grad!r}; write "
            "ClipByGlobalNorm(max_norm=1.0)."
        )
    if ema is not None and not isinstance(ema, EMA):
        raise TypeError(f"For '{owner}', 'ema' must be an EMA or None, but got {ema!r}; write EMA(0.999).")
    if ema is not None:
        ema.check_unowned()
    if options.scale_every_call and options.accumulate_steps > 1:
        raise ValueError(
            f"For '{owner}', accumulate_steps={accumulate_steps} needs 'scale_sense': the scale is constant inside a "
            "window, so calls can't bring their own."
        )
    if options.sparse and (options.accumulate_steps > 1 or clip_grad is not None or options.norms):
        raise ValueError(
            f"For '{owner}', the network has sparse gradients, which can be neither accumulated, clipped nor measured. "
            "Build its embeddings with sparse=False."
        )
    takes_norm = options.norms or isinstance(clip_grad, ClipByNormBase)
    if has_shards() and options.accumulate_steps > 1 and takes_norm:
        raise ValueError(
            f"For '{owner}', the weights may be spread over devices, and MindSpore adds up the squares of their parts "
            "only for gradients, not for sums of them: with accumulate_steps > 1 there is no clip by a norm and no "
            "'grad_norm'. Leave them out, clip by value, or make the batch larger in place of accumulating."
        )
    return options


def check_cells(network: Any, optimizer: Any, owner: str) -> None:
    """Raise TypeError unless `network` is a Cell and `optimizer` one, or several, with the `parameters` they train."""
    if not isinstance(network, nn.Cell):
        raise TypeError(
            f"For '{owner}', 'network' must be a Cell that returns a loss, but got {network!r}; write "
            "nn.WithLossCell(net, loss_fn)."
        )
    if isinstance(network, nn.PipelineCell):
        raise TypeError(
            f"For '{owner}', 'network' must not be a PipelineCell: its micro-batches need a train cell of MindSpore's. "
            "Write build_train_network(network, optimizer, loss_scale_manager=manager) or Model(...), which choose it."
        )
    several = isinstance(optimizer, (tuple, list))
    for one in optimizer if several else (optimizer,):
        if not isinstance(one, nn.Cell) or not hasattr(one, "parameters"):
            raise TypeError(
                f"For '{owner}', 'optimizer' must be an optimizer of MindSpore, or a tuple of them, but got {one!r}; "
                "write nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)."
            )
    if several:
        check_disjoint(tuple(optimizer), owner)


def _checked_scale_sense(scale_sense: Any, owner: str) -> Any:
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


def _checked_outputs(outputs: Any, optimizer: Any, owner: str) -> tuple:
    if not isinstance(outputs, (str, tuple, list)):
        raise TypeError(f"For '{owner}', 'outputs' must be a name or a tuple of names, but got {outputs!r}.")
    names = (outputs,) if isinstance(outputs, str) else tuple(outputs)
    known = all(isinstance(name, str) and name in OUTPUTS for name in names)
    if not known or not names or len(set(names)) < len(names):
        raise ValueError(f"For '{owner}', 'outputs' must be different names from {OUTPUTS}, but got {outputs!r}.")
    if "learning_rate" in names and learning_rates(optimizer) is None:
        raise ValueError(
            f"For '{owner}', 'learning_rate' in 'outputs' needs an optimizer with get_lr() or `lrs`, but got "
            f"{type(optimizer).__name__}, which has neither."
        )
    return names
