"""What is one training step? The order of operations, each stage a method or a cell that can be replaced alone."""

import inspect
from typing import Any, Optional, Union

from mindspore import Tensor, jit, nn, ops
from mindspore import dtype as mstype

from cells.accumulate import GradientAccumulator
from cells.backends import gradient_arithmetic
from cells.backward import denominator_of, extras_of, gradient_seed, loss_of
from cells.checks import scale_tensor, warn_of_divisor
from cells.clip import ClipByGlobalNorm
from cells.ema import EMA
from cells.gradient_ops import as_scalar, cast_like, cast_up, global_norm, on_cpu, overflow_of, usable_scale
from cells.inputs import fixed_input_count, placed_inputs, scale_of_call
from cells.norm_record import NormRecord
from cells.optimizers import as_one, learning_rates
from cells.outputs import OUTPUTS, StepOptions, checked_options
from cells.overflow_record import OverflowRecord
from cells.ranks import check_ranks_agree, check_world
from cells.scale_update import LossScaleUpdateCell
from cells.storage import ParameterStorage
from cells.unscale import Unscale, unscaling

# Bound here: patch_mindspore() puts ours under MindSpore's name, and a look-up at the call would find that.
_StockCell = nn.TrainOneStepWithLossScaleCell

# Methods of 0.1.0 that a subclass may have overridden: how many arguments they took, and what to write now.
_RENAMED = {
    "reduce": (1, "reduce_gradients(self, grads)"),
    "skips": (2, "skips_update(self, overflow, norm)"),
    "step": (1, "apply_update(self, grads)"),
    "step_unless": (2, "skips_update(self, overflow, norm) or apply_update(self, grads)"),
    "step_or_keep_flags": (3, "skips_update(self, overflow, norm) or apply_update(self, grads)"),
    "update": (5, "one stage of those in docs/train-step.md"),
    "unscale_and_check": (3, "unscale_and_check(self, scaled, divisor), which returns (gradients, overflow, norm)"),
    "unscale_clip_and_check": (3, "unscale_and_check(self, scaled, divisor)"),
    "keep_flags": (2, "unscale_and_check(self, scaled, divisor)"),
}
# What users read of a train cell. A subclass may use these names for attributes of its own.
_READABLE = ("accumulate_steps", "clip_grad", "ema", "drop_overflow_update", "outputs", "scale_every_call")


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
        network: the network with its loss inside; it returns a scalar loss, alone or as the first of a tuple or list,
            or a dict with the key "loss".
        optimizer: updates the parameters of the network; its own `loss_scale` must be 1, unless a subclass
            leaves the unscaling to it. A tuple of optimizers that share no parameter: all of them step, or none.
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
            gradients, before clipping), "grad_norms", "learning_rate" and "updated", in the order given; one name (a
            str) gives the bare value. Default: ("loss", "overflow", "loss_scale").
        calculate_per_token_loss: whether the network returns its loss as a sum over tokens and the number to divide
            it by (a Tensor of one number, such as the sum of a mask): (numerator, denominator, others...). Gradients
            and denominators are summed over the window and the devices, and divided once. Default: False.

    Inputs:
        - **\\*inputs** (Tensor) - the inputs of the network, by place or by name. Without `scale_sense` one more
          follows, the scale of this call, shape () or (1,), by name `scale_sense`. With an update cell the same extra
          input is accepted where the network takes a fixed number of inputs; it replaces the scale for that call only.

    Outputs:
        Tuple of the values named by `outputs`, then whatever the network returns beside the loss:

        - **loss** - the unscaled loss, shape (); with `calculate_per_token_loss` numerator / denominator of this call.
        - **overflow** - bool, shape (). On a micro-step that ends no window: False.
        - **loss_scale** - float32, the scale after this step's update, a value of its own.
        - **grad_norm** - float32, shape (). On a micro-step that ends no window: 0.
        - **grad_norms** - float32, shape (n,): the norm of each true gradient, in the order of the cell's `weights`.
          On a micro-step that ends no window: 0.
        - **learning_rate** - that of this update; a tuple where the optimizer's groups have several, or where there are
          several optimizers.
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
        calculate_per_token_loss: bool = False,
    ):
        owner = type(self).__name__
        options = checked_options(
            owner,
            network,
            optimizer,
            scale_sense,
            accumulate_steps,
            clip_grad,
            ema,
            drop_overflow_update,
            outputs,
            calculate_per_token_loss,
        )
        check_world(owner)
        warn_of_divisor(optimizer, owner)
        optimizer = as_one(optimizer)
        super().__init__(network, optimizer, options.scale_sense)
        self.scale_sense.requires_grad = False
        self.cpu_target = on_cpu()
        self._own_names: set = set()
        # A subclass may replace any method, so only this very class may go around them.
        own = type(self) is TrainOneStepWithLossScaleCell
        steps = options.accumulate_steps
        norm = options.norms or getattr(clip_grad, "skip_above", None) is not None
        norm = norm or not (own or options.sparse)
        # What the stages read has names that no subclass sets by accident.
        self._stage_options = options
        self._stage_steps = steps
        self._stage_scale_every_call = options.scale_every_call
        # The number of inputs that means "the last one is a scale", which none does without an update cell.
        self._stage_inputs_with_scale = -1 if self.loss_scaling_manager is None else fixed_input_count(network) + 1
        self._stage_drops_overflow = options.drop_overflow_update
        self._stage_skip_above = getattr(clip_grad, "skip_above", None)
        self._stage_sparse = options.sparse
        self._stage_per_token = options.calculate_per_token_loss
        self._stage_mean_over = 1 if self._stage_per_token else steps
        # A divisor must stay below 2**126, see `usable_scale`; of tokens there may be 2**30.
        self._stage_most_summed = steps * 2**30 if self._stage_per_token else steps
        self._stage_world = self.degree if self.reducer_flag and self.mean else 1
        window = GradientAccumulator(self.weights, steps, self._stage_per_token) if steps > 1 else None
        self._stage_accumulator: Any = window
        self._stage_unscaling, self._stage_clip = unscaling(
            self.weights, clip_grad, options.sparse, norm, own, steps > 1
        )
        self._stage_record = OverflowRecord(self.weights, options.sparse)
        self._stage_norms = NormRecord(len(self.weights)) if "grad_norms" in options.outputs else None
        self._stage_average = ema
        self._stage_rates = learning_rates(optimizer) if "learning_rate" in options.outputs else None
        self._stage_outputs = tuple(OUTPUTS.index(name) for name in options.outputs)
        self._stage_bare_output = options.bare_output
        # MindSpore's own check says whether there was an overflow, not where.
        self._stage_looks_again = isinstance(self._stage_unscaling, Unscale)
        self._stage_fusion = _fusion(options, optimizer, norm) if own else None
        if self._stage_fusion == "factor":
            norms = norm or clip_grad is not None
            self._stage_arithmetic = gradient_arithmetic(norms, in_branch=steps > 1)
            self._stage_clip = clip_grad
        self._stage_storage: Optional[ParameterStorage] = None
        self._stage_ranks_checked = not self.reducer_flag
        # Last, so that a constructor that failed leaves both free for the next one.
        if isinstance(options.scale_sense, LossScaleUpdateCell):
            options.scale_sense.bind(self.scale_sense, None if window is None else window.step)
        if ema is not None:
            ema.join(self.weights)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, (count, new) in _RENAMED.items():
            method = cls.__dict__.get(name)
            if inspect.isfunction(method) and len(inspect.signature(method).parameters) == count + 1:
                raise TypeError(
                    f"'{cls.__name__}' overrides '{name}' of version 0.1.0, which nobody calls any more; write {new} "
                    "instead. A method of your own needs another name."
                )

    def __getattr__(self, name: str) -> Any:
        if name in _READABLE and name not in self.__dict__.get("_own_names", _READABLE):
            return getattr(self._stage_options, name)
        if name == "accumulator" and name not in self.__dict__.get("_own_names", ("accumulator",)):
            return self._stage_accumulator
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in (*_READABLE, "accumulator"):
            self._own_names.add(name)
        super().__setattr__(name, value)

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        if not self._stage_ranks_checked:
            check_ranks_agree(self)
            self._stage_ranks_checked = True
        self._check_storage()
        if named_inputs:
            inputs = placed_inputs(self.network, inputs, named_inputs, type(self).__name__)
        return super().__call__(*inputs)

    def _check_storage(self) -> None:
        """See to values that were loaded since the last call; see `cells.storage`."""
        loaded = self._stage_storage is None
        if loaded and self.cpu_target:
            self._stage_storage = ParameterStorage(list(self.get_parameters()))
        elif self._stage_storage is not None:
            loaded = self._stage_storage.restore()
        if loaded and self._stage_accumulator is not None:
            self._stage_accumulator.check_restored()

    def construct(self, *inputs):
        brings_scale = self._stage_scale_every_call or len(inputs) == self._stage_inputs_with_scale
        scale = self.scale_sense * 1.0  # a copy: the Parameter changes below
        if brings_scale:
            scale = scale_of_call(inputs[-1])
            inputs = inputs[:-1]
        output = self.network(*inputs)
        # The loss comes before the gradients: its last ops would else become one more graph, behind the branch.
        used = usable_scale(ops.depend(as_scalar(scale), loss_of(output)), self._stage_most_summed)
        grads = self.scaled_gradients(inputs, output, used)
        divisor = used * self._stage_mean_over if self._stage_mean_over > 1 else used
        if self._stage_per_token and self._stage_steps == 1:
            divisor = used * self._tokens_of_all(denominator_of(output))
        if self._stage_per_token and self._stage_steps > 1:
            self._stage_accumulator.add_tokens(denominator_of(output))
        if self._stage_steps > 1:
            if brings_scale:
                raise ValueError("The scale is constant inside a window: a call can't bring one with accumulate_steps.")
            report = self.update_after_window(grads, divisor, scale)
        elif self._stage_fusion == "scale":
            report = self.update_fused(self.reduce_gradients(grads), divisor, scale, brings_scale)
        elif self._stage_fusion == "factor":
            report = self.update_by_factor(self.reduce_gradients(grads), divisor, scale, brings_scale)
            if self._stage_average is not None and report[4]:
                self._stage_average()
        else:
            report = self.update_at_once(grads, divisor, scale, brings_scale)
        return self.select_outputs(output, report)

    def scaled_gradients(self, inputs: tuple, output: Any, scale: Tensor) -> tuple:
        """Return the gradients of scale * loss for the weights, in the dtypes that the backward pass gives."""
        return self.grad(self.network, self.weights)(*inputs, gradient_seed(output, scale))

    def update_at_once(self, scaled: tuple, divisor: Tensor, scale: Tensor, brings_scale: bool) -> tuple:
        """From scaled gradients to moved weights. Return (overflow, loss_scale, grad_norm, learning_rate, updated)."""
        grads, overflow, norm = self.unscale_and_check(self.reduce_gradients(scaled), divisor)
        skip, scale = self._move_scale(overflow, scale, brings_scale)
        rate = self._rate_of_update()
        if self._stage_looks_again and overflow:
            self._stage_record.look(grads)
        updated = Tensor(False, mstype.bool_)
        if not self.skips_update(skip, norm):
            updated = self.apply_update(self._clipped(grads))
        return overflow, scale, norm.astype(mstype.float32), rate, updated

    def update_after_window(self, scaled: tuple, divisor: Tensor, scale: Tensor) -> tuple:
        """Add the gradients to the sums; after a window's last ones do what `update_at_once` does.

        The conditionals stand side by side, and only Parameters pass from one to the next: see `GradientAccumulator`.
        """
        window = self._stage_accumulator
        if self._stage_norms is not None:
            self._stage_norms.clear()
        totals, boundary = window(scaled)
        overflow = updated = Tensor(False, mstype.bool_)
        norm = Tensor(0.0, mstype.float32)
        rate = self._rate_of_update()
        if boundary:
            overflow, scale, norm = self._decide_window(self.reduce_gradients(totals), divisor, scale)
        updates, overflowed = window.decision
        if self._stage_looks_again and ops.logical_and(overflowed, boundary):
            self._stage_record.look(window.totals)
        if ops.logical_and(updates, boundary):
            updated = self._apply_window(window.totals)
        if boundary:
            window.clear()
        return overflow, scale, norm, rate, updated

    def _decide_window(self, totals: tuple, divisor: Tensor, scale: Tensor) -> tuple:
        window = self._stage_accumulator
        if self._stage_per_token:
            divisor = divisor * self._tokens_of_all(window.tokens * 1.0)
        if self._stage_fusion == "factor":
            # By place: an output that is unpacked and not used makes the compiler warn of a lost side effect.
            report = self.update_by_factor(totals, divisor, scale, False)
            return window.decide(report[4], report[0]), report[1], report[2]
        grads, overflow, norm = self.unscale_and_check(totals, divisor)
        skip, scale = self._move_scale(overflow, scale, False)
        updates = ops.depend(ops.logical_not(self.skips_update(skip, norm)), window.keep(grads))
        return window.decide(updates, overflow), scale, norm.astype(mstype.float32)

    def _apply_window(self, totals: tuple) -> Tensor:
        if self._stage_fusion != "factor":
            return self.apply_update(self._clipped(cast_like(self.weights, totals)))
        done = Tensor(True, mstype.bool_)
        return done if self._stage_average is None else ops.depend(done, self._stage_average())

    def _tokens_of_all(self, tokens: Tensor) -> Tensor:
        """Return what summed gradients of numerators are divided by: the denominators of all devices, 1 for none."""
        if self.reducer_flag:
            # Where the reducer takes the mean over the devices, it has divided by their number already.
            tokens = self.allreduce(tokens) / self._stage_world
        return ops.select(tokens > 0, tokens, ops.ones_like(tokens))

    @jit(backend="ms_backend")  # in PYNATIVE_MODE one compiled call, as MindSpore's own optimizers are
    def update_fused(self, grads: tuple, divisor: Tensor, scale: Tensor, brings_scale: bool) -> tuple:
        """Do what `update_at_once` does by an optimizer that takes scaled gradients, see `cells.fused`."""
        rate = self._rate_of_update()
        overflow, flags = self.optimizer.apply_scaled_gradients(grads, divisor)
        overflow = ops.depend(overflow, self._stage_record(overflow, flags))
        skip, scale = self._move_scale(overflow, scale, brings_scale)
        overflow = ops.depend(overflow, skip)
        return overflow, scale, Tensor(0.0, mstype.float32), rate, ops.logical_not(overflow)

    @jit(backend="ms_backend")
    def update_by_factor(self, grads: tuple, divisor: Tensor, scale: Tensor, brings_scale: bool) -> tuple:
        """Look at the gradients, then give them to an optimizer that multiplies by one factor, see `cells.fused`."""
        rate = self._rate_of_update()
        flags, norms = self._stage_arithmetic.look(divisor, grads)
        overflow = flags.any()
        overflow = ops.depend(overflow, self._stage_record(overflow, flags))
        factor = ops.reciprocal(divisor.astype(mstype.float64))
        norm = self._norm_of_all(norms)
        if self._stage_norms is not None:
            norm = ops.depend(norm, self._stage_norms(norms))
        if self._stage_clip is not None:
            factor = factor * self._stage_clip.shrink(norm)
        skip, scale = self._move_scale(overflow, scale, brings_scale)
        skip = self.skips_update(skip, norm)
        done = self.optimizer.apply_scaled_gradients(grads, divisor, factor, skip)
        updated = ops.depend(ops.logical_not(skip), done)
        return overflow, scale, norm.astype(mstype.float32), rate, updated

    def reduce_gradients(self, grads: tuple) -> tuple:
        """Return the gradients' mean over the devices, where there are several, in at least float32."""
        return self.grad_reducer(cast_up(grads)) if self.reducer_flag else self.grad_reducer(grads)

    def unscale_and_check(self, scaled: tuple, divisor: Tensor) -> tuple:
        """Divide reduced gradients by `divisor`, in at least float32, cast them to the parameters' dtypes, look.

        Returns:
            The gradients as the clip will get them; a bool scalar, whether any of their values is inf or nan (on
            Ascend and GPU, whatever MindSpore's check says); and their global norm, 0 where nobody asked for it.
        """
        grads, status, flags, norms = self._stage_unscaling(scaled, divisor)
        overflow = as_scalar(self.get_overflow_status(status, grads))
        if not self._stage_looks_again:
            overflow = ops.depend(overflow, self._stage_record(overflow, flags))
        if self._stage_norms is not None:
            overflow = ops.depend(overflow, self._stage_norms(norms))
        return grads, overflow, self._norm_of_all(norms)

    def _norm_of_all(self, norms: Any) -> Tensor:
        """Return the global norm, 0 where nobody asked for norms."""
        return Tensor(0.0, mstype.float32) if isinstance(norms, tuple) else global_norm(norms)

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Return whether `compute_output`, a tuple of gradients, overflowed on any device.

        A bool `status` is the answer, found while unscaling. Else this looks for inf and nan on CPU, and adds up the
        devices' flags where there are several; on Ascend and GPU it is MindSpore's own check.
        """
        if isinstance(status, Tensor) and status.dtype == mstype.bool_:
            return status
        if not self.cpu_target:
            # Not super(): in GRAPH_MODE it is the parent of the cell's own class, and subclasses would call this again.
            return _StockCell.get_overflow_status(self, status, compute_output)
        overflow = overflow_of(compute_output, self._stage_sparse)
        if self.is_distributed:
            overflow = self.allreduce(overflow.astype(mstype.float32)) > 0
        return overflow

    def _move_scale(self, overflow: Tensor, scale: Tensor, brings_scale: bool) -> tuple:
        """Let the update cell move the scale, unless it came with the call; return (whether to skip, the scale)."""
        if brings_scale:
            return overflow, scale
        skip = self.process_loss_scale(overflow)
        return skip, self.scale_sense * 1.0

    def _rate_of_update(self) -> Any:
        """Return the learning rate of this update, a tuple where the optimizer has several."""
        if self._stage_rates is None:
            return Tensor(0.0, mstype.float32)
        rates = self._stage_rates()
        return rates[0] if len(rates) == 1 else rates

    def _clipped(self, grads: tuple) -> tuple:
        return grads if self._stage_clip is None else self._stage_clip(grads)

    def skips_update(self, overflow: Tensor, norm: Tensor) -> Tensor:
        """Return whether this step leaves the weights: on overflow if that is dropped, and on a spike of the norm."""
        skip = overflow if self._stage_drops_overflow else Tensor(False, mstype.bool_)
        if self._stage_skip_above is not None:
            skip = ops.logical_or(skip, norm > self._stage_skip_above)
        return skip

    def apply_update(self, grads: tuple) -> Tensor:
        """Run the optimizer on clipped gradients, then the average of the weights. Return True."""
        done = ops.depend(Tensor(True, mstype.bool_), self.optimizer(grads))
        return done if self._stage_average is None else ops.depend(done, self._stage_average())

    def select_outputs(self, output: Any, report: tuple) -> Any:
        """Return what `outputs` names, and after it what the network returns beside the loss."""
        loss, extras = loss_of(output), extras_of(output)
        if self._stage_per_token:
            tokens = denominator_of(output)
            loss, extras = loss / ops.select(tokens > 0, tokens, ops.ones_like(tokens)).astype(loss.dtype), extras[1:]
        values: tuple = (loss, *report)
        if self._stage_norms is not None:
            values = (*values, self._stage_norms.values((report[0], report[4])))
        selected: tuple = ()
        for place in self._stage_outputs:
            selected = (*selected, values[place])
        selected = selected + extras
        if self._stage_bare_output and len(selected) == 1:
            return selected[0]
        return selected

    @property
    def step_options(self) -> StepOptions:
        """What this cell was built with, whatever attributes a subclass has set."""
        return self._stage_options

    def in_window(self) -> bool:
        """Return whether a window of micro-steps is unfinished. Reads the device."""
        return self._stage_accumulator is not None and self._stage_accumulator.in_window()

    def nonfinite_parameters(self) -> list:
        """Return the names of the parameters whose gradients held inf or nan at the last overflow.

        Empty before the first one; ["unknown"] where an overflow left no inf or nan, as in Ascend's saturation mode,
        where the device reports overflow but clips to the largest number. Reads the device.
        """
        return self._stage_record.names()

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
        if self._stage_options.scale_every_call:
            raise RuntimeError(
                f"This '{owner}' was built without 'scale_sense' and takes its scale as the last input of each "
                "call. Build it with scale_sense=Tensor(1024.0) to set the scale by set_sense_scale."
            )
        if self.in_window():
            raise RuntimeError(
                f"The scale is constant inside a window of {self._stage_steps} micro-steps, and one is unfinished; "
                "set the scale after its last micro-step."
            )
        ops.assign(self.scale_sense, value.reshape(self.scale_sense.shape))


def _fusion(options: StepOptions, optimizer: Any, norm: bool) -> Optional[str]:
    """Return how an optimizer that takes scaled gradients is called: with the "scale", with a "factor", or None."""
    takes = getattr(optimizer, "takes_scaled_gradients", False) and on_cpu() and not options.sparse
    if not takes or not isinstance(options.scale_sense, (Tensor, LossScaleUpdateCell)):
        return None
    between = (options.accumulate_steps > 1, options.clip_grad, options.ema, norm, not options.drop_overflow_update)
    if not any(between):
        return "scale"
    clips = options.clip_grad is None or type(options.clip_grad) is ClipByGlobalNorm
    return "factor" if clips and getattr(optimizer, "takes_gradient_factor", False) else None
