"""How are weights averaged? Shadow weights that follow the trained ones, after each real update."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from cells.checks import check_bool, check_number

_map = ops.HyperMap()
_follow = ops.MultitypeFuncGraph("follow")


@_follow.register("Tensor", "Tensor", "Tensor")
def _follow_tensor(rate, shadow, weight):
    return ops.assign_add(shadow, (weight.astype(shadow.dtype) - shadow) * rate.astype(shadow.dtype))


class EMA(nn.Cell):
    """Exponential moving average of the weights, as one evaluates with.

    ::

        decay_now = min(decay, (1 + updates) / (10 + updates)) if warmup else decay
        shadow    = shadow + (weight - shadow) * (1 - decay_now)
        updates  += 1

    A train step calls it after each step that moved the weights: not on micro-steps, and not on skipped ones.
    The shadow weights are Parameters named ``ema.<weight>``, at least float32, and are saved with the train cell.

    Args:
        decay: how much of the average stays at each update, 0 <= decay < 1; usual are 0.999 and 0.9999.
        parameters: the Parameters to average. Default: None, all that the train step's optimizer trains.
        warmup: whether the decay starts small, so that the first weights are forgotten soon. Default: False.

    Raises:
        TypeError: if `decay` is not a number or `warmup` not a bool.
        ValueError: if `decay` is out of range.
        RuntimeError: if the averages are applied before the cell has weights, or twice.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import EMA
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> ema = EMA(0.999, net.trainable_params())
        >>> with ema.applied():  # evaluate with the averages
        ...     average = net.weight.asnumpy()
    """

    def __init__(self, decay: float, parameters: Optional[Sequence] = None, *, warmup: bool = False):
        super().__init__(auto_prefix=False)
        owner = type(self).__name__
        number = check_number("decay", decay, owner)
        if not 0 <= number < 1:
            raise ValueError(f"For '{owner}', 'decay' must be >= 0 and < 1, but got {decay}; a usual one is 0.999.")
        self.decay = Tensor(number, mstype.float32)
        self.warmup = check_bool("warmup", warmup, owner)
        self.updates = Parameter(Tensor(0, mstype.int32), name="ema.updates", requires_grad=False)
        self.is_bound = False
        self._is_owned = False
        self._kept: list = []
        if parameters is not None:
            self.bind(_checked_parameters(parameters, owner))

    def check_unowned(self) -> None:
        """Raise ValueError if a train cell already moves these averages."""
        if self._is_owned:
            raise ValueError(
                "This EMA already belongs to another train cell, and would average that one's weights at this one's "
                "pace. Make one EMA for each train cell."
            )

    def join(self, weights: Sequence) -> None:
        """Let one train cell, which trains `weights`, move the averages: of its own Parameters, or else of those."""
        self.check_unowned()
        if not self.is_bound:
            self.bind(weights)
        self._is_owned = True

    def bind(self, parameters: Sequence) -> None:
        """Make a shadow weight for each of the Parameters, with their present values."""
        self.weights = ParameterTuple(list(parameters))
        self.shadows = ParameterTuple([_shadow_of(weight) for weight in self.weights])
        self.is_bound = True

    def construct(self) -> Tensor:
        """Move the shadow weights towards the weights; return the number of updates."""
        followed = _map(ops.partial(_follow, 1.0 - self.decay_now()), self.shadows, self.weights)
        return ops.depend(ops.assign_add(self.updates, Tensor(1, mstype.int32)), followed)

    def decay_now(self) -> Tensor:
        """Return the decay of this update, a float32 scalar. A subclass may override it by a ramp of its own."""
        decay = self.decay
        if self.warmup:
            count = self.updates.astype(mstype.float32)
            decay = ops.minimum(decay, (count + 1.0) / (count + 10.0))
        return decay

    def apply(self) -> None:
        """Put the averages into the weights, in place, on the host, and keep the weights for `restore`."""
        if not self.is_bound:
            raise RuntimeError("This EMA has no weights yet: give it parameters, or build a train step with it.")
        if self._kept:
            raise RuntimeError("The averages are in the weights already; call restore() first.")
        self._kept.extend(weight.asnumpy().copy() for weight in self.weights)
        for weight, shadow in zip(self.weights, self.shadows):
            ops.assign(weight, shadow.astype(weight.dtype))

    def restore(self) -> None:
        """Put the kept weights back."""
        if not self._kept:
            raise RuntimeError("No weights are kept; call apply() first.")
        for weight, kept in zip(self.weights, self._kept):
            ops.assign(weight, Tensor(kept, weight.dtype))
        self._kept.clear()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Evaluate with the averages: the weights hold them inside the ``with``, and their own values after it."""
        self.apply()
        try:
            yield
        finally:
            self.restore()


def _checked_parameters(parameters: Any, owner: str) -> list:
    found = list(parameters) if isinstance(parameters, Iterable) and not isinstance(parameters, Tensor) else [None]
    if not found or not all(isinstance(parameter, Parameter) for parameter in found):
        raise TypeError(
            f"For '{owner}', 'parameters' must be Parameters, but got {parameters!r}; write net.trainable_params()."
        )
    return found


def _shadow_of(weight: Parameter) -> Parameter:
    dtype = mstype.float64 if weight.dtype == mstype.float64 else mstype.float32
    value = Tensor(weight.asnumpy().copy(), dtype)
    return Parameter(value, name=f"ema.{weight.name}", requires_grad=False)
