"""Optimizers that unscale, check and update in one native op: a scaled step for less than a stock plain one.

The protocol, for any optimizer of one's own: where its attribute `takes_scaled_gradients` is True, the train step
hands it the gradients as they come from the backward pass, reduced over the devices but still scaled::

    overflow, flags = optimizer.apply_scaled_gradients(gradients, loss_scale)

and it answers with a bool scalar and a bool Tensor of shape (n,), which of the n gradients hold inf or nan once
unscaled; on overflow it has changed nothing at all, `global_step` included. There is no branch in the graph. The
train step compiles this call in PYNATIVE_MODE too, as MindSpore does with its optimizers.
"""

import warnings
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from cells.backends import backend
from cells.native import flag_shapes, in_place_op


def _fused_op(name: str, tensors: int, states: int) -> ops.Custom:
    """Return entry point `name` for so many tensors, each with a gradient to read and a weight and states to write."""

    def out_shape(*inputs):
        return tuple(flag_shapes(tensors))

    def out_dtype(*inputs):
        return (mstype.bool_, mstype.bool_)

    return in_place_op(name, out_shape, out_dtype, read=4 + tensors, written=tensors * (1 + states))


class _Fused(nn.Optimizer):
    """What the fused optimizers share; a mix-in before the optimizer that is fused."""

    def _fuse(self, op_name: str, states: list, options: list, unsupported: dict) -> None:
        """Prepare the native op, or warn once why the generic path stays."""
        self.takes_scaled_gradients = False
        reasons = [reason for reason, holds in unsupported.items() if holds]
        reasons += _common_reasons(self)
        if reasons:
            _warn_once(self.cls_name, reasons[0])
            return
        weights = list(self.parameters)
        self.fused_op = _fused_op(op_name, len(weights), len(states))
        self.fused_states = states
        self.checked_options = Tensor([*options, 1], mstype.float32)
        self.unchecked_options = Tensor([*options, 0], mstype.float32)
        self.unit_scale = Tensor(1.0, mstype.float32)
        decays = np.array(self.decay_flags, np.float32)
        if self.is_group:
            decays *= np.array([float(decay.asnumpy()) for decay in self.weight_decay], np.float32)
        elif not self.dynamic_weight_decay:
            decays *= np.float32(self.weight_decay.asnumpy())
        self.decays = Tensor(decays)
        self.lr_indices = Tensor([0], mstype.int32)
        if self.is_group_lr:
            distinct = {id(lr): lr for lr in self.group_lr}
            order = list(distinct)
            self.lr_indices = Tensor([order.index(id(lr)) for lr in self.group_lr], mstype.int32)
            self.lr_firsts = tuple([id(lr) for lr in self.group_lr].index(key) for key in order)
        self.takes_scaled_gradients = True

    def apply_scaled_gradients(self, gradients: tuple, loss_scale: Tensor) -> tuple:
        """Unscale, look for overflow and update if there is none, all in place.

        Args:
            gradients: the gradients of loss_scale * loss, in the order of `parameters`; float16, bfloat16, float32 or
                float64.
            loss_scale: float32 scalar.

        Returns:
            Bool scalar `overflow`, and a bool Tensor of shape (n,): which gradients are non-finite.
        """
        return self._apply(gradients, loss_scale, self.checked_options)

    def apply_gradients(self, gradients: tuple) -> Tensor:
        """Update with gradients that are not scaled, whatever they hold, as `construct` does; return a bool scalar."""
        overflow, _ = self._apply(gradients, self.unit_scale, self.unchecked_options)
        return overflow

    def _apply(self, gradients: tuple, scale: Tensor, options: Tensor) -> tuple:
        lr = self._fused_lr()
        decays = self._fused_decays()
        outputs = self.fused_op(scale, lr, decays, options, *gradients, *self.parameters, *self._fused_state())
        overflow = outputs[0].reshape(())
        self.assignadd(self.global_step, ops.logical_not(outputs[0]).astype(mstype.int32))
        return overflow, outputs[1]

    def _fused_lr(self) -> Tensor:
        """Return the learning rates of this step, shape (1,) or (n,)."""
        if not self.is_group_lr:
            return self.get_lr().reshape((1,))
        rates: tuple = ()
        for first in self.lr_firsts:
            rate = self.learning_rate[first]
            if self.dynamic_lr:
                rate = rate(self.global_step)
            rates += (rate.reshape((1,)),)
        return ops.gather(ops.cat(rates), self.lr_indices, 0)

    def _fused_decays(self) -> Tensor:
        """Return the weight decay of each parameter in this step, shape (n,)."""
        if self.dynamic_weight_decay:
            return self.decays * self.weight_decay(self.global_step)
        return self.decays


def _common_reasons(optimizer: nn.Optimizer) -> list:
    """Return why the native op can't stand for `optimizer`, if anything."""
    checks = {
        "the native kernel does not run here": backend() != "native",
        "a parameter is not float32": any(p.dtype != mstype.float32 for p in optimizer.parameters),
        "the optimizer has a loss_scale of its own": optimizer.loss_scale != 1.0,
        "gradients are centralized": optimizer.is_group and any(optimizer.grad_centralization_flags),
        "a group has a weight-decay schedule": optimizer.is_group and any(optimizer.dynamic_decay_flags),
        "the optimizer is spread over devices": optimizer.use_parallel,
    }
    return [reason for reason, holds in checks.items() if holds]


_warned: set = set()


def _warn_once(owner: str, reason: str) -> None:
    if (owner, reason) not in _warned:
        _warned.add((owner, reason))
        warnings.warn(f"{owner} runs like MindSpore's own optimizer, not fused: {reason}.", stacklevel=5)


class FusedMomentum(_Fused, nn.Momentum):
    """`nn.Momentum` that under `TrainOneStepWithLossScaleCell` does the whole update in one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient = gradient / loss_scale + weight_decay * weight
            moment   = moment * momentum + gradient
            weight   = weight - moment * learning_rate

    Arguments, Parameters, their names, schedules, groups and checkpoints are those of `nn.Momentum`, and so are
    the results, to the bit: a run may switch between the two. Where the native kernel is missing, or for what it
    does not cover (Parameters that are not float32, `use_nesterov`, `loss_scale`, centralized gradients, weight
    decay schedules of groups), it *is* `nn.Momentum`, with one warning.

    Experimental: the op writes Parameters through its inputs, declared as MindSpore's own optimizer ops are.

    Args:
        params, learning_rate, momentum, weight_decay, loss_scale, use_nesterov: see `mindspore.nn.Momentum`.

    Inputs:
        - **gradients** (tuple[Tensor]) - the gradients of `params`. Called like this it runs `nn.Momentum`'s ops.

    Outputs:
        tuple[bool], all True.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import DynamicLossScaleUpdateCell, FusedMomentum, TrainOneStepWithLossScaleCell
        >>> net = nn.Dense(4, 1)
        >>> optimizer = FusedMomentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update = DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=1000)
        >>> step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update)
        >>> x, y = Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> loss, overflow, loss_scale = step(x, y)
        >>> print(overflow, loss_scale)
        False 4096.0
    """

    def __init__(
        self,
        params: Any,
        learning_rate: Any,
        momentum: float,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        use_nesterov: bool = False,
    ):
        super().__init__(params, learning_rate, momentum, weight_decay, loss_scale, use_nesterov)
        self._fuse("momentum", [self.moments], [momentum], {"use_nesterov is not covered": use_nesterov})

    def _fused_state(self) -> tuple:
        return self.moments


class FusedAdamWeightDecay(_Fused, nn.AdamWeightDecay):
    """`nn.AdamWeightDecay` that under `TrainOneStepWithLossScaleCell` does the whole update in one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient = gradient / loss_scale
            m        = m + (gradient - m) * (1 - beta1)
            v        = v + (gradient**2 - v) * (1 - beta2)
            weight   = weight - learning_rate * (m / (sqrt(v) + eps) + weight_decay * weight)

    Arguments, Parameters, their names, schedules, groups and checkpoints are those of `nn.AdamWeightDecay`: a run
    may switch between the two. Results are MindSpore's to the bit where its kernel computes by AVX2, and differ in
    the last bits on other machines. Where the native kernel is missing, or for what it does not cover (Parameters
    that are not float32, centralized gradients, weight-decay schedules of groups), it *is* `nn.AdamWeightDecay`,
    with one warning.

    Experimental: the op writes Parameters through its inputs, declared as MindSpore's own optimizer ops are.

    Args:
        params, learning_rate, beta1, beta2, eps, weight_decay: see `mindspore.nn.AdamWeightDecay`.

    Inputs:
        - **gradients** (tuple[Tensor]) - the gradients of `params`. Called like this it runs MindSpore's own ops.

    Outputs:
        tuple[bool], all True.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import FusedAdamWeightDecay
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = FusedAdamWeightDecay(net.trainable_params(), learning_rate=1e-3, weight_decay=0.01)
        >>> isinstance(optimizer, nn.AdamWeightDecay)
        True
    """

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: Any = 0.0,
    ):
        super().__init__(params, learning_rate, beta1, beta2, eps, weight_decay)
        self._fuse("adam_weight_decay", [self.moments1, self.moments2], [beta1, beta2, eps], {})

    def _fused_state(self) -> tuple:
        return (*self.moments1, *self.moments2)
