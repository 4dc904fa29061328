"""Optimizers that unscale, check and update in one native op: a scaled step for less than a stock plain one.

The protocol, for any optimizer of one's own: where its attribute `takes_scaled_gradients` is True, the train step
hands it the gradients as they come from the backward pass, reduced over the devices but still scaled::

    overflow, flags = optimizer.apply_scaled_gradients(gradients, loss_scale)

and it answers with a bool scalar and a bool Tensor of shape (n,), which of the n gradients hold inf or nan once
unscaled; on overflow it has changed nothing at all, `global_step` included. There is no branch in the graph. The
train step compiles this call in PYNATIVE_MODE too, as MindSpore does with its optimizers.

Where `takes_gradient_factor` is True as well, a step that accumulates, clips by the global norm, averages the weights
or reports the norm looks at the gradients itself and calls::

    optimizer.apply_scaled_gradients(gradients, loss_scale, factor, skip)

The optimizer multiplies the gradients by `factor`, a scalar (unscaling, mean and clip in one), and looks for nothing;
where `skip`, a bool scalar, is True, it changes nothing.
"""

import warnings
from typing import Any, Optional

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype
from mindspore.experimental import optim

from cells.backends import backend
from cells.native import flag_shapes, in_place_op

# What the last option of a native op says about its first input, see `FusedMode` in native/ops.cc.
_UNCHECKED, _CHECKED, _FACTOR = range(3)


def _fused_op(name: str, tensors: int, states: int, scalars: int) -> ops.Custom:
    """Return entry point `name` for so many tensors, each with a gradient to read and a weight and states to write.

    It writes so many scalars as well, and the count of steps.
    """

    def out_shape(*inputs):
        return tuple(flag_shapes(tensors))

    def out_dtype(*inputs):
        return (mstype.bool_, mstype.bool_)

    written = tensors * (1 + states) + scalars + 1
    return in_place_op(name, out_shape, out_dtype, read=6 + tensors, written=written)


class Fused:
    """What the fused optimizers share; a mix-in before the optimizer that is fused.

    Each says what its op needs by the methods of this class that return nothing here.
    """

    takes_scaled_gradients = takes_gradient_factor = False
    op_name: str

    def _fuse(self: Any) -> None:
        """Prepare the native op, or warn once why the generic path stays."""
        reason = self._reason_against()
        if reason:
            warn_not_fused(self, reason)
            return
        states, scalars = self._states(), self._scalars()
        self.fused_op = _fused_op(self.op_name, len(self.parameters), len(states), len(scalars))
        modes = [Tensor([*self._options(), mode], mstype.float32) for mode in (_UNCHECKED, _CHECKED, _FACTOR)]
        self.unchecked_options, self.checked_options, self.factor_options = modes
        self.unit_scale = Tensor(1.0, mstype.float32)
        self.never = Tensor(False, mstype.bool_)
        self._prepare_rates()
        self.takes_scaled_gradients = self.takes_gradient_factor = True

    def apply_scaled_gradients(
        self: Any,
        gradients: tuple,
        loss_scale: Tensor,
        factor: Optional[Tensor] = None,
        skip: Optional[Tensor] = None,
    ) -> tuple:
        """Unscale, look for overflow and update if there is none, all in place.

        Args:
            gradients: the gradients of loss_scale * loss, in the order of `parameters`; float16, bfloat16, float32 or
                float64.
            loss_scale: float32 scalar.
            factor: float32 or float64 scalar. Gradients are multiplied by it, in place of 1 / loss_scale, and nobody
                looks for overflow. Default: None.
            skip: with `factor`, a bool scalar: whether to change nothing. Default: None.

        Returns:
            Bool scalar `overflow`, and a bool Tensor of shape (n,): which gradients are non-finite. With `factor`,
            `skip` and False.
        """
        if factor is None:
            return self._apply(gradients, loss_scale, self.never, self.checked_options)
        return self._apply(gradients, factor, self.never if skip is None else skip, self.factor_options)

    def apply_gradients(self: Any, gradients: tuple) -> Tensor:
        """Update with gradients that are not scaled, whatever they hold, as `construct` does; return a bool scalar."""
        overflow, _ = self._apply(gradients, self.unit_scale, self.never, self.unchecked_options)
        return overflow

    def _apply(self: Any, gradients: tuple, factor: Tensor, skip: Tensor, options: Tensor) -> tuple:
        fixed = (factor, skip, self._rates(), self._decays(), self._number(), options)
        states: tuple = ()
        for state in self._states():
            states = (*states, *state)
        outputs = self.fused_op(*fixed, *gradients, *self.parameters, *states, *self._scalars(), self._steps())
        return outputs[0].reshape(()), outputs[1]

    def _number(self: Any) -> Tensor:
        """Return the float32 scalar that the op reads in each step, where it needs one."""
        return self.unit_scale

    def _scalars(self) -> tuple:
        """Return the scalar Parameters that the op writes."""
        return ()


class _FusedStock(Fused):
    """A mix-in for the optimizers of `mindspore.nn`."""

    def _reason_against(self: Any) -> Optional[str]:
        """Return why the native op can't stand for this optimizer, if anything."""
        centralized = self.is_group and any(self.grad_centralization_flags)
        checks = {
            **self._unsupported(),
            **_common_checks(self),
            "the optimizer has a loss_scale of its own": self.loss_scale != 1.0,
            "gradients are centralized": centralized,
            "a group has a weight-decay schedule": self.is_group and any(self.dynamic_decay_flags),
            "the optimizer is spread over devices": self.use_parallel,
        }
        return next((reason for reason, holds in checks.items() if holds), None)

    def _unsupported(self) -> dict:
        """Return what else this optimizer's op does not cover: reasons, and whether each holds."""
        return {}

    def _prepare_rates(self: Any) -> None:
        decays = np.array(self.decay_flags, np.float32)
        if self.is_group:
            decays *= np.array([float(decay.asnumpy()) for decay in self.weight_decay], np.float32)
        elif not self.dynamic_weight_decay:
            decays *= np.float32(self.weight_decay.asnumpy())
        self.fused_decays = Tensor(decays)
        self.lr_indices = Tensor([0], mstype.int32)
        if self.is_group_lr:
            distinct = {id(lr): lr for lr in self.group_lr}
            order = list(distinct)
            self.lr_indices = Tensor([order.index(id(lr)) for lr in self.group_lr], mstype.int32)
            self.lr_firsts = tuple([id(lr) for lr in self.group_lr].index(key) for key in order)

    def _rates(self: Any) -> Tensor:
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

    def _decays(self: Any) -> Tensor:
        """Return the weight decay of each parameter in this step, shape (n,)."""
        if self.dynamic_weight_decay:
            return self.fused_decays * self.weight_decay(self.global_step)
        return self.fused_decays

    def _steps(self: Any) -> Tensor:
        """Return the count of steps."""
        return self.global_step


def _common_checks(optimizer: Any) -> dict:
    """Return what stands against the native op whatever the optimizer: reasons, and whether each holds."""
    return {
        "the native kernel does not run here": backend() != "native",
        "a parameter is not float32": any(p.dtype != mstype.float32 for p in optimizer.parameters),
    }


_warned: set = set()


def _warn_once(message: str, level: int) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=level)


def warn_not_fused(optimizer: Any, reason: str) -> None:
    """Warn once that `optimizer` runs MindSpore's own ops, and why."""
    _warn_once(f"{type(optimizer).__name__} runs like MindSpore's own optimizer, not fused: {reason}.", 5)


class FusedMomentum(_FusedStock, nn.Momentum):
    """`nn.Momentum` that under `TrainOneStepWithLossScaleCell` does the whole update in one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient = gradient / loss_scale + weight_decay * weight
            moment   = moment * momentum + gradient
            weight   = weight - moment * learning_rate

    Arguments, Parameters, their names, schedules, groups and checkpoints are those of `nn.Momentum`, and so are
    the results, to the bit: a run may switch between the two. Where the native kernel is missing, or for what it
    does not cover (Parameters that are not float32, `loss_scale`, centralized gradients, weight-decay schedules of
    groups), it *is* `nn.Momentum`, with one warning. On CPU `nn.Momentum` ignores `use_nesterov`, and so does this
    one, with a warning; `FusedSGD` heeds `nesterov`.

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

    op_name = "momentum"

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
        self._fuse()

    def _fuse(self) -> None:
        super()._fuse()
        if self.takes_scaled_gradients and self.use_nesterov:
            _warn_once(
                "On CPU MindSpore's nn.Momentum ignores use_nesterov, and FusedMomentum trains like it. Write "
                "nn.SGD(..., nesterov=True) or lossscale.FusedSGD for Nesterov's momentum.",
                4,
            )

    def _options(self) -> list:
        return []

    def _number(self) -> Tensor:
        return self.momentum

    def _states(self) -> tuple:
        return (self.moments,)


class FusedAdamWeightDecay(_FusedStock, nn.AdamWeightDecay):
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

    op_name = "adam_weight_decay"

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
        self._fuse()

    def _options(self) -> list:
        return [float(value.asnumpy()[0]) for value in (self.beta1, self.beta2, self.eps)]

    def _states(self) -> tuple:
        return (self.moments1, self.moments2)


class FusedSGD(_FusedStock, nn.SGD):
    """`nn.SGD` that under `TrainOneStepWithLossScaleCell` does the whole update in one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient = gradient / loss_scale + weight_decay * weight
            if momentum > 0:
                accum    = gradient if it is the first one else accum * momentum + gradient * (1 - dampening)
                gradient = gradient + accum * momentum if nesterov else accum
            weight   = weight - gradient * learning_rate

    Arguments, Parameters, their names, schedules, groups and checkpoints are those of `nn.SGD`, and so are the
    results, to the bit. For what the native kernel does not cover see `FusedMomentum`.

    Experimental: the op writes Parameters through its inputs, declared as MindSpore's own optimizer ops are.

    Args:
        params, learning_rate, momentum, dampening, weight_decay, nesterov, loss_scale: see `mindspore.nn.SGD`.

    Inputs:
        - **gradients** (tuple[Tensor]) - the gradients of `params`. Called like this it runs MindSpore's own ops.

    Outputs:
        tuple[bool], all True.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import FusedSGD
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = FusedSGD(net.trainable_params(), learning_rate=0.1, momentum=0.9, nesterov=True)
        >>> isinstance(optimizer, nn.SGD)
        True
    """

    op_name = "sgd"

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 0.1,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        loss_scale: float = 1.0,
    ):
        super().__init__(params, learning_rate, momentum, dampening, weight_decay, nesterov, loss_scale)
        self._fuse()

    def _options(self) -> list:
        return [self.dampening, self.nesterov]

    def _number(self) -> Tensor:
        return self.momentum

    def _states(self) -> tuple:
        return (self.accum, self.stat)


class FusedAdam(_FusedStock, nn.Adam):
    """`nn.Adam` that under `TrainOneStepWithLossScaleCell` does the whole update in one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient  = gradient / loss_scale + weight_decay * weight
            m         = m + (gradient - m) * (1 - beta1)
            v         = v + (gradient**2 - v) * (1 - beta2)
            direction = m * beta1 + gradient * (1 - beta1) if use_nesterov else m
            rate      = learning_rate * sqrt(1 - beta2**step) / (1 - beta1**step)
            weight    = weight - rate * direction / (sqrt(v) + eps)

    Arguments, Parameters, their names, schedules, groups and checkpoints are those of `nn.Adam`: a run may switch
    between the two. Results differ in the last bits at most. Not covered, beside what `FusedMomentum` names, are
    `use_amsgrad`, `use_lazy` and `use_offload`.

    Experimental: the op writes Parameters through its inputs, declared as MindSpore's own optimizer ops are.

    Args:
        params, learning_rate, beta1, beta2, eps, use_locking, use_nesterov, weight_decay, loss_scale, use_amsgrad,
            kwargs: see `mindspore.nn.Adam`.

    Inputs:
        - **gradients** (tuple[Tensor]) - the gradients of `params`. Called like this it runs MindSpore's own ops.

    Outputs:
        tuple[bool], all True.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import FusedAdam
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = FusedAdam(net.trainable_params(), learning_rate=1e-3)
        >>> isinstance(optimizer, nn.Adam)
        True
    """

    op_name = "adam"

    def __init__(
        self,
        params: Any,
        learning_rate: Any = 1e-3,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        use_locking: bool = False,
        use_nesterov: bool = False,
        weight_decay: Any = 0.0,
        loss_scale: float = 1.0,
        use_amsgrad: bool = False,
        **kwargs: bool,
    ):
        betas = (beta1, beta2, eps)
        super().__init__(
            params, learning_rate, *betas, use_locking, use_nesterov, weight_decay, loss_scale, use_amsgrad, **kwargs
        )
        self._fuse()

    def _unsupported(self) -> dict:
        return {f"{name} is not covered": getattr(self, name) for name in ("use_amsgrad", "use_lazy", "use_offload")}

    def _options(self) -> list:
        return [*(float(value.asnumpy()) for value in (self.beta1, self.beta2, self.eps)), self.use_nesterov]

    def _states(self) -> tuple:
        return (self.moment1, self.moment2)

    def _scalars(self) -> tuple:
        return (self.beta1_power, self.beta2_power)


class FusedAdamW(Fused, optim.AdamW):
    """`mindspore.experimental.optim.AdamW` that under `TrainOneStepWithLossScaleCell` is one native op on CPU.

    ::

        overflow = any value of gradients / loss_scale is inf or nan
        if not overflow:
            gradient = gradient / loss_scale
            weight   = weight - lr * weight_decay * weight
            m        = m * beta1 + gradient * (1 - beta1)
            v        = v * beta2 + gradient**2 * (1 - beta2)
            weight   = weight - lr / (1 - beta1**step) * m / (sqrt(v / (1 - beta2**step)) + eps)

    Arguments, Parameters, their names, groups, learning-rate schedulers and checkpoints are those of
    `mindspore.experimental.optim.AdamW`: a run may switch between the two. Results differ in the last bits at most.
    Where the native kernel is missing, or for what it does not cover (Parameters that are not float32, `amsgrad`,
    `maximize`, groups with betas or eps of their own), it *is* MindSpore's, with one warning.

    Experimental: the op writes Parameters through its inputs, declared as MindSpore's own optimizer ops are.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize: see `mindspore.experimental.optim.AdamW`.

    Inputs:
        - **gradients** (tuple[Tensor]) - the gradients of `params`. Called like this it runs MindSpore's own ops.

    Outputs:
        bool, True.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import FusedAdamW
        >>> from mindspore import nn
        >>> from mindspore.experimental import optim
        >>> net = nn.Dense(4, 1)
        >>> optimizer = FusedAdamW(net.trainable_params(), lr=1e-3, weight_decay=0.01)
        >>> isinstance(optimizer, optim.AdamW)
        True
    """

    op_name = "adamw"

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        betas: tuple = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ):
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._fuse()

    def _reason_against(self) -> Optional[str]:
        groups = self.param_groups
        checks = {
            "amsgrad is not covered": any(group["amsgrad"] for group in groups),
            "maximize is not covered": any(group["maximize"] for group in groups),
            "a group has betas or eps of its own": len({(*group["betas"], group["eps"]) for group in groups}) > 1,
            **_common_checks(self),
        }
        return next((reason for reason, holds in checks.items() if holds), None)

    def _options(self) -> list:
        (beta1, beta2), eps = self.param_groups[0]["betas"], self.param_groups[0]["eps"]
        return [beta1, beta2, eps]

    def _states(self) -> tuple:
        return (self.exp_avg, self.exp_avg_sq)

    def _prepare_rates(self) -> None:
        places = [place for place, group in enumerate(self.param_groups) for _ in group["params"]]
        self.lr_indices = Tensor(places, mstype.int32)
        decays = [self.param_groups[place]["weight_decay"] for place in places]
        self.fused_decays = Tensor(decays, mstype.float32)

    def _rates(self) -> Tensor:
        rates: tuple = ()
        for place in range(len(self.lrs)):
            rate = self.lrs[place]
            # A number that the user has put there counts, as in MindSpore's own.
            if isinstance(self.param_groups[place].get("lr"), float):
                rate = Tensor(self.param_groups[place].get("lr"), mstype.float32)
            rates += (rate.reshape((1,)),)
        return ops.gather(ops.cat(rates), self.lr_indices, 0) if len(self.lrs) > 1 else rates[0]

    def _decays(self) -> Tensor:
        return self.fused_decays

    def _steps(self) -> Tensor:
        return self.state_step
