"""What is one training step? The order of operations, each stage a method or a cell that can be replaced alone."""

import itertools
from typing import Any, Optional, Union

import numpy as np
from mindspore import Parameter, Tensor, context, jit, nn, ops
from mindspore import dtype as mstype

from cells.accumulate import GradientAccumulator
from cells.backends import gradient_arithmetic
from cells.backward import extras_of, fixed_input_count, gradient_seed, loss_of, scale_of_call
from cells.checks import check_bool, check_positive_int, scale_tensor
from cells.clip import ClipByGlobalNorm, ClipByNormBase
from cells.ema import EMA
from cells.options import OUTPUTS, check_options, checked_outputs, checked_scale_sense
from cells.ranks import check_ranks_agree, check_world
from cells.scale_update import LossScaleUpdateCell
from cells.unscale import (
    SparseGradients,
    as_scalar,
    cast_like,
    cast_up,
    may_have_sparse_gradients,
    unscale,
    usable_scale,
)

_steps = itertools.count(1)


class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):
    """One training step with loss scaling, on Ascend, GPU and CPU, in GRAPH_MODE and PYNATIVE_MODE.

    ::

        loss        = network(*inputs)
        grads       = gradients of scale * loss
        totals     += grads, in at least float32         \\  accumulate_steps > 1 only;
        if not the window's last micro-step: return      /   what follows is once a window
        grads       = mean over the devices               (data parallel only)
        grads       = grads / (scale * accumulate_steps), in at least float32
        overflow    = any value of grads is inf or nan
        scale       = update cell(scale, overflow)
        grads       = clip_grad(grads)
        if not (overflow and drop_overflow_update) and not a spike: optimizer(grads); ema()
        totals      = 0
        return loss, overflow, scale

    A subclass of MindSpore's cell of the same name: `isinstance`, its attributes and its methods
    (`set_sense_scale`, `start_overflow_check`, `get_overflow_status`, `process_loss_scale`) are there for
    cells that build on them, and Ascend and GPU keep its overflow checks. New are the check on CPU, gradient
    arithmetic in at least float32 (float64 stays float64), and a check of what the optimizer will get.

    On overflow the weights, every state of the optimizer, `global_step` and a learning-rate schedule stay
    exactly as they were. The forward pass has happened, though: BatchNorm's moving statistics have moved.

    Args:
        network: the network with its loss inside; it returns one scalar loss.
        optimizer: updates the parameters of the network; its own `loss_scale` must be 1, unless a subclass
            leaves the unscaling to it.
        scale_sense: an update cell (`DynamicLossScaleUpdateCell`, `FixedLossScaleUpdateCell` or one's own), or
            a Tensor of shape () or (1,) that `set_sense_scale` can change. It is kept as the float32 Parameter
            `scale_sense`, the one source of truth. None: the last input of each call is its scale.

        accumulate_steps: micro-steps whose gradients are averaged into one update. The scale is constant inside
            such a window; an overflow anywhere in it drops it whole; schedules and `global_step` count updates.
            Default: 1.
        clip_grad: a cell that maps the tuple of true gradients to clipped ones: `ClipByGlobalNorm`,
            `ClipByNorm`, `ClipByValue` or one's own. It runs after the check. Default: None.
        ema: an `EMA` cell, called after each update. Default: None.
        drop_overflow_update: whether a step that overflowed is skipped. Default: True.
        outputs: what a step returns, names from "loss", "overflow", "loss_scale", "grad_norm" (of the true
            gradients, before clipping), "learning_rate" and "updated", in the order given; one name (a str)
            gives the bare value. Default: ("loss", "overflow", "loss_scale").

    Inputs:
        - **\\*inputs** (Tensor) - the inputs of the network. Without `scale_sense` one more follows, the scale
          of this call, shape () or (1,). With an update cell the same extra input is accepted where the network
          takes a fixed number of inputs; it replaces the scale for that call only.

    Outputs:
        Tuple of the values named by `outputs`, then whatever the network returns beside the loss:

        - **loss** - the unscaled loss, shape ().
        - **overflow** - bool, shape (). On a micro-step that ends no window: False.
        - **loss_scale** - float32, the scale after this step's update, a value of its own.
        - **grad_norm** - float32, shape (). On a micro-step that ends no window: 0.
        - **learning_rate** - what the optimizer's `get_lr` gives for this update.
        - **updated** - bool, shape (): whether the optimizer ran.

    Raises:
        TypeError: if `scale_sense` is neither a Cell nor a Tensor of real numbers.
        ValueError: if the Tensor's shape is neither () nor (1,), its value is not finite and > 0, the update cell
            already belongs to another train cell, an option is out of range, or options exclude each other.
        RuntimeError: in data parallel, if there is only one rank; at the first call, if loss scales differ by rank.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> update = DynamicLossScaleUpdateCell(loss_scale_value=2**12, scale_factor=2, scale_window=1000)
        >>> step = TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update)
        >>> x, y = Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32))
        >>> loss, overflow, loss_scale = step(x, y)
        >>> print(overflow, loss_scale)
        False 4096.0
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: nn.Cell,
        scale_sense: Optional[Union[Tensor, nn.Cell]] = None,
        *,
        accumulate_steps: int = 1,
        clip_grad: Optional[nn.Cell] = None,
        ema: Optional[EMA] = None,
        drop_overflow_update: bool = True,
        outputs: Union[str, tuple] = OUTPUTS[:3],
    ):
        owner = type(self).__name__
        self_scaled = scale_sense is None
        scale_sense = checked_scale_sense(scale_sense, owner)
        names = checked_outputs(outputs, optimizer, owner)
        accumulate_steps = check_positive_int("accumulate_steps", accumulate_steps, owner)
        sparse = may_have_sparse_gradients(network)
        check_options(owner, accumulate_steps, clip_grad, ema, names, sparse, self_scaled)
        check_world(owner)
        super().__init__(network, optimizer, scale_sense)
        self.scale_sense.requires_grad = False
        self.cpu_target = context.get_context("device_target") == "CPU"
        self.scale_every_call = self_scaled
        # The number of inputs that means "the last one is a scale"; -1 where none does.
        self.inputs_with_scale = -1
        if self.loss_scaling_manager is not None:
            self.inputs_with_scale = fixed_input_count(network) + 1
        # The gradients have been reduced when they are checked, so inf and nan are on every device already and
        # the flag need not be sent, unless a subclass brings a check of its own.
        self.check_here = self.cpu_target and not self._overrides("get_overflow_status")
        self.sparse_gradients = sparse
        scalars = any(not weight.shape for weight in self.weights)
        self.gradients = SparseGradients() if sparse else gradient_arithmetic(scalars)
        self.narrow_parameters = any(p.dtype in (mstype.float16, mstype.bfloat16) for p in self.weights)
        # A list, because a Parameter set as an attribute would go into checkpoints, where it has no business. Nobody
        # prefixes its name there, and two train cells in one graph need two.
        flags = Tensor(np.zeros(len(self.weights), np.bool_))
        number = next(_steps)
        self._overflow_flags = [Parameter(flags, name=f"overflow_flags.{number}", requires_grad=False)]
        seen = Tensor(False, mstype.bool_)
        self._overflow_seen = [Parameter(seen, name=f"overflow_seen.{number}", requires_grad=False)]

        self.zero = Tensor(0.0, mstype.float32)  # in place of what `outputs` does not name
        self.outputs = names
        self.places = tuple(OUTPUTS.index(name) for name in names)
        self.bare_output = isinstance(outputs, str)
        self.drop_overflow_update = check_bool("drop_overflow_update", drop_overflow_update, owner)
        self.accumulate_steps = accumulate_steps
        self.accumulator: Any = GradientAccumulator(self.weights, accumulate_steps) if accumulate_steps > 1 else None
        if isinstance(scale_sense, LossScaleUpdateCell):
            scale_sense.bind(self.scale_sense, None if self.accumulator is None else self.accumulator.step)
        self.clip_grad: Any = clip_grad
        self.skip_above = clip_grad.skip_above if isinstance(clip_grad, ClipByGlobalNorm) else None
        # Short cuts go around stages, so they are taken only where a subclass has left those as they are.
        own_skips = self._overrides("skips", "step_unless")
        self.plain_skip = self.drop_overflow_update and self.skip_above is None and not own_skips
        own_unscale = self._overrides("unscale_and_check")
        self.folds_clip = self.check_here and not self.narrow_parameters and not own_unscale and _folds(clip_grad)
        self.reports_norm = "grad_norm" in names or self.skip_above is not None or (own_skips and not sparse)
        # The norm is taken in the pass that unscales, where nothing is done to the gradients in between.
        narrow = self.narrow_parameters or sparse
        self.unscales_with_norm = self.reports_norm and self.check_here and not narrow and not own_unscale
        self.reports_rate = "learning_rate" in names
        self.ema = ema
        # A fused optimizer unscales, checks, skips and steps by itself: only where nothing comes between.
        between = (accumulate_steps > 1, clip_grad, ema, self.reports_norm, not self.plain_skip, sparse)
        self.fused_optimizer = (
            getattr(optimizer, "takes_scaled_gradients", False)
            and self.check_here
            and not any(between)
            and isinstance(scale_sense, (Tensor, LossScaleUpdateCell))
            and not self._overrides(*_FUSED)
        )
        if ema is not None and not ema.is_bound:
            ema.bind(self.weights)
        self._ranks_checked = not self.reducer_flag

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        if not self._ranks_checked:
            check_ranks_agree(self)
            self._ranks_checked = True
        return super().__call__(*inputs, **named_inputs)

    def construct(self, *inputs):
        scale_is_input = self.scale_every_call or len(inputs) == self.inputs_with_scale
        scale = self.scale_sense * 1.0  # a copy: the Parameter changes below
        if scale_is_input:
            scale = scale_of_call(inputs[-1])
            inputs = inputs[:-1]
        output = self.network(*inputs)
        # The loss comes before the gradients: its last ops would else become one more graph, behind the branch.
        used = usable_scale(ops.depend(as_scalar(scale), loss_of(output)), self.accumulate_steps)
        grads = self.scaled_gradients(inputs, output, used)
        if self.accumulate_steps == 1:
            report = self.update(grads, grads, used, scale, scale_is_input)
        else:
            if scale_is_input:
                raise ValueError("The scale is constant inside a window: a call can't bring one with accumulate_steps.")
            totals, ends_window = self.accumulator(grads)
            report = self.unchanged(scale)
            if ends_window:
                report = self.update_and_clear(grads, totals, used, scale)
        return self.select_outputs(output, report)

    def scaled_gradients(self, inputs: tuple, output: Any, scale: Tensor) -> tuple:
        """Return the gradients of scale * loss for the weights, in the dtypes that the backward pass gives."""
        return self.grad(self.network, self.weights)(*inputs, gradient_seed(output, scale))

    def update(self, grads: tuple, totals: tuple, used: Tensor, scale: Tensor, keeps_scale: bool) -> tuple:
        """From scaled gradients to moved weights: reduce, unscale, check, update the scale, clip, step, average.

        Args:
            grads: the last gradients, whose dtypes are the parameters'.
            totals: the scaled gradients, or their sums over the window.
            used: float32 scalar, the scale that they carry.
            scale: the scale to report if this step leaves it.
            keeps_scale: whether the scale came with the call, and no update cell is asked.

        Returns:
            Tuple (overflow, loss_scale, grad_norm, learning_rate, updated).
        """
        if self.fused_optimizer:
            return self.update_fused(self.reduce(totals), used, scale, keeps_scale)
        true_grads, overflow, flags, norm = self.unscale_clip_and_check(grads, totals, used)
        skip = overflow
        if not keeps_scale:
            skip = self.process_loss_scale(overflow)
            scale = self.scale_sense * 1.0
        rate = self.learning_rate()
        if self.plain_skip:
            updated = self.step_or_keep_flags(skip, true_grads, flags)
        else:
            updated = self.step_unless(self.skips(skip, norm), true_grads)
            if overflow:
                updated = ops.depend(updated, self.keep_flags(true_grads, flags))
        return overflow, scale, norm.astype(mstype.float32) if self.reports_norm else self.zero, rate, updated

    @jit(backend="ms_backend")  # in PYNATIVE_MODE one compiled call, as MindSpore's own optimizers are
    def update_fused(self, grads: tuple, used: Tensor, scale: Tensor, keeps_scale: bool) -> tuple:
        """Do what `update` does by an optimizer that takes scaled gradients, see `cells.fused`."""
        rate = self.learning_rate()
        overflow, flags = self.optimizer.apply_scaled_gradients(grads, used)
        kept = self._overflow_flags[0]
        overflow = ops.depend(overflow, ops.assign(kept, ops.select(overflow, flags, kept)))
        if not keeps_scale:
            overflow = ops.depend(overflow, self.process_loss_scale(overflow))
            scale = self.scale_sense * 1.0
        return overflow, scale, self.zero, rate, ops.logical_not(overflow)

    def _overrides(self, *stages: str) -> bool:
        """Return whether a subclass has a stage of its own in place of one of these methods."""
        return any(getattr(type(self), stage) is not getattr(TrainOneStepWithLossScaleCell, stage) for stage in stages)

    def skips(self, overflow: Tensor, norm: Tensor) -> Tensor:
        """Return whether this step leaves the weights: on overflow if that is dropped, and on a spike of the norm."""
        skip = Tensor(False, mstype.bool_)
        if self.drop_overflow_update:
            skip = overflow
        if self.skip_above is not None:
            skip = ops.logical_or(skip, norm > self.skip_above)
        return skip

    def step_or_keep_flags(self, overflow: Tensor, grads: tuple, flags: Any) -> Tensor:
        """Step if there was no overflow, else keep which gradients had it. Return whether it stepped."""
        if overflow:
            updated = ops.depend(Tensor(False, mstype.bool_), self.keep_flags(grads, flags))
        else:
            updated = self.step(grads)
        return updated

    def step_unless(self, skip: Tensor, grads: tuple) -> Tensor:
        """Step unless `skip`. Return whether it stepped."""
        updated = Tensor(False, mstype.bool_)
        if not skip:
            updated = self.step(grads)
        return updated

    def step(self, grads: tuple) -> Tensor:
        """Run the optimizer on clipped gradients, then the average of the weights. Return True."""
        done = ops.depend(Tensor(True, mstype.bool_), self.optimizer(grads))
        if self.ema is not None:
            done = ops.depend(done, self.ema())
        return done

    def update_and_clear(self, grads: tuple, totals: tuple, used: Tensor, scale: Tensor) -> tuple:
        """Update from the sums of a window, then set them to zero."""
        overflow, scale, norm, rate, updated = self.update(grads, totals, used, scale, False)
        updated = ops.depend(updated, self.accumulator.clear())
        return overflow, scale, norm, rate, updated

    def unchanged(self, scale: Tensor) -> tuple:
        """Return what `update` does, for a micro-step that ends no window."""
        false = Tensor(False, mstype.bool_)
        return false, scale, self.zero, self.learning_rate(), false

    def learning_rate(self) -> Tensor:
        """Return the learning rate of the update to come, where `outputs` names it."""
        if self.reports_rate:
            return self.optimizer.get_lr() * 1.0
        return self.zero

    def select_outputs(self, output: Any, report: tuple) -> Any:
        """Return what `outputs` names, and after it what the network returns beside the loss."""
        values = (loss_of(output), *report)
        selected: tuple = ()
        for place in self.places:
            selected = (*selected, values[place])
        selected = selected + extras_of(output)
        if self.bare_output and len(selected) == 1:
            return selected[0]
        return selected

    def unscale_clip_and_check(self, grads: tuple, totals: tuple, used: Tensor) -> tuple:
        """Return the true clipped gradients, whether the unclipped overflowed, their flags and their global norm.

        Our clips by norm are one multiply together with the unscaling; any other clip gets unscaled gradients.
        """
        divisor = used if self.accumulate_steps == 1 else used * self.accumulate_steps
        if self.folds_clip:
            return self.clip_grad.unscale_and_clip(self.reduce(totals), divisor)
        norm = self.zero
        if self.unscales_with_norm:
            true_grads, overflow, flags, square_sum = self.gradients.unscale_with_norm(self.reduce(totals), divisor)
            norm = ops.sqrt(square_sum)
        else:
            true_grads, overflow, flags = self.unscale_and_check(grads, totals, divisor)
            if self.reports_norm:
                norm = self.gradients.global_norm(true_grads)
        if self.clip_grad is not None:
            true_grads = self.clip_grad(true_grads)
        return true_grads, overflow, flags, norm

    def unscale_and_check(self, grads: tuple, totals: tuple, divisor: Tensor) -> tuple:
        """Reduce across devices, divide by `divisor`, cast to the dtypes of `grads` and look for overflow.

        Returns:
            The gradients as the optimizer will get them; a bool scalar, whether any of their values is inf or nan
            (on Ascend and GPU, whatever MindSpore's check says); and for each gradient whether it holds any (empty
            where another check than this library's was made).
        """
        reduced = self.reduce(totals)
        if not self.check_here:
            unscaled = cast_like(grads, unscale(cast_up(reduced), divisor))
            overflow = self.get_overflow_status(Tensor([0] * 8, mstype.int32), unscaled).reshape(())
            return unscaled, overflow, ()
        unscaled, overflow, flags = self.gradients.unscale_and_check(reduced, divisor)
        if self.narrow_parameters:  # a float32 may become inf in float16
            unscaled = cast_like(grads, unscaled)
            overflow, flags = self.gradients.check(unscaled)
        return unscaled, overflow, flags

    def reduce(self, grads: tuple) -> tuple:
        """Return the gradients' mean over the devices, where there are several, in at least float32."""
        return self.grad_reducer(cast_up(grads)) if self.reducer_flag else self.grad_reducer(grads)

    def keep_flags(self, unscaled: tuple, flags: Any) -> Tensor:
        """Keep which gradients held inf or nan, for `nonfinite_parameters`. Runs on overflow only."""
        if not self.check_here or self.sparse_gradients:
            flags = self.gradients.nonfinite_flags(unscaled)
        seen = ops.assign(self._overflow_seen[0], Tensor(True, mstype.bool_))
        return ops.depend(ops.assign(self._overflow_flags[0], flags), seen)

    def nonfinite_parameters(self) -> list:
        """Return the names of the parameters whose gradients held inf or nan at the last overflow.

        Empty before the first one; ["unknown"] where an overflow left no inf or nan, as in Ascend's saturation mode,
        where the device reports overflow but clips to the largest number. Reads the device.
        """
        flags = self._overflow_flags[0].asnumpy()
        names = [weight.name for weight, flag in zip(self.weights, flags) if flag]
        return names or (["unknown"] if self._overflow_seen[0].asnumpy() else [])

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Return whether `compute_output`, a tuple of gradients, overflowed on any device.

        On CPU this looks for inf and nan, and adds up the devices' flags where there are several; on Ascend
        and GPU it is MindSpore's own check. For train cells built on this one.
        """
        if not self.cpu_target:
            # Not super(): in GRAPH_MODE it is the parent of the cell's own class, and subclasses would call this again.
            return nn.TrainOneStepWithLossScaleCell.get_overflow_status(self, status, compute_output)
        overflow, _ = self.gradients.check(compute_output)
        if self.is_distributed:
            overflow = self.allreduce(overflow.astype(mstype.float32)) > 0
        return overflow

    def set_sense_scale(self, sens: Tensor) -> None:
        """Set the loss scale, keeping the shape of the Parameter. Takes effect in compiled graphs too.

        Args:
            sens: Tensor of shape () or (1,), any real dtype.

        Raises:
            TypeError: if `sens` is not a Tensor of real numbers.
            ValueError: if its shape or value can't be a loss scale.
            RuntimeError: if this cell takes its scale as the last input of each call.
        """
        owner = type(self).__name__
        value = scale_tensor("sens", sens, owner)
        if self.scale_every_call:
            raise RuntimeError(
                f"This '{owner}' was built without 'scale_sense' and takes its scale as the last input of each "
                "call. Build it with scale_sense=Tensor(1024.0) to set the scale by set_sense_scale."
            )
        if self.accumulator is not None and self.accumulator.in_window():
            raise RuntimeError(
                f"The scale is constant inside a window of {self.accumulate_steps} micro-steps, and one is unfinished; "
                "set the scale after its last micro-step."
            )
        ops.assign(self.scale_sense, value.reshape(self.scale_sense.shape))


# The stages that a fused optimizer takes over.
_FUSED = (
    "unscale_clip_and_check",
    "unscale_and_check",
    "process_loss_scale",
    "step_or_keep_flags",
    "step",
    "keep_flags",
)


def _folds(clip_grad: Any) -> bool:
    """Return whether a clip is one of ours by a norm, unchanged, and can be one multiply with the unscaling."""
    return isinstance(clip_grad, ClipByNormBase) and type(clip_grad).construct is ClipByNormBase.construct
