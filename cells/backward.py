"""How does the backward pass start? The seed scale * 1 for the loss, zeros for whatever else the network returns."""

import inspect
import warnings
from typing import Any

from mindspore import Tensor, nn, ops
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


def scale_of_call(scale: Tensor) -> Tensor:
    """Return a scale given as the last input of a call as float32 in its shape."""
    if not isinstance(scale, Tensor) or (scale.shape != () and scale.shape != (1,)):
        raise ValueError(
            "The last input of this train cell is its loss scale and must be a Tensor of shape () or (1,), "
            "for example Tensor([1024.0])."
        )
    return scale.astype(mstype.float32)


def fixed_input_count(network: nn.Cell) -> int:
    """Return how many inputs `network` takes, or -2 where that is not fixed."""
    parameters = list(inspect.signature(network.construct).parameters.values())
    takes_any = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    wrapped = getattr(network, "_backbone", None)
    if takes_any and isinstance(wrapped, nn.Cell):  # MindSpore's casting wrappers pass everything on
        return fixed_input_count(wrapped)
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_fixed = all(p.kind in plain and p.default is p.empty for p in parameters)
    return len(parameters) if is_fixed else -2
