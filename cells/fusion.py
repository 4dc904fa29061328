"""Which fused optimizer does what one of MindSpore's does? The twin of an optimizer that a program already has."""

import copy
from typing import Any

from mindspore import nn
from mindspore.experimental import optim

from cells.fused import Fused, FusedAdam, FusedAdamW, FusedAdamWeightDecay, FusedMomentum, FusedSGD, warn_not_fused

_TWINS = {
    nn.SGD: FusedSGD,
    nn.Momentum: FusedMomentum,
    nn.Adam: FusedAdam,
    nn.AdamWeightDecay: FusedAdamWeightDecay,
    optim.AdamW: FusedAdamW,
}


def fuse(optimizer: Any) -> Any:
    """Return the fused twin of one of MindSpore's optimizers.

    The twin shares the optimizer's Parameters, states, groups and schedules, and their names: either can go on where
    the other stopped, and checkpoints fit both. Where there is none, it returns the optimizer itself, with one
    warning that says why.

    Args:
        optimizer: any optimizer. `nn.SGD`, `nn.Momentum`, `nn.Adam`, `nn.AdamWeightDecay` and
            `mindspore.experimental.optim.AdamW` have twins; classes derived from them don't.

    Returns:
        The twin, or `optimizer` itself.

    Raises:
        TypeError: if `optimizer` is not an optimizer of `mindspore.nn` or `mindspore.experimental.optim`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import lossscale
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> fused = lossscale.fuse(optimizer)
        >>> fused.moments[0] is optimizer.moments[0]
        True
    """
    if not isinstance(optimizer, (nn.Optimizer, optim.Optimizer)):
        raise TypeError(
            f"For 'fuse', 'optimizer' must be an optimizer of mindspore.nn or mindspore.experimental.optim, but got "
            f"{type(optimizer).__name__}. Write lossscale.fuse(nn.Momentum(net.trainable_params(), 0.1, 0.9))."
        )
    if isinstance(optimizer, Fused) or getattr(optimizer, "takes_scaled_gradients", False):
        return optimizer
    twin_class = _TWINS.get(type(optimizer))
    if twin_class is None:
        warn_not_fused(optimizer, f"only {', '.join(kind.__name__ for kind in _TWINS)} have a fused twin")
        return optimizer
    twin = _same_parameters(optimizer, twin_class)
    twin._fuse()
    return twin if twin.takes_scaled_gradients else optimizer


def _same_parameters(optimizer: nn.Cell, kind: Any) -> Any:
    """Return a cell of another class with the attributes of `optimizer`, the Parameters themselves among them."""
    twin = kind.__new__(kind)
    base, attributes = optimizer.__getstate__()
    # The books that a cell keeps of its Parameters and compiled graphs are its own.
    own = {name: copy.copy(value) if isinstance(value, (dict, set)) else value for name, value in attributes.items()}
    twin.__setstate__((base, own))
    return twin
