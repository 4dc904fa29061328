"""Functional scalers: one interface (`scale`, `unscale`, `adjust`) for a dynamic, a fixed and no loss scale."""

import itertools
from typing import Any, Optional, Union

from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore import dtype as mstype

from cells.checks import check_loss_scale
from cells.gradient_ops import cast_like, cast_up, multiply
from cells.scale_rule import LossScaleRule, next_loss_scale
from cells.scaler_arithmetic import unscale_wide
from cells.state_dict import check_count, check_keys
from cells.trees import map_tensors

_numbers = itertools.count(1)


class LossScaler(nn.Cell):
    """Base of the functional scalers, for training loops that compute gradients themselves.

    ::

        def forward(x, y):
            loss = loss_fn(net(x), y)
            return scaler.scale(loss), loss

        grad_fn = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

        def train_step(x, y):                                 # eager, or under @mindspore.jit
            (_, loss), grads = grad_fn(x, y)
            grads = scaler.unscale(grads, keep_dtype=False)
            finite = all_finite(grads)
            scaler.adjust(finite)
            if finite:
                optimizer(grads)
            return loss

    The three methods work eagerly, inside `@mindspore.jit` and inside `construct`, on a Tensor or on Tensors in
    nested tuples, lists and dicts, and read nothing from the device. The state is Parameters, written in place,
    so that compiled graphs see it change. As an attribute of a Cell a scaler is saved and restored with it, under
    the attribute's name; outside of one use `state_dict` and `load_state_dict`.

    A subclass calls ``super().__init__()`` first and lists its Parameters in `state_names`.

    Args:
        name: prefix of the Parameters' names, for a scaler inside a Cell built with ``auto_prefix=False``, such as
            a train cell, which leaves names alone. Default: None, a prefix that is unique in this process.

    Raises:
        TypeError: if `name` is not a str.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import LossScaler
        >>> from mindspore import Parameter, Tensor, ops
        >>> class HalvingLossScaler(LossScaler):
        ...     state_names = ("scale_value",)
        ...
        ...     def __init__(self, scale_value):
        ...         super().__init__()
        ...         self.scale_value = Parameter(Tensor(scale_value), name="scale_value", requires_grad=False)
        ...
        ...     def adjust(self, grads_finite):
        ...         ops.assign(self.scale_value, self.scale_value / 2)
        ...         return True
        >>> scaler = HalvingLossScaler(8.0)
        >>> scaler.adjust(True), scaler.state_dict()
        (True, {'scale_value': 4.0})
    """

    state_names: tuple = ()

    def __init__(self, *, name: Optional[str] = None):
        super().__init__()
        if name is not None and not isinstance(name, str):
            raise TypeError(f"For '{type(self).__name__}', 'name' must be a str or None, but got {name!r}.")
        # Two Parameters of one name can't be in one graph.
        self._name_prefix = name or f"{type(self).__name__}_{next(_numbers)}"

    def scale(self, inputs: Any) -> Any:
        """Return `inputs`, usually the loss, times the loss scale, each in its own dtype.

        Args:
            inputs: a Tensor, or Tensors in nested tuples, lists and dicts.

        Raises:
            TypeError: if something else is in `inputs`, such as a Python number.
        """
        raise NotImplementedError(f"{type(self).__name__} must define scale().")

    def unscale(self, inputs: Any, keep_dtype: bool = True) -> Any:
        """Return `inputs`, usually the gradients, divided by the loss scale, computed in at least float32.

        .. warning::
            By default the result has the dtype of the input, as in `mindspore.amp`. For a float16 gradient that
            loses what the scaling saved: what was too small for float16 is 0 again. Write ``keep_dtype=False``.

        Args:
            inputs: a Tensor, or Tensors in nested tuples, lists and dicts.
            keep_dtype: False gives float32 for float16 and bfloat16 inputs. Default: True.

        Raises:
            TypeError: if something else is in `inputs`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define unscale().")

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Take note of one step, of which `grads_finite` says whether its gradients were all finite.

        Args:
            grads_finite: bool Tensor of one value, as `all_finite` returns it, or a bool.

        Returns:
            Whether this kind of scaler ever changes its scale.

        Raises:
            TypeError: if `grads_finite` is something else.
        """
        raise NotImplementedError(f"{type(self).__name__} must define adjust().")

    def state_dict(self, **kwargs: Any) -> dict:
        """Return the state as a dict of Python numbers. Reads the device.

        Keyword arguments come from `mindspore.nn.Cell.state_dict` of a Cell around, and do what they do there.
        """
        if kwargs:
            return super().state_dict(**kwargs)
        return {name: getattr(self, name).asnumpy().item() for name in self.state_names}

    def load_state_dict(self, state_dict: dict) -> None:
        """Take over a state that `state_dict` returned; the settings of the constructor stay.

        Raises:
            TypeError: if it is not a dict, or a value not a number.
            ValueError: if a key is missing or unknown, or a value out of range. Nothing has changed then.
        """
        owner = type(self).__name__
        check_keys(state_dict, self.state_names, owner)
        values = {name: self._checked_state(name, state_dict[name]) for name in self.state_names}
        for name, value in values.items():
            parameter = getattr(self, name)
            ops.assign(parameter, Tensor(value, parameter.dtype))

    def _checked_state(self, name: str, value: Any) -> float:
        """Return one value of a state dict, checked: a loss scale for `scale_value`, a count for the others."""
        owner = type(self).__name__
        if isinstance(value, Tensor):
            value = value.asnumpy().item()
        if name == "scale_value":
            return check_loss_scale(name, value, owner)
        return check_count(name, value, owner)

    def _make_parameter(self, name: str, value: float, dtype: Any) -> Parameter:
        return Parameter(Tensor(value, dtype), name=f"{self._name_prefix}.{name}", requires_grad=False)


# Code that asks isinstance(scaler, mindspore.amp.LossScaler) gets the answer it needs.
amp.LossScaler.register(LossScaler)


class NoOpLossScaler(LossScaler):
    """No loss scale: for float32 or bfloat16 training with the same code.

    `scale` and `unscale` return their input itself, `adjust` does nothing, and `scale_value` is 1.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import NoOpLossScaler
        >>> from mindspore import Tensor
        >>> loss = Tensor(3.0)
        >>> NoOpLossScaler().scale(loss) is loss
        True
    """

    def __init__(self):
        super().__init__()
        self.scale_value = Tensor(1.0, mstype.float32)

    def scale(self, inputs: Any) -> Any:
        """Return `inputs` itself."""
        return inputs

    def unscale(self, inputs: Any, keep_dtype: bool = True) -> Any:
        """Return `inputs` itself; with ``keep_dtype=False`` cast to float32 where it is narrower."""
        if keep_dtype:
            return inputs
        return map_tensors(cast_up, inputs)

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Return False: nothing ever changes."""
        _flag(grads_finite)
        return False


class StaticLossScaler(LossScaler):
    """A loss scale that never changes by itself.

    Args:
        scale_value: the loss scale, a finite number > 0. Kept as the Parameter `scale_value`, which can be set by
            `mindspore.ops.assign`.
        name: see `LossScaler`. Default: None.

    Raises:
        TypeError: if `scale_value` is not a number.
        ValueError: if it is not finite or not > 0.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> from lossscale import StaticLossScaler
        >>> from mindspore import Tensor
        >>> scaler = StaticLossScaler(scale_value=2**10)
        >>> print(scaler.scale(Tensor([1.0])))
        [1024.]
        >>> gradient = Tensor([1.5], mindspore.float16)
        >>> print(scaler.unscale((gradient,), keep_dtype=False)[0])
        [0.00146484]
    """

    state_names: tuple = ("scale_value",)

    def __init__(self, scale_value: float, *, name: Optional[str] = None):
        super().__init__(name=name)
        start = check_loss_scale("scale_value", scale_value, type(self).__name__)
        self.scale_value = self._make_parameter("scale_value", start, mstype.float32)

    def scale(self, inputs: Any) -> Any:
        """Return `inputs` times `scale_value`, each in its own dtype."""
        return map_tensors(ops.partial(multiply, self.scale_value), inputs)

    def unscale(self, inputs: Any, keep_dtype: bool = True) -> Any:
        """Return `inputs` divided by `scale_value`, in their own dtypes or in at least float32."""
        return map_tensors(ops.partial(_unscale, self.scale_value, keep_dtype), inputs)

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Return False: the scale is fixed."""
        _flag(grads_finite)
        return False


class DynamicLossScaler(StaticLossScaler):
    """A loss scale that falls after an overflow and grows after a window of clean steps.

    `adjust` follows the one rule of this library, that of `DynamicLossScaleUpdateCell`::

        if not grads_finite:             scale_value = max(scale_value / scale_factor, 1);    counter = 0
        elif counter == scale_window-1:  scale_value = scale_value * scale_factor, if finite; counter = 0
        else:                            counter += 1

    ======================= ======= ==============================================
    Parameter               starts  meaning
    ======================= ======= ==============================================
    scale_value             given   the loss scale, float32
    counter                 0       clean steps since the last overflow or growth
    consecutive_overflows   0       overflows in a row up to the last step
    ======================= ======= ==============================================

    Args:
        scale_value: the first loss scale, a finite number > 0; outside the limits it is moved to the nearest one,
            with a warning.
        scale_factor: what the scale is multiplied and divided by, a finite number >= 1, not only an int.
        scale_window: clean steps after which the scale grows, an int > 0.
        min_loss_scale: where falling stops; below 1 is allowed. Default: 1.0.
        max_loss_scale: where growing stops. Default: None, float32's largest number.
        backoff_factor: what the scale is multiplied by on overflow, 0 < backoff_factor <= 1. Default: None,
            1 / `scale_factor`.
        hysteresis: the overflow in a row that makes the scale fall first; each further one does so at once, and a
            clean step refills it. Default: 1.
        name: see `LossScaler`. Default: None.

    Raises:
        TypeError: if a factor is not a number, or the window or hysteresis not an int.
        ValueError: if a value is not finite or out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import DynamicLossScaler, all_finite
        >>> from mindspore import Tensor
        >>> scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=1)
        >>> grads = scaler.unscale((Tensor([float("nan"), 1.0]), Tensor([0.2])), keep_dtype=False)
        >>> scaler.adjust(all_finite(grads))
        True
        >>> print(scaler.scale_value.asnumpy())
        512.0
    """

    state_names: tuple = ("scale_value", "counter", "consecutive_overflows")

    def __init__(
        self,
        scale_value: float,
        scale_factor: float,
        scale_window: int,
        *,
        min_loss_scale: float = 1.0,
        max_loss_scale: Optional[float] = None,
        backoff_factor: Optional[float] = None,
        hysteresis: int = 1,
        name: Optional[str] = None,
    ):
        owner = type(self).__name__
        rule = LossScaleRule.checked(
            owner, scale_factor, scale_window, min_loss_scale, max_loss_scale, backoff_factor, hysteresis
        )
        start = check_loss_scale("scale_value", scale_value, owner)
        super().__init__(rule.clamp("scale_value", start, owner), name=name)
        self.scale_factor = rule.scale_factor
        self.scale_window = rule.scale_window
        self.hysteresis = rule.hysteresis
        self.growth = Tensor(rule.scale_factor, mstype.float32)
        self.backoff = Tensor(rule.backoff_factor, mstype.float32)
        self.minimum = Tensor(rule.min_loss_scale, mstype.float32)
        self.maximum = Tensor(rule.max_loss_scale, mstype.float32)
        self.counter = self._make_parameter("counter", 0, mstype.int32)
        self.consecutive_overflows = self._make_parameter("consecutive_overflows", 0, mstype.int32)

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Move the scale as the rule says; returns True. In place, seen by compiled graphs."""
        finite = _flag(grads_finite)
        overflow = ops.logical_not(finite)
        in_a_row = (self.consecutive_overflows + 1) * overflow.astype(mstype.int32)
        backs_off = overflow if self.hysteresis == 1 else in_a_row >= self.hysteresis
        clean = (self.counter + 1) * finite.astype(mstype.int32)
        window_is_full = clean >= self.scale_window
        new_scale = next_loss_scale(
            self.scale_value, backs_off, window_is_full, self.growth, self.backoff, self.minimum, self.maximum
        )
        ops.assign(self.consecutive_overflows, in_a_row)
        ops.assign(self.counter, clean * ops.logical_not(window_is_full).astype(mstype.int32))
        ops.assign(self.scale_value, new_scale)
        return True


def _unscale(scale: Tensor, keep_dtype: bool, grad: Tensor) -> Tensor:
    wide = unscale_wide(grad, scale)
    return cast_like(grad, wide) if keep_dtype else wide


def _flag(grads_finite: Any) -> Tensor:
    """Return a bool, or a bool Tensor of one value, as a bool scalar."""
    if isinstance(grads_finite, bool):
        return Tensor(grads_finite, mstype.bool_)
    if not isinstance(grads_finite, Tensor) or grads_finite.dtype != mstype.bool_ or grads_finite.size != 1:
        raise TypeError(
            f"'grads_finite' must be a bool Tensor of one value or a bool, but got {grads_finite}. Write "
            "scaler.adjust(all_finite(grads))."
        )
    return grads_finite.reshape(())
