"""Functional scalers: one interface (`scale`, `unscale`, `adjust`) for a dynamic, a fixed and no loss scale."""

import itertools
import sys
from typing import Any, Optional, Union

from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner

from cells.checks import check_loss_scale
from cells.finite import any_nonfinite, native_arithmetic, way_to_look
from cells.gradient_ops import cast_up, usable_scale
from cells.scale_rule import LARGEST_INT32, LossScaleRule, advance
from cells.state_dict import check_count, check_keys
from cells.trees import check_tree, tree_map

_numbers = itertools.count(1)
_scale = ops.MultitypeFuncGraph("scale")
_unscale = ops.MultitypeFuncGraph("unscale")
_unscale_wide = ops.MultitypeFuncGraph("unscale_wide")


@_scale.register("Tensor", "Tensor")
def _scale_tensor(factor, tensor):
    return tensor * factor.astype(tensor.dtype)


@_scale.register("Tensor", "RowTensor")
def _scale_row_tensor(factor, tensor):
    return RowTensorInner(tensor.indices, _scale_tensor(factor, tensor.values), tensor.dense_shape)


@_unscale_wide.register("Tensor", "Tensor", "Tensor")
def _unscale_wide_tensor(first, second, grad):
    # First the usual dtype, without a cast: each op of this function is compiled once a gradient.
    if grad.dtype == mstype.float32:
        return grad * first * second
    if grad.dtype == mstype.float64:
        return grad * first.astype(mstype.float64) * second.astype(mstype.float64)
    return grad.astype(mstype.float32) * first * second


@_unscale_wide.register("Tensor", "Tensor", "RowTensor")
def _unscale_wide_row_tensor(first, second, grad):
    return RowTensorInner(grad.indices, _unscale_wide_tensor(first, second, grad.values), grad.dense_shape)


@_unscale.register("Tensor", "Tensor", "Tensor")
def _unscale_tensor(first, second, grad):
    if grad.dtype == mstype.float32:
        return grad * first * second
    return _unscale_wide_tensor(first, second, grad).astype(grad.dtype)


@_unscale.register("Tensor", "Tensor", "RowTensor")
def _unscale_row_tensor(first, second, grad):
    return RowTensorInner(grad.indices, _unscale_tensor(first, second, grad.values), grad.dense_shape)


def scale_tree(scale: Tensor, tree: Any) -> Any:
    """Return each Tensor of a tree times `scale`, in its own dtype. Differentiable.

    Raises:
        TypeError: if something else is in the tree.
        RuntimeError: in a function that MindSpore captures by its bytecode.
    """
    _refuse_bytecode()
    check_tree(tree)
    return tree_map(ops.partial(_scale, scale), tree)


@ops.constexpr
def _refuse_bytecode() -> None:
    """Raise RuntimeError in a function under ``jit(capture_mode="bytecode")``, whose gradients would be 0 in silence.

    MindSpore captures the script's own module there, calls other modules' functions in between, and then loses what
    leads from one captured part to the next.
    """
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_fn" and frame.f_code.co_filename.endswith("pijit_context.py"):
            raise RuntimeError(
                'In a function under mindspore.jit(capture_mode="bytecode") the gradients of scale() would all be 0. '
                "Use mindspore.jit without capture_mode, or write loss * scaler.scale_value."
            )
        frame = frame.f_back


def unscale_tree(scale: Tensor, tree: Any, keep_dtype: bool = False) -> Any:
    """Return each Tensor of a tree times the reciprocal of `scale`, computed in at least float32. Differentiable.

    Above 2**126 the reciprocal is subnormal, which some CPU threads flush to zero; so the product is formed in two
    steps, of which the second is a multiply by 1 for any smaller scale.
    """
    check_tree(tree)
    usable = usable_scale(scale)
    unscale = _unscale if keep_dtype else _unscale_wide
    return tree_map(ops.partial(unscale, ops.reciprocal(usable), usable / scale), tree)


def unscale_and_check(grads: tuple, scale: Tensor) -> tuple:
    """Return (grads / scale in at least float32, whether any value of them is inf or nan). Not for compiled code."""
    if way_to_look(grads) == "native":
        unscaled, flags, _ = native_arithmetic().divide_and_look(scale, grads)
        return unscaled, flags.any()
    unscaled = unscale_tree(scale, grads)
    return unscaled, any_nonfinite(unscaled)


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

    A subclass lists its Parameters in `state_names`; it need not call ``super().__init__()``.

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

    def __setattr__(self, name: str, value: Any) -> None:
        # MindSpore's LossScaler has no constructor, so subclasses written for it call none; a Cell needs its own.
        if name != "__dict__" and "_params" not in self.__dict__:
            LossScaler.__init__(self)
        super().__setattr__(name, value)

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
            value = value.asnumpy().item() if value.size == 1 else value
        if name == "scale_value":
            return check_loss_scale(name, value, owner)
        return check_count(name, value, owner, LARGEST_INT32)

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
        check_tree(inputs)
        return tree_map(cast_up, inputs)

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
        return scale_tree(self.scale_value, inputs)

    def unscale(self, inputs: Any, keep_dtype: bool = True) -> Any:
        """Return `inputs` divided by `scale_value`, in their own dtypes or in at least float32."""
        return unscale_tree(self.scale_value, inputs, keep_dtype)

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Return False: the scale is fixed."""
        _flag(grads_finite)
        return False


class DynamicLossScaler(StaticLossScaler):
    """A loss scale that falls after an overflow and grows after a window of clean steps, by the rule of the library.

    `adjust` is one step of `cells.scale_rule.advance`.

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
        scale_window: clean steps after which the scale grows, an int > 0; from 2**31 - 1 on it never does.
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
        self.rule = rule.tensors()
        self.counter = self._make_parameter("counter", 0, mstype.int32)
        self.consecutive_overflows = self._make_parameter("consecutive_overflows", 0, mstype.int32)

    def adjust(self, grads_finite: Union[Tensor, bool]) -> bool:
        """Move the scale as the rule says; returns True. In place, seen by compiled graphs."""
        overflow = ops.logical_not(_flag(grads_finite))
        scale, clean_steps, in_a_row = advance(
            self.rule, self.scale_value, self.counter, self.consecutive_overflows, overflow
        )
        ops.assign(self.consecutive_overflows, in_a_row)
        ops.assign(self.counter, clean_steps)
        ops.assign(self.scale_value, scale)
        return True


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
