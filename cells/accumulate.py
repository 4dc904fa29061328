"""How are gradients accumulated? Sums over a window of micro-steps, in Parameters of at least float32."""

import itertools
from collections.abc import Sequence

from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from cells.checks import check_positive_int
from cells.weight_state import state_of

_numbers = itertools.count(1)
_map = ops.HyperMap()
_add = ops.MultitypeFuncGraph("add")
_clear = ops.MultitypeFuncGraph("clear")
_keep = ops.MultitypeFuncGraph("keep")


@_add.register("Tensor", "Tensor")
def _add_tensor(total, grad):
    return ops.assign_add(total, grad.astype(total.dtype))


@_clear.register("Tensor")
def _clear_tensor(total):
    return ops.assign(total, ops.zeros_like(total))


@_keep.register("Tensor", "Tensor")
def _keep_tensor(total, grad):
    return ops.assign(total, grad.astype(total.dtype))


class GradientAccumulator(nn.Cell):
    """Sums of the gradients of `accumulate_steps` micro-steps.

    ::

        totals += grads
        step = (step + 1) % accumulate_steps
        return totals, step == 0

    The sums are Parameters named ``accu_grads.<weight>`` (as MindSpore's own) and ``accu_step``, so a checkpoint
    holds an unfinished window and they can be told apart in it; ``accu_steps`` tells whose window it is.

    At the end of a window the mean gradients are kept in the sums, and the decision what becomes of them in
    `decision`: whatever else than Parameters passes from one `if` to another leaks host memory in GRAPH_MODE.

    Args:
        weights: the trained Parameters.
        accumulate_steps: micro-steps that make a window, an int > 0.
        tokens: whether denominators of the loss are added up too, in ``accu_tokens``.
    """

    def __init__(self, weights: Sequence, accumulate_steps: int, tokens: bool = False):
        super().__init__(auto_prefix=False)
        self.accumulate_steps = check_positive_int("accumulate_steps", accumulate_steps, type(self).__name__)
        self.totals = state_of(weights, "accu_grads", zeros=True)
        self.step = Parameter(Tensor(0, mstype.int32), name="accu_step", requires_grad=False)
        self.steps = Parameter(Tensor(accumulate_steps, mstype.int32), name="accu_steps", requires_grad=False)
        self.counts_tokens = tokens
        if tokens:
            self.tokens = Parameter(Tensor(0.0, mstype.float32), name="accu_tokens", requires_grad=False)
        # In a list, so that MindSpore does not save it in checkpoints. Names are unique because two train cells may
        # be compiled into one graph.
        names = [f"accu_{what}.{next(_numbers)}" for what in ("updates", "overflow")]
        self.decision = [Parameter(Tensor(False), name=name, requires_grad=False) for name in names]

    def construct(self, grads: tuple) -> tuple:
        """Add the gradients; return the sums and whether this micro-step ends the window."""
        totals = _map(_add, self.totals, grads)
        step = (self.step + 1) % self.accumulate_steps
        ops.assign(self.step, step)
        return totals, step == 0

    def keep(self, grads: tuple) -> tuple:
        """Keep mean gradients in place of the sums."""
        return _map(_keep, self.totals, grads)

    def decide(self, updates: Tensor, overflow: Tensor) -> Tensor:
        """Keep whether the weights are updated and whether there was an overflow; return `overflow`."""
        decided = ops.assign(self.decision[0], updates)
        return ops.depend(overflow, (decided, ops.assign(self.decision[1], overflow)))

    def add_tokens(self, tokens: Tensor) -> Tensor:
        """Add the denominator of a micro-step's loss."""
        return ops.assign_add(self.tokens, tokens)

    def clear(self) -> tuple:
        """Set the sums to zero. By assignment, since inf * 0 is nan for ever."""
        if self.counts_tokens:
            _clear_tensor(self.tokens)
        return _map(_clear, self.totals)

    def in_window(self) -> bool:
        """Return whether a window is unfinished. Reads the device."""
        return bool(self.step.asnumpy() != 0)

    def check_window(self, step: int, steps: int) -> None:
        """Raise ValueError if this cell can't go on after `step` micro-steps of a window of `steps`."""
        if step != 0 and (steps != self.accumulate_steps or step >= self.accumulate_steps):
            raise ValueError(
                f"The restored window has {step} of {steps} micro-steps in its sums, and "
                f"accumulate_steps={self.accumulate_steps}: its mean would be wrong. Build the train cell with "
                f"accumulate_steps={steps}, or restore a checkpoint that was saved at the end of a window."
            )

    def check_restored(self) -> None:
        """Raise ValueError if a window that another `accumulate_steps` began was restored into this cell."""
        steps = int(self.steps.asnumpy())
        self.check_window(int(self.step.asnumpy()), steps)
        if steps != self.accumulate_steps:
            ops.assign(self.steps, Tensor(self.accumulate_steps, mstype.int32))
