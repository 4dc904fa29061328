"""How is the scale updated? Graph cells that a train step calls with the scale and the overflow flag."""

import itertools
from typing import Any, Optional

from mindspore import Parameter, Tensor, jit, nn, ops
from mindspore import dtype as mstype

from cells.backends import backend
from cells.checks import check_loss_scale
from cells.native import in_place_op
from cells.scale_rule import LossScaleRule, advance, next_count

_bindings = itertools.count(1)


class LossScaleUpdateCell(nn.Cell):
    """Base of the update cells: the initial scale, and the tie to the one train cell that holds the live one.

    Args:
        loss_scale_value: the initial loss scale, a finite number > 0.
    """

    def __init__(self, loss_scale_value: float):
        super().__init__()
        check_loss_scale("loss_scale_value", loss_scale_value, type(self).__name__)
        self.loss_scale_value = loss_scale_value
        # Lists, because a Parameter set as an attribute would become this cell's own in checkpoints.
        self._live_scale: list[Parameter] = []
        self._micro_step: list[Parameter] = []
        self.binding = 0  # larger for later bindings, 0 for none

    @property
    def is_bound(self) -> bool:
        """Whether a train cell holds the live scale that this cell updates."""
        return self.binding > 0

    def check_unbound(self) -> None:
        """Raise ValueError if a train cell already uses this update cell."""
        if self.is_bound:
            raise ValueError(
                f"This '{type(self).__name__}' already belongs to another train cell, and its counters can follow "
                "only one scale. Make one update cell for each train cell, for example by "
                "manager.get_update_cell()."
            )

    def bind(self, scale_sense: Parameter, micro_step: Optional[Parameter] = None) -> None:
        """Tie this cell to the Parameter of the train cell; from then on `get_loss_scale` reads that.

        Args:
            scale_sense: the live scale.
            micro_step: the counter of micro-steps of a train cell that accumulates, 0 between windows.

        Raises:
            ValueError: if the cell is already bound.
        """
        self.check_unbound()
        self._live_scale.append(scale_sense)
        if micro_step is not None:
            self._micro_step.append(micro_step)
        self.binding = next(_bindings)

    def get_loss_scale(self) -> float:
        """Return the live loss scale once bound to a train cell, the initial one before. Reads the device."""
        if self.is_bound:
            return float(self._live_scale[0].asnumpy().reshape(()))
        return self.loss_scale_value

    def set_loss_scale(self, loss_scale: float) -> None:
        """Set the scale that `get_loss_scale` returns: the live one, seen by compiled graphs, or the initial one.

        Raises:
            TypeError: if it is not a number.
            ValueError: if it is not a float32 > 0.
            RuntimeError: inside a window of micro-steps.
        """
        check_loss_scale("loss_scale", loss_scale, type(self).__name__)
        if not self.is_bound:
            self.loss_scale_value = loss_scale
            return
        if any(int(step.asnumpy()) != 0 for step in self._micro_step):
            raise RuntimeError(
                "The loss scale is constant inside a window of micro-steps, and one is unfinished; set it after its "
                "last micro-step."
            )
        live = self._live_scale[0]
        ops.assign(live, Tensor(loss_scale, mstype.float32).reshape(live.shape))


class FixedLossScaleUpdateCell(LossScaleUpdateCell):
    """Update cell of a fixed loss scale: it changes nothing.

    Overflowing steps are still skipped by the train cell; only the scale stays.

    Args:
        loss_scale_value: the loss scale, a finite number > 0.

    Inputs:
        - **loss_scale** (Parameter) - float32 scalar, left as it is.
        - **overflow** (Tensor) - bool scalar.

    Outputs:
        The input `overflow`.

    Raises:
        TypeError: if `loss_scale_value` is not a number.
        ValueError: if `loss_scale_value` is not finite or not > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import FixedLossScaleUpdateCell
        >>> FixedLossScaleUpdateCell(1024).get_loss_scale()
        1024
    """

    def construct(self, loss_scale: Parameter, overflow: Tensor) -> Tensor:
        return overflow


class DynamicLossScaleUpdateCell(LossScaleUpdateCell):
    """Update cell of a dynamic loss scale: smaller after an overflow, larger after a window of clean steps.

    Each call is one step of the library's rule, `cells.scale_rule.advance`. The scale thus stays near the largest
    value that float16 gradients bear, found by trial and without any knowledge of the network (P. Micikevicius et
    al., Mixed Precision Training, ICLR 2018). The counters are Parameters and so are saved with the train cell:

    ============================ ======= ====================================================
    Parameter                    starts  meaning
    ============================ ======= ====================================================
    current_iterator_step        1       number of the step that runs now (``cur``)
    last_overflow_iterator_step  0       step of the last overflow or growth (``last``)
    consecutive_overflows        0       overflows in a row up to the last step
    total_overflows              0       overflows in all, never reset
    ============================ ======= ====================================================

    Clean steps are ``cur - 1 - last``. At the end of int32 ``cur`` stops and ``last`` moves back in its place.

    Args:
        loss_scale_value: initial loss scale, a finite number > 0; outside the limits it is moved to the nearest
            one, with a warning.
        scale_factor: what the scale is multiplied and divided by, a finite number >= 1.
        scale_window: clean steps after which the scale grows, an int > 0; from 2**31 - 1 on it never does.
        min_loss_scale: where backing off stops; below 1 is allowed. Default: 1.0.
        max_loss_scale: where growing stops. Default: None, float32's largest number.
        backoff_factor: what the scale is multiplied by on overflow, 0 < backoff_factor <= 1. Default: None,
            1 / `scale_factor`.
        hysteresis: the overflow in a row that backs off first; each further one backs off at once, and a clean
            step refills it. Default: 1, every overflow backs off.

    Inputs:
        - **loss_scale** (Parameter) - float32 scalar, assigned in place.
        - **overflow** (Tensor) - bool scalar, whether this step's gradients overflowed.

    Outputs:
        The input `overflow`.

    Raises:
        TypeError: if a factor is not a number, or the window or hysteresis not an int.
        ValueError: if a value is not finite or out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from mindspore import Parameter, Tensor
        >>> from lossscale import DynamicLossScaleUpdateCell
        >>> update = DynamicLossScaleUpdateCell(loss_scale_value=2**10, scale_factor=2, scale_window=2)
        >>> scale = Parameter(Tensor(1024.0), name="scale_sense")
        >>> for overflow in (True, False, False, False):
        ...     _ = update(scale, Tensor(overflow))
        ...     print(float(scale))
        512.0
        512.0
        1024.0
        1024.0
    """

    def __init__(
        self,
        loss_scale_value: float,
        scale_factor: float,
        scale_window: int,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
    ):
        owner = type(self).__name__
        rule = LossScaleRule.checked(
            owner, scale_factor, scale_window, min_loss_scale, max_loss_scale, backoff_factor, hysteresis
        )
        check_loss_scale("loss_scale_value", loss_scale_value, owner)
        super().__init__(rule.clamp("loss_scale_value", loss_scale_value, owner))
        self.rule = rule.tensors()
        self.scale_factor, self.scale_window = self.rule[0], self.rule[4]
        self.cur_iter = _counter("current_iterator_step", 1)
        self.last_overflow_iter = _counter("last_overflow_iterator_step", 0)
        self.consecutive_overflows = _counter("consecutive_overflows", 0)
        self.total_overflows = _counter("total_overflows", 0)
        self.native_op: Any = None
        if backend() == "native":
            self.native_op = in_place_op("update_scale", _flag_shape, _flag_dtype, read=7, written=5)

    def construct(self, loss_scale: Parameter, overflow: Tensor) -> Tensor:
        flag = Tensor(overflow, mstype.bool_) if isinstance(overflow, bool) else overflow
        done = flag
        if self.native_op is None:
            done = self.update_by_ops(loss_scale, flag)
        else:
            done = self.native_op(
                flag,
                *self.rule,
                loss_scale,
                self.cur_iter,
                self.last_overflow_iter,
                self.consecutive_overflows,
                self.total_overflows,
            )
        return ops.depend(overflow, done)

    # In PYNATIVE_MODE one compiled call, as MindSpore's own optimizers are, instead of twenty ops; no change in GRAPH.
    @jit(backend="ms_backend")
    def update_by_ops(self, loss_scale: Parameter, flag: Tensor) -> Tensor:
        """Update by MindSpore's own ops, on every device. Return `flag`."""
        clean_steps = self.cur_iter - 1 - self.last_overflow_iter
        new_scale, clean_steps, in_a_row = advance(self.rule, loss_scale, clean_steps, self.consecutive_overflows, flag)
        step = next_count(self.cur_iter)
        total = ops.select(flag, next_count(self.total_overflows), self.total_overflows)
        ops.assign(self.cur_iter, step)
        ops.assign(self.last_overflow_iter, step - 1 - clean_steps)
        ops.assign(self.consecutive_overflows, in_a_row)
        ops.assign(self.total_overflows, total)
        ops.assign(loss_scale, new_scale)
        return flag


def _flag_shape(*inputs):
    return [1]


def _flag_dtype(*inputs):
    return mstype.bool_


def _counter(name: str, start: int) -> Parameter:
    """A Parameter that counts steps: saved with the train cell, never trained."""
    return Parameter(Tensor(start, mstype.int32), name=name, requires_grad=False)
