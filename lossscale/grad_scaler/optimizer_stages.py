"""Where does each optimizer of a GradScaler stand in this iteration, and do its gradients fit it?"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Optional

from mindspore import Tensor
from mindspore import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner

_OWNER = "GradScaler"


class Stage(Enum):
    """What has been done for one optimizer since the last update. At module level so that it pickles."""

    READY = 0
    UNSCALED = 1
    STEPPED = 2


@dataclass
class OptimizerState:
    """One optimizer in one iteration.

    Attributes:
        stage: what has been done so far.
        overflow: bool scalar on the device, whether its gradients hold inf or nan; None before they were checked.
        scaled: the tensors that `unscale_` was given, kept so that `step` can tell them from what it returned.
        skipped: whether `step` left the optimizer out.
    """

    stage: Stage = Stage.READY
    overflow: Optional[Tensor] = None
    scaled: tuple = ()
    skipped: bool = False

    def check_can_unscale(self) -> None:
        """Raise RuntimeError if this iteration's gradients were unscaled already."""
        if self.stage is Stage.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update(). Call it once, when "
                "all gradients are there: with gradient accumulation after the last micro-batch."
            )
        if self.stage is Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step(). Call it before, or update() is missing.")

    def check_can_step(self, grads: tuple) -> None:
        """Raise RuntimeError at a second step, or if some of `grads` are those that unscale_ was given."""
        if self.stage is Stage.STEPPED:
            raise RuntimeError("step() has already been called on this optimizer since the last update().")
        scaled = {id(tensor) for tensor in self.scaled}  # held here, so no other tensor has the same id
        if any(id(grad) in scaled for grad in grads):
            raise RuntimeError(
                "step() was given gradients that are still scaled: unscale_() returns the unscaled ones and leaves "
                "its input alone. Write: grads = scaler.unscale_(optimizer, grads)."
            )


def checked_gradients(optimizer: Any, grads: Any) -> tuple:
    """Return the gradients as a tuple if they fit the optimizer's parameters one by one.

    Raises:
        TypeError: if the optimizer has no parameters, or `grads` is not a tuple or list of Tensors.
        ValueError: if number or shapes differ, a parameter is float16, or the optimizer unscales by itself.
    """
    parameters = checked_parameters(optimizer)
    if not isinstance(grads, (tuple, list)):
        raise TypeError(
            f"For '{_OWNER}', 'grads' must be a tuple or list of Tensors, but got {type(grads).__name__}. Compute "
            "them by mindspore.value_and_grad(forward, None, optimizer.parameters, has_aux=True)."
        )
    if len(grads) != len(parameters):
        raise ValueError(
            f"For '{_OWNER}', 'grads' holds {len(grads)} gradients but the optimizer has {len(parameters)} parameters. "
            "Compute the gradients for optimizer.parameters, in that order."
        )
    for grad, parameter in zip(grads, parameters):
        if not isinstance(grad, (Tensor, RowTensorInner)):
            raise TypeError(
                f"For '{_OWNER}', the gradient of '{parameter.name}' must be a Tensor, but got "
                f"{type(grad).__name__}. For a parameter that the loss does not use, give zeros."
            )
        shape = grad.dense_shape if isinstance(grad, RowTensorInner) else grad.shape
        if tuple(shape) != tuple(parameter.shape):
            raise ValueError(
                f"For '{_OWNER}', the gradient of '{parameter.name}' has the shape {tuple(shape)}, but the parameter "
                f"{tuple(parameter.shape)}. Are these the gradients of another optimizer, or in another order? "
                "Compute them for optimizer.parameters."
            )
    return tuple(grads)


def checked_parameters(optimizer: Any) -> tuple:
    """Return the optimizer's parameters if loss scaling can serve them."""
    parameters = getattr(optimizer, "parameters", None)
    if isinstance(optimizer, type) or not callable(optimizer) or not isinstance(parameters, (tuple, list)):
        raise TypeError(
            f"For '{_OWNER}', 'optimizer' must be a mindspore.nn or mindspore.experimental.optim optimizer, but got "
            f"{_kind(optimizer)}. The order is step(optimizer, grads)."
        )
    divisor = getattr(optimizer, "loss_scale", 1.0)
    if divisor != 1.0:
        raise ValueError(
            f"The optimizer was built with loss_scale={divisor:g}, but '{_OWNER}' unscales the gradients itself: "
            "they would be divided twice. Build the optimizer without loss_scale."
        )
    for parameter in parameters:
        if parameter.dtype == mstype.float16:
            raise ValueError(
                f"The parameter '{parameter.name}' is float16, in which updates are lost however the gradients are "
                "scaled. Keep what is trained in float32 and compute in float16: mindspore.amp."
                'auto_mixed_precision(net, "O2") does that, net.to_float(mindspore.float16) too.'
            )
    return tuple(parameters)


def _kind(value: Any) -> str:
    """Return what a value is, without its contents: gradients are large."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"
