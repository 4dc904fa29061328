"""`GradScaler`: PyTorch's names, rules and stages for loss scaling, with MindSpore's explicit gradients."""

import weakref
from typing import Any, Optional, Union

from mindspore import Tensor, jit_class, ops
from mindspore import dtype as mstype

from cells.ranks import on_any_rank
from cells.scalers import scale_tree, unscale_and_check
from lossscale._scale_state import ScaleState, checked_scale
from lossscale._stages import OptimizerState, Stage, checked_gradients


@jit_class
class GradScaler(ScaleState):
    """Scales losses, unscales gradients, skips steps that overflowed, and adjusts the scale, as PyTorch's does.

    ::

        scaler = GradScaler()

        def forward(x, y):
            loss = loss_fn(net(x), y)
            return scaler.scale(loss), loss

        grad_fn = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

        for x, y in batches:
            (_, loss), grads = grad_fn(x, y)
            grads = scaler.unscale_(optimizer, grads)           # optional: to clip or to look at them
            grads = ops.clip_by_global_norm(grads, max_norm)
            scaler.step(optimizer, grads)
            scaler.update()

    The rule, once per `update`::

        if any optimizer's gradients held inf or nan:  scale = scale * backoff_factor; tracker = 0
        else:  tracker += 1
               if tracker == growth_interval:          scale = scale * growth_factor, if finite; tracker = 0

    in float64, rounded to float32 once: the same series of scales as PyTorch's to the bit, except that it stops at
    the smallest normal float32 (2**-126) where PyTorch's goes on to 0 and never comes back.

    In data parallel, reduce the gradients over the ranks before or after `unscale_`, as you like: whether any
    overflowed is asked of all ranks, by one SUM of one float, so all skip and scale alike. Every rank must make the
    same calls.

    The scale is a Parameter, so `scale` and `get_scale` may be used in functions compiled by MindSpore, which see
    it change without being compiled again. `unscale_`, `step` and `update` are host calls, for Python only.

    Args:
        init_scale: the first scale, a finite number > 0. Default: 2.0**16.
        growth_factor: what the scale is multiplied by after `growth_interval` clean iterations in a row, > 1.
            Default: 2.0.
        backoff_factor: what it is multiplied by after an overflow, between 0 and 1. Default: 0.5.
        growth_interval: an int > 0. Default: 2000.
        enabled: False makes every call pass its input through: training is the same as without a scaler.
            Default: True.

    Attributes:
        consecutive_skips: iterations in a row, up to the last `update`, in which some optimizer was skipped.
        total_skips: all such iterations.

    Raises:
        TypeError: if an argument has the wrong type; PyTorch's device comes first there and is not wanted here.
        ValueError: if a number is out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import numpy as np
        >>> from lossscale import GradScaler
        >>> from mindspore import Tensor, nn
        >>> net, loss_fn = nn.Dense(4, 1), nn.MSELoss()
        >>> optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
        >>> scaler = GradScaler(init_scale=1024.0, growth_interval=1)
        >>> def forward(x, y):
        ...     loss = loss_fn(net(x), y)
        ...     return scaler.scale(loss), loss
        >>> grad_fn = mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
        >>> _, grads = grad_fn(Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> _ = scaler.step(optimizer, grads)
        >>> scaler.update()
        >>> scaler.get_scale(), scaler.step_was_skipped()
        (2048.0, False)
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        super().__init__(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._last_step_skipped = False
        self._skipped: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._states: dict[Any, OptimizerState] = {}

    def scale(self, outputs: Any) -> Any:
        """Return `outputs`, usually the loss, times the scale, each in its own dtype. In compiled functions too.

        Args:
            outputs: a Tensor, or Tensors in nested tuples, lists and dicts.

        Raises:
            TypeError: if something else is in `outputs`.
        """
        if not self._enabled:
            return outputs
        return scale_tree(self._scale, outputs)

    def unscale_(self, optimizer: Any, grads: Any) -> Any:
        """Return this optimizer's gradients divided by the scale, in float32 (float64 for float64), and check them.

        Optional, once per iteration, before `step`: to clip gradients or to look at them. Unlike PyTorch's it does
        not change its input, so take what it returns; `step` refuses the tensors that went in. Whether they
        overflowed is decided here: what is done to them afterwards is not checked. A host call that does not
        wait for the device.

        Args:
            optimizer: the optimizer that will get the gradients.
            grads: one gradient for each of `optimizer.parameters`, of the scaled loss.

        Raises:
            RuntimeError: if it was called before for this optimizer since the last `update`, or after `step`.
            TypeError: if `grads` is not a tuple or list of Tensors.
            ValueError: if the gradients don't fit the parameters, a parameter is float16, or the optimizer was
                built with a `loss_scale`.
        """
        if not self._enabled:
            return grads
        state = self._states.get(optimizer, OptimizerState())
        state.check_can_unscale()
        scaled = checked_gradients(optimizer, grads)
        unscaled = self._unscale_and_check(state, scaled)
        state.scaled = scaled
        self._states[optimizer] = state
        return unscaled

    def _unscale_and_check(self, state: OptimizerState, grads: tuple) -> tuple:
        unscaled, overflow = unscale_and_check(grads, self._scale)
        state.overflow = on_any_rank(overflow)  # the gradients may be this rank's own
        state.stage = Stage.UNSCALED
        return unscaled

    def step(self, optimizer: Any, grads: Any, *args: Any) -> Any:
        """Call ``optimizer(grads, *args)`` unless the gradients overflowed; unscale them first if `unscale_` did not.

        A host call that waits for the device: it has to read whether the gradients overflowed. A skipped step
        leaves weights, optimizer state and learning-rate schedule as they were.

        Args:
            optimizer: an optimizer of `mindspore.nn` or `mindspore.experimental.optim`.
            grads: the gradients of the scaled loss or, after `unscale_`, what that returned.
            *args: passed on to the optimizer.

        Returns:
            What the optimizer returns, None if the step was skipped.

        Raises:
            RuntimeError: if this optimizer has stepped since the last `update`, or the gradients are those that
                `unscale_` was given.
            TypeError: as `unscale_`.
            ValueError: as `unscale_`.
        """
        if not self._enabled:
            return optimizer(grads, *args)
        state = self._states.get(optimizer, OptimizerState())
        checked = checked_gradients(optimizer, grads)
        state.check_can_step(checked)
        if state.stage is Stage.READY:
            checked = self._unscale_and_check(state, checked)
        skipped = bool(state.overflow)
        result = None if skipped else optimizer(_as_parameters(optimizer, checked), *args)
        # Noted only now: had the optimizer raised, the call could be repeated.
        self._states[optimizer] = OptimizerState(Stage.STEPPED, state.overflow, skipped=skipped)
        self._last_step_skipped = skipped
        self._skipped[optimizer] = skipped
        return result

    def update(self, new_scale: Optional[Union[float, Tensor]] = None) -> None:
        """Adjust the scale, once per iteration, after all optimizers have stepped.

        A host call that waits for the device only for an optimizer that was unscaled but has not stepped.

        Args:
            new_scale: a number or a Tensor of one value, to set the scale by hand in place of the rule.

        Raises:
            RuntimeError: if no optimizer was unscaled or stepped since the last `update`.
            TypeError: if `new_scale` is not a number or a Tensor of one value.
            ValueError: if it can't be a scale.
        """
        if not self._enabled:
            return
        states = list(self._states.values())
        if new_scale is not None:
            ops.assign(self._scale, Tensor(checked_scale("new_scale", new_scale), mstype.float32))
        elif not states:
            raise RuntimeError(
                "update() was called before any step(): there are no gradients to judge the scale by. Call "
                "scaler.step(optimizer, grads) first, then update() once."
            )
        else:
            self._adjust(any(bool(state.overflow) for state in states))
        skipped = any(state.skipped for state in states)
        if states:
            self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
            self.total_skips += skipped
        self._begin_iteration()

    def step_was_skipped(self, optimizer: Optional[Any] = None) -> bool:
        """Return whether the last `step` was skipped: of this optimizer, or of any if None. True until the next one.

        For a learning-rate scheduler: ``if not scaler.step_was_skipped(): scheduler.step()``.
        """
        if optimizer is None:
            return self._last_step_skipped
        return self._skipped.get(optimizer, False)

    def __getstate__(self) -> dict:
        if self._states:
            raise RuntimeError("A GradScaler can be pickled or copied between iterations only: call update() first.")
        arguments = (self._growth_factor, self._backoff_factor, self._growth_interval, self._enabled)
        counts = (self._growth_tracker, self.consecutive_skips, self.total_skips)
        return {"arguments": (float(self._scale), *arguments), "counts": counts}

    def __setstate__(self, state: dict) -> None:
        GradScaler.__init__(self, *state["arguments"])
        self._growth_tracker, self.consecutive_skips, self.total_skips = state["counts"]


def _as_parameters(optimizer: Any, grads: tuple) -> tuple:
    """Return the gradients in the dtypes of the parameters, for those that are not float32."""
    pairs = zip(grads, optimizer.parameters)
    return tuple([grad if grad.dtype == par.dtype else grad.astype(par.dtype) for grad, par in pairs])
