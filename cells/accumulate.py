"""How are gradients accumulated? Sums over a window of micro-steps, in Parameters of at least float32."""

from collections.abc import Sequence

from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore import dtype as mstype

from cells.checks import check_positive_int

_add = ops.MultitypeFuncGraph("add")
_clear = ops.MultitypeFuncGraph("clear")


@_add.register("Tensor", "Tensor")
def _add_tensor(total, grad):
    return ops.assign_add(total, grad.astype(total.dtype))


@_clear.register("Tensor")
def _clear_tensor(total):
    return ops.assign(total, ops.zeros_like(total))


class GradientAccumulator(nn.Cell):
    """Sums of the gradients of `accumulate_steps` micro-steps.

    ::

        totals += grads
        step = (step + 1) % accumulate_steps
        return totals, step == 0

    The sums are Parameters named ``accu_grads.<weight>`` (as MindSpore's own) and ``accu_step``, so a checkpoint
    holds an unfinished window and they can be told apart in it.

    Args:
        weights: the trained Parameters.
        accumulate_steps: micro-steps that make a window, an int > 0.
    """

    def __init__(self, weights: Sequence, accumulate_steps: int):
        super().__init__(auto_prefix=False)
        self.accumulate_steps = check_positive_int("accumulate_steps", accumulate_steps, type(self).__name__)
        self.totals = ParameterTuple([_total_of(weight) for weight in weights])
        self.step = Parameter(Tensor(0, mstype.int32), name="accu_step", requires_grad=False)
        self.map = ops.HyperMap()

    def construct(self, grads: tuple) -> tuple:
        """Add the gradients; return the sums and whether this micro-step ends the window."""
        totals = self.map(_add, self.totals, grads)
        step = (self.step + 1) % self.accumulate_steps
        ops.assign(self.step, step)
        return totals, step == 0

    def clear(self) -> tuple:
        """Set the sums to zero. By assignment, since inf * 0 is nan for ever."""
        return self.map(_clear, self.totals)

    def in_window(self) -> bool:
        """Return whether a window is unfinished. Reads the device."""
        return bool(self.step.asnumpy() != 0)


def _total_of(weight: Parameter) -> Parameter:
    dtype = mstype.float64 if weight.dtype == mstype.float64 else mstype.float32
    return Parameter(ops.zeros(weight.shape, dtype), name=f"accu_grads.{weight.name}", requires_grad=False)
