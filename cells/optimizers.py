"""What does a train step ask of optimizers, of any family? To update as one, and their learning rates."""

from collections import Counter
from typing import Any, Optional

from mindspore import ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype


class MultiOptimizer(nn.Cell):
    """Several optimizers, each with parameters of its own, as one: all of them step, or none.

    States that two of them call by the same name, such as `global_step`, get a prefix in the later ones:
    "optimizer1.global_step".

    Args:
        optimizers: two or more optimizers that share no parameter, see `check_disjoint`.
    """

    def __init__(self, optimizers: tuple):
        super().__init__(auto_prefix=False)
        self.optimizers = nn.CellList(list(optimizers), auto_prefix=False)
        self.parameters = ParameterTuple([weight for optimizer in optimizers for weight in optimizer.parameters])
        ends = [0]
        for optimizer in optimizers:
            ends.append(ends[-1] + len(optimizer.parameters))
        self.spans = tuple(zip(ends, ends[1:]))
        taken: set = set()
        weights = {id(weight) for weight in self.parameters}
        for number, optimizer in enumerate(optimizers):
            states = [state for state in optimizer.get_parameters() if id(state) not in weights]
            for state in states:
                if state.name in taken:
                    state.name = f"optimizer{number}.{state.name}"
            taken.update(state.name for state in states)

    def construct(self, gradients):
        done = Tensor(True, mstype.bool_)
        for i, optimizer in enumerate(self.optimizers):
            begin, end = self.spans[i]
            done = ops.depend(done, optimizer(gradients[begin:end]))
        return done


def check_disjoint(optimizers: tuple, owner: str) -> None:
    """Raise ValueError if two optimizers update the same parameter, or there are none."""
    if not optimizers:
        raise ValueError(f"For '{owner}', 'optimizer' must not be empty.")
    counts = Counter(id(weight) for optimizer in optimizers for weight in optimizer.parameters)
    shared = [w.name for optimizer in optimizers for w in optimizer.parameters if counts[id(w)] > 1]
    if shared:
        raise ValueError(
            f"For '{owner}', each parameter must be updated by one optimizer, but several have {sorted(set(shared))}."
        )


def as_one(optimizer: Any) -> nn.Cell:
    """Return the optimizer, or a `MultiOptimizer` of several."""
    if not isinstance(optimizer, (tuple, list)):
        return optimizer
    return MultiOptimizer(tuple(optimizer)) if len(optimizer) > 1 else optimizer[0]


class _OneRate(nn.Cell):
    """The learning rate of an optimizer that has one."""

    def __init__(self, optimizer: nn.Cell):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self):
        return (self.optimizer.get_lr() * 1.0,)  # a copy: the optimizer may change a Parameter


class _GroupRates(_OneRate):
    """The learning rates of an optimizer of `mindspore.nn` whose groups have their own."""

    def __init__(self, optimizer: nn.Cell):
        super().__init__(optimizer)
        distinct = [id(rate) for rate in optimizer.group_lr]
        self.places = tuple(distinct.index(key) for key in dict.fromkeys(distinct))

    def construct(self):
        by_parameter = self.optimizer.get_lr()
        rates = ()
        for place in self.places:
            rates = (*rates, by_parameter[place] * 1.0)
        return rates


class _ListedRates(nn.Cell):
    """The learning rates of an optimizer of `mindspore.experimental.optim`, one for each group."""

    def __init__(self, optimizer: nn.Cell):
        super().__init__(auto_prefix=False)
        self.rates = ParameterTuple(optimizer.lrs)

    def construct(self):
        rates = ()
        for rate in self.rates:
            rates = (*rates, rate * 1.0)
        return rates


class _RatesOfSeveral(nn.Cell):
    """The learning rates of several optimizers, one after the other."""

    def __init__(self, rates: list):
        super().__init__(auto_prefix=False)
        self.rates = nn.CellList(rates, auto_prefix=False)

    def construct(self):
        together = ()
        for rates in self.rates:
            together = together + rates()
        return together


def learning_rates(optimizer: Any) -> Optional[nn.Cell]:
    """Return the cell that gives the learning rates of the next update as a tuple, or None where there is no way to.

    They are float32 scalars: one; or one for each distinct rate of the groups of an optimizer of `mindspore.nn`, in
    the order of its `parameters`; or one for each group of an experimental optimizer; or those of several optimizers.
    """
    if isinstance(optimizer, (tuple, list, MultiOptimizer)):
        parts = optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else optimizer
        several = [learning_rates(part) for part in parts]
        return None if None in several else _RatesOfSeveral(several)
    if getattr(optimizer, "is_group_lr", False):
        return _GroupRates(optimizer)
    if hasattr(optimizer, "get_lr"):
        return _OneRate(optimizer)
    return _ListedRates(optimizer) if getattr(optimizer, "lrs", None) else None
