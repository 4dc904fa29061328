"""Managers: what a script hands to `Model` or `build_train_network` to choose how the loss is scaled."""

import warnings
from typing import Any, Optional

from mindspore import Tensor, nn
from mindspore import dtype as mstype
from mindspore.train.loss_scale_manager import LossScaleManager as _MindSporeLossScaleManager

from cells import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell
from cells.checks import check_bool, check_loss_scale, check_number_at_least
from cells.scale_rule import LossScaleRule, advance

_USUAL_LARGEST_FACTOR = 256


class LossScaleManager(_MindSporeLossScaleManager):
    """Base class of loss-scale managers; subclass it to bring your own.

    `Model` and `build_train_network` call `get_update_cell` once, when they build the train cell, and `Model`
    calls `update_loss_scale` after each step if `get_drop_overflow_update` is true.
    """

    def get_drop_overflow_update(self) -> bool:
        """Return whether the update is dropped on overflow. True only with an update cell."""
        return False


class FixedLossScaleManager(LossScaleManager):
    """Manager of a loss scale that never changes.

        Args:
            loss_scale: the factor, a finite number >= 1. Default: 128.0.
            drop_overflow_update: whether a step whose gradients overflowed is skipped. Where False, the optimizer
                does the unscaling and must have been built with the same `loss_scale`. Default: True.

        Raises:
            TypeError: if `loss_scale` is not a number or `drop_overflow_update` not a bool.
            ValueError: if `loss_scale` is below 1, nan or inf.

        Supported Platforms:
            ``Ascend`` ``GPU`` ``CPU``

        Examples:
            >>> from lossscale import FixedLossScaleManager, Model
            >>> from mindspore import Tensor, nn
    from mindspore import dtype as mstype
            >>> net = nn.Dense(4, 1)
            >>> # 1) Skip the update if there is an overflow.
            >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=FixedLossScaleManager())
            >>> # 2) Update even then; the optimizer divides by the scale.
            >>> manager = FixedLossScaleManager(1024.0, False)
            >>> optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
            >>> model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=manager)
    """

    def __init__(self, loss_scale: float = 128.0, drop_overflow_update: bool = True):
        owner = type(self).__name__
        check_number_at_least("loss_scale", loss_scale, 1, owner)
        check_loss_scale("loss_scale", loss_scale, owner)
        self._drop_overflow_update = check_bool("drop_overflow_update", drop_overflow_update, owner)
        self._loss_scale = loss_scale

    def get_loss_scale(self) -> float:
        """Return the loss scale."""
        return self._loss_scale

    def get_drop_overflow_update(self) -> bool:
        """Return whether a step whose gradients overflowed is skipped."""
        return self._drop_overflow_update

    def update_loss_scale(self, overflow: bool) -> None:
        """Do nothing: the scale is fixed."""

    def get_update_cell(self) -> Optional[nn.Cell]:
        """Return a new `FixedLossScaleUpdateCell`, or None where overflowing steps are not dropped."""
        if not self._drop_overflow_update:
            return None
        return FixedLossScaleUpdateCell(self._loss_scale)


class DynamicLossScaleManager(LossScaleManager):
    """Manager of a loss scale that falls on overflow and rises after `scale_window` steps without one.

        In training the scale lives in the train cell built with `get_update_cell()` and this manager reads it there;
        if several were built, the last one counts. Without a train cell the manager takes the steps of the rule,
        `cells.scale_rule.advance`, on the host, for loops that call `update_loss_scale` themselves.

        Args:
            init_loss_scale: the first scale, a finite number >= 1. Default: 2**24.
            scale_factor: what the scale is multiplied and divided by, a finite number >= 1. Default: 2.
            scale_window: steps without overflow after which the scale rises, an int > 0; from 2**31 - 1 on it never
                does. Default: 2000.
            min_loss_scale: where falling stops; below 1 is allowed. Default: 1.0.
            max_loss_scale: where rising stops. Default: None, float32's largest number.
            backoff_factor: what the scale is multiplied by on overflow. Default: None, 1 / `scale_factor`.
            hysteresis: the overflow in a row that makes the scale fall first; each further one does so at once, and a
                step without overflow refills it. Default: 1.

        Raises:
            TypeError: if a number is not a number, or the window not an int.
            ValueError: if a value is out of range, nan or inf.

        Supported Platforms:
            ``Ascend`` ``GPU`` ``CPU``

        Examples:
            >>> from lossscale import DynamicLossScaleManager, Model
            >>> from mindspore import Tensor, nn
    from mindspore import dtype as mstype
            >>> net = nn.Dense(4, 1)
            >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
            >>> manager = DynamicLossScaleManager()
            >>> model = Model(net, nn.MSELoss(), optimizer, loss_scale_manager=manager)
            >>> manager.get_loss_scale()
            16777216.0
    """

    def __init__(
        self,
        init_loss_scale: float = 2**24,
        scale_factor: float = 2,
        scale_window: int = 2000,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
    ):
        owner = type(self).__name__
        check_number_at_least("init_loss_scale", init_loss_scale, 1, owner)
        check_loss_scale("init_loss_scale", init_loss_scale, owner)
        self._limits: dict[str, Any] = {
            "min_loss_scale": min_loss_scale,
            "max_loss_scale": max_loss_scale,
            "backoff_factor": backoff_factor,
            "hysteresis": hysteresis,
        }
        self._rule = LossScaleRule.checked(owner, scale_factor, scale_window, **self._limits)
        if scale_factor > _USUAL_LARGEST_FACTOR:
            warnings.warn(
                f"{owner} understood init_loss_scale={init_loss_scale}, scale_factor={scale_factor}, "
                f"scale_window={scale_window}. A factor above {_USUAL_LARGEST_FACTOR} is unusual: the arguments "
                f"are (init_loss_scale, scale_factor, scale_window). If you meant a factor and a window, name "
                f"them: {owner}(scale_factor={init_loss_scale}, scale_window={scale_factor}).",
                UserWarning,
                stacklevel=2,
            )
        self._host_loss_scale = self._rule.clamp("init_loss_scale", init_loss_scale, owner)
        self._rule_tensors = self._rule.tensors()
        self._clean_steps = 0
        self._update_cells: list[DynamicLossScaleUpdateCell] = []
        self.scale_window = scale_window
        self.scale_factor = scale_factor
        self.increase_ratio = scale_factor
        self.decrease_ratio = 1 / scale_factor if backoff_factor is None else backoff_factor
        self.cur_iter = 1
        self.last_overflow_iter = 0
        self.bad_step_max = 1000
        self.bad_step = 0

    @property
    def loss_scale(self) -> float:
        """The current loss scale, as `get_loss_scale` returns it.

        Assign to it to set the scale: that of the train cell if there is one, seen by compiled graphs too, else the
        initial one. Outside the limits it is moved to the nearest one, with a warning.

        Raises:
            TypeError: if it is not a number.
            ValueError: if it is not a float32 > 0.
            RuntimeError: inside a window of the train cell's micro-steps.
        """
        return self.get_loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        owner = type(self).__name__
        check_loss_scale("loss_scale", value, owner)
        value = self._rule.clamp("loss_scale", value, owner)
        bound = self._bound_cell()
        for cell in self._update_cells if bound is None else [bound]:
            cell.set_loss_scale(value)
        self._host_loss_scale = value

    def get_loss_scale(self) -> float:
        """Return the current loss scale: the train cell's if there is one (reads the device), else the host's."""
        cell = self._bound_cell()
        return self._host_loss_scale if cell is None else cell.get_loss_scale()

    def update_loss_scale(self, overflow: bool) -> None:
        """Take note of one step; `Model` calls this after each.

        With a train cell, which updates the scale by itself, this counts overflows in a row. Without one it
        also updates the host's scale.

        Raises:
            RuntimeError: on the 1001st overflow in a row.
        """
        cell = self._bound_cell()
        if cell is None:
            self._update_host_scale(overflow)
        if overflow:
            # After a resume the train cell's counter, which is saved, knows of more than this manager saw.
            in_cell = 0 if cell is None else int(cell.consecutive_overflows.asnumpy())
            self.bad_step = max(self.bad_step + 1, in_cell)
        else:
            self.bad_step = 0
        if self.bad_step > self.bad_step_max:
            raise RuntimeError(
                f"Dynamic loss scaling: {self.bad_step} overflows in a row (loss scale now {self.get_loss_scale():g}). "
                "No scale helps any more: look for inf or nan in the data and in the forward loss, lower the "
                "learning rate, or keep the layers that overflow in float32."
            )
        if cell is None:
            self.cur_iter += 1

    def _update_host_scale(self, overflow: bool) -> None:
        scale, clean_steps, _ = advance(
            self._rule_tensors,
            Tensor(self._host_loss_scale, mstype.float32),
            Tensor(self._clean_steps, mstype.int32),
            Tensor(self.bad_step, mstype.int32),
            Tensor(bool(overflow)),
        )
        self._host_loss_scale, self._clean_steps = scale.asnumpy().item(), clean_steps.asnumpy().item()
        if overflow:
            self.last_overflow_iter = self.cur_iter

    def get_drop_overflow_update(self) -> bool:
        """Return True: a step whose gradients overflowed is always skipped."""
        return True

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        """Return a new `DynamicLossScaleUpdateCell` that starts at the current loss scale."""
        cell = DynamicLossScaleUpdateCell(self.get_loss_scale(), self.scale_factor, self.scale_window, **self._limits)
        self._update_cells.append(cell)
        return cell

    def _bound_cell(self) -> Optional[DynamicLossScaleUpdateCell]:
        """Return the one of this manager's update cells that a train cell took last, if any did."""
        bound = [cell for cell in self._update_cells if cell.is_bound]
        return max(bound, key=lambda cell: cell.binding, default=None)
