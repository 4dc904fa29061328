"""How does the backward pass start? The seed scale * 1 for the loss, zeros for whatever else the network returns."""

import warnings
from typing import Any

from mindspore import Tensor, ops
from mindspore import dtype as mstype

_warned: set = set()


def loss_of(output: Any) -> Tensor:
    """Return the loss: what the network returns, or the first of a tuple or list, or what a dict calls "loss".

    Raises:
        TypeError: if that is no Tensor.
    """
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss", None)
    elif isinstance(output, (tuple, list)):
        loss = output[0] if len(output) > 0 else None
    if not isinstance(loss, Tensor):
        raise TypeError(
            "The network of a train cell must return its loss, a Tensor, first: loss, (loss, others...), or a dict "
            'with the key "loss".'
        )
    return loss


def denominator_of(output: Any) -> Tensor:
    """Return what the loss is divided by, the second of what the network returns, as a float32 scalar.

    Raises:
        TypeError, ValueError: if that is no Tensor of one number.
    """
    if not isinstance(output, (tuple, list)) or len(output) < 2 or not isinstance(output[1], Tensor):
        raise TypeError(
            "With calculate_per_token_loss the network of a train cell must return the sum of its losses and what to "
            "divide it by, two Tensors: numerator, denominator, others..."
        )
    if output[1].size != 1:
        raise ValueError("With calculate_per_token_loss the denominator must be one number, such as mask.sum().")
    return ops.stop_gradient(output[1].astype(mstype.float32).reshape(()))


def extras_of(output: Any) -> tuple:
    """Return what the network returns beside the loss; of a dict the others as one dict."""
    if isinstance(output, dict):
        return ({key: value for key, value in output.items() if key != "loss"},)
    return tuple(output[1:]) if isinstance(output, (tuple, list)) else ()


def gradient_seed(output: Any, scale: Tensor) -> Any:
    """Return the seed that makes the backward pass give the gradients of scale * loss, and of nothing else.

    Args:
        output: what the network returned, see `loss_of`.
        scale: float32 scalar.
    """
    loss = loss_of(output)
    warn_of_low_precision(loss.dtype)
    seed = ops.ones_like(loss) * scale.astype(loss.dtype)
    if isinstance(output, dict):
        return {key: seed if key == "loss" else _zeros(value) for key, value in output.items()}
    if isinstance(output, tuple):
        return (seed, *_zeros(output[1:]))
    if isinstance(output, list):
        return [seed, *_zeros(output[1:])]
    return seed


def _zeros(value: Any) -> Any:
    """Return zeros for the Tensors in nested tuples, lists and dicts, and anything else as it is."""
    if isinstance(value, Tensor):
        return ops.zeros_like(value)
    if isinstance(value, tuple):
        return tuple([_zeros(item) for item in value])
    if isinstance(value, list):
        return [_zeros(item) for item in value]
    if isinstance(value, dict):
        return {key: _zeros(item) for key, item in value.items()}
    return value


@ops.constexpr
def warn_of_low_precision(loss_dtype: Any) -> None:
    """Warn once, while the graph is built, of a loss in which large scales become inf."""
    if loss_dtype == mstype.float16 and loss_dtype not in _warned:
        _warned.add(loss_dtype)
        warnings.warn(
            "The loss is float16, so the gradient's seed is inf at any loss scale above 65504 and every such step "
            "is skipped. Compute the loss in float32: cast the network's output with .astype(mindspore.float32) "
            "before the loss function.",
            stacklevel=2,
        )
