"""What is one training step? Loss x scale -> backward -> reduce -> unscale and check -> update the scale -> step."""

import inspect
import warnings
from typing import Any, Optional, Union

import numpy as np
from mindspore import Parameter, Tensor, context, nn, ops
from mindspore import dtype as mstype

from cells._backend import gradient_arithmetic
from cells._check import scale_tensor
from cells.unscale import (
    SparseGradients,
    cast_like,
    cast_up,
    may_have_sparse_gradients,
    unscale,
    usable_scale,
)
from cells.update import LossScaleUpdateCell


class TrainOneStepWithLossScaleCell(nn.TrainOneStepWithLossScaleCell):
    """One training step with loss scaling, on Ascend, GPU and CPU, in GRAPH_MODE and PYNATIVE_MODE.

    ::

        loss      = network(*inputs)
        grads     = gradients of scale * loss, cast to float32 if they are narrower
        grads     = mean over the devices                            (data parallel only)
        grads     = grads / scale, in the dtype of the parameters
        overflow  = any value of grads is inf or nan
        scale     = update cell(scale, overflow)
        if not overflow: optimizer(grads)
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

    Inputs:
        - **\\*inputs** (Tensor) - the inputs of the network. Without `scale_sense` one more follows, the scale
          of this call, shape () or (1,). With an update cell the same extra input is accepted where the network
          takes a fixed number of inputs; it replaces the scale for that call only.

    Outputs:
        Tuple of three Tensors:

        - **loss** - the unscaled loss, shape ().
        - **overflow** - bool, shape ().
        - **loss_scale** - float32, the scale after this step's update, a value of its own.

    Raises:
        TypeError: if `scale_sense` is neither a Cell nor a Tensor of real numbers.
        ValueError: if the Tensor's shape is neither () nor (1,), its value is not finite and > 0, or the update
            cell already belongs to another train cell.

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
    ):
        owner = type(self).__name__
        self_scaled = scale_sense is None
        if self_scaled:
            scale_sense = Tensor(1.0, mstype.float32)
        if isinstance(scale_sense, LossScaleUpdateCell):
            scale_sense.check_unbound()
        elif isinstance(scale_sense, Tensor):
            scale_sense = scale_tensor("scale_sense", scale_sense, owner)
        elif not isinstance(scale_sense, nn.Cell):
            raise TypeError(
                f"For '{owner}', 'scale_sense' must be an update cell, a Tensor of shape () or (1,), or None, but "
                f"got {scale_sense!r} of type {type(scale_sense).__name__}. For a fixed scale write "
                "Tensor(1024.0) or FixedLossScaleUpdateCell(1024)."
            )
        super().__init__(network, optimizer, scale_sense)
        self.scale_sense.requires_grad = False
        if isinstance(scale_sense, LossScaleUpdateCell):
            scale_sense.bind(self.scale_sense)
        self.cpu_target = context.get_context("device_target") == "CPU"
        self.scale_every_call = self_scaled
        # The number of inputs that means "the last one is a scale"; -1 where none does.
        self.inputs_with_scale = -1
        if self.loss_scaling_manager is not None:
            self.inputs_with_scale = _fixed_input_count(network) + 1
        # The gradients have been reduced when they are checked, so inf and nan are on every device already and
        # the flag need not be sent, unless a subclass brings a check of its own.
        own_check = type(self).get_overflow_status is not TrainOneStepWithLossScaleCell.get_overflow_status
        self.check_here = self.cpu_target and not own_check
        # Sparse gradients are foreseen by the operators that the network's cells hold.
        self.sparse_gradients = may_have_sparse_gradients(network)
        self.gradients = SparseGradients() if self.sparse_gradients else gradient_arithmetic()
        self.narrow_parameters = any(p.dtype in (mstype.float16, mstype.bfloat16) for p in self.weights)
        # A fused optimizer decides by itself whether to skip: only where nobody else has a say in that.
        stages = ("unscale_and_check", "process_loss_scale")
        own_stages = any(
            getattr(type(self), name) is not getattr(TrainOneStepWithLossScaleCell, name) for name in stages
        )
        own_update = isinstance(scale_sense, nn.Cell) and not isinstance(scale_sense, LossScaleUpdateCell)
        generic = own_stages or own_update or self.sparse_gradients or not self.check_here
        self.fused_optimizer = not generic and getattr(optimizer, "takes_scaled_gradients", False)
        # A list, because a Parameter set as an attribute would go into checkpoints, where it has no business.
        flags = Tensor(np.zeros(len(self.weights), np.bool_))
        self._overflow_flags = [Parameter(flags, name="overflow_flags", requires_grad=False)]

    def construct(self, *inputs):
        scale_is_input = self.scale_every_call or len(inputs) == self.inputs_with_scale
        scale = self.scale_sense * 1.0  # a copy: the Parameter changes below
        if scale_is_input:
            scale = _scale_of_call(inputs[-1])
            inputs = inputs[:-1]
        loss = self.network(*inputs)
        used = usable_scale(scale.reshape(()))
        grads = self.scaled_gradients(inputs, loss, used)
        if self.fused_optimizer:
            overflow = self.apply_fused(grads, used)
            if not scale_is_input:
                overflow = self.process_loss_scale(overflow)
                scale = self.scale_sense * 1.0
            return ops.depend(loss, overflow), overflow, scale
        unscaled, overflow, flags = self.unscale_and_check(grads, used)
        skip = overflow
        if not scale_is_input:
            skip = self.process_loss_scale(overflow)
            scale = self.scale_sense * 1.0
        if not skip:
            loss = ops.depend(loss, self.optimizer(unscaled))
        else:
            loss = ops.depend(loss, self.keep_flags(unscaled, flags))
        return loss, overflow, scale

    def scaled_gradients(self, inputs: tuple, loss: Tensor, scale: Tensor) -> tuple:
        """Return the gradients of scale * loss for the weights, in the dtypes that the backward pass gives."""
        _warn_of_low_precision(loss.dtype)
        seed = ops.ones_like(loss) * scale.astype(loss.dtype)
        return self.grad(self.network, self.weights)(*inputs, seed)

    def unscale_and_check(self, grads: tuple, scale: Tensor) -> tuple:
        """Reduce the gradients across devices, unscale them into the parameters' dtypes and look for overflow.

        Returns:
            The gradients as the optimizer will get them; a bool scalar, whether any of their values is inf or nan
            (on Ascend and GPU, whatever MindSpore's check says); and for each gradient whether it holds any (empty
            where another check than this library's was made).
        """
        reduced = self.reduced(grads)
        if not self.check_here:
            unscaled = cast_like(grads, unscale(cast_up(reduced), scale))
            overflow = self.get_overflow_status(Tensor([0] * 8, mstype.int32), unscaled).reshape(())
            return unscaled, overflow, ()
        unscaled, overflow, flags = self.gradients.unscale_and_check(reduced, scale)
        if self.narrow_parameters:  # a float32 may become inf in float16
            unscaled = cast_like(grads, unscaled)
            overflow, flags = self.gradients.check(unscaled)
        return unscaled, overflow, flags

    def apply_fused(self, grads: tuple, scale: Tensor) -> Tensor:
        """Let the optimizer unscale, check and, without overflow, update; return the overflow. See `cells.fused`."""
        overflow, flags = self.optimizer.apply_scaled_gradients(self.reduced(grads), scale)
        kept = self._overflow_flags[0]
        return ops.depend(overflow, ops.assign(kept, ops.select(overflow, flags, kept)))

    def reduced(self, grads: tuple) -> tuple:
        """Return the gradients reduced over the devices, where there are several in at least float32."""
        return self.grad_reducer(cast_up(grads) if self.reducer_flag else grads)

    def keep_flags(self, unscaled: tuple, flags: Any) -> Tensor:
        """Keep which gradients held inf or nan, for `nonfinite_parameters`. Runs on overflow only."""
        if not self.check_here or self.sparse_gradients:
            flags = self.gradients.nonfinite_flags(unscaled)
        return ops.assign(self._overflow_flags[0], flags)

    def nonfinite_parameters(self) -> list:
        """Return the names of the parameters whose gradients held inf or nan at the last overflow.

        Empty before the first one. Reads the device.
        """
        flags = self._overflow_flags[0].asnumpy()
        return [weight.name for weight, flag in zip(self.weights, flags) if flag]

    def get_overflow_status(self, status: Any, compute_output: Any) -> Tensor:
        """Return whether `compute_output`, a tuple of gradients, overflowed on any device.

        On CPU this looks for inf and nan, and adds up the devices' flags where there are several; on Ascend
        and GPU it is MindSpore's own check. For train cells built on this one.
        """
        if not self.cpu_target:
            return super().get_overflow_status(status, compute_output)
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
        ops.assign(self.scale_sense, value.reshape(self.scale_sense.shape))


_warned: set = set()


@ops.constexpr
def _warn_of_low_precision(loss_dtype: Any) -> None:
    """Warn once, while the graph is built, of a loss in which large scales become inf."""
    if loss_dtype == mstype.float16 and loss_dtype not in _warned:
        _warned.add(loss_dtype)
        warnings.warn(
            "The loss is float16, so the gradient's seed is inf at any loss scale above 65504 and every such step "
            "is skipped. Compute the loss in float32: cast the network's output with .astype(mindspore.float32) "
            "before the loss function.",
            stacklevel=2,
        )


def _scale_of_call(scale: Tensor) -> Tensor:
    """Return a scale given as the last input of a call as float32 in its shape."""
    if not isinstance(scale, Tensor) or (scale.shape != () and scale.shape != (1,)):
        raise ValueError(
            "The last input of this train cell is its loss scale and must be a Tensor of shape () or (1,), "
            "for example Tensor([1024.0])."
        )
    return scale.astype(mstype.float32)


def _fixed_input_count(network: nn.Cell) -> int:
    """Return how many inputs `network` takes, or -2 where that is not fixed."""
    parameters = list(inspect.signature(network.construct).parameters.values())
    takes_any = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters)
    wrapped = getattr(network, "_backbone", None)
    if takes_any and isinstance(wrapped, nn.Cell):  # MindSpore's casting wrappers pass everything on
        return _fixed_input_count(wrapped)
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_fixed = all(p.kind in plain and p.default is p.empty for p in parameters)
    return len(parameters) if is_fixed else -2
