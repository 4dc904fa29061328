"""A train step with a fixed scale that always updates: for optimizers that can't unscale by themselves."""

from typing import Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from cells.backward import extras_of, gradient_seed, loss_of
from cells.checks import SMALLEST_NORMAL_FLOAT32, check_positive_number, warn_of_divisor
from cells.gradient_ops import cast_like, cast_up, multiply
from cells.inputs import placed_inputs
from cells.optimizers import as_one
from cells.outputs import check_cells


class CustomTrainOneStepCell(nn.TrainOneStepCell):
    """One training step with a fixed loss scale, unscaled here and applied whether or not it overflowed.

    ::

        grads = gradients of sens * loss
        grads = grads / sens, computed in at least float32
        grads = mean over the devices          (data parallel only)
        optimizer(grads)
        return loss

    For optimizers that have no `loss_scale` argument, such as `nn.AdamWeightDecay`, where
    ``FixedLossScaleManager(loss_scale, drop_overflow_update=False)`` would leave gradients scaled (MindSpore's
    LossScale guide). To skip overflowing steps use `TrainOneStepWithLossScaleCell`.

    Args:
        network: the network with its loss inside; it returns the loss, alone or first of a tuple or list, or in a dict.
        optimizer: updates the parameters of the network; its own `loss_scale` must be 1. A tuple of optimizers that
            share no parameter updates with all.
        sens: the loss scale, a finite number > 0 (from 2**-126 to 2**126, so that its reciprocal is normal).

    Inputs:
        - **\\*inputs** (Tensor) - the inputs of the network, by place or by name.

    Outputs:
        The unscaled loss, shape (); a tuple of it and what the network returns beside it, if that is anything.

    Raises:
        TypeError: if `sens` is not a number.
        ValueError: if `sens` is not finite or out of range.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor, nn
        >>> from lossscale import CustomTrainOneStepCell
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=0.01)
        >>> step = CustomTrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, 1024.0)
        >>> loss = step(Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32)))
        >>> loss.shape
        ()
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, sens: float = 1.0):
        owner = type(self).__name__
        number = check_positive_number("sens", sens, owner)
        if not SMALLEST_NORMAL_FLOAT32 <= number <= 1 / SMALLEST_NORMAL_FLOAT32:
            raise ValueError(f"For '{owner}', 'sens' must be between 2**-126 and 2**126, but got {sens}.")
        check_cells(network, optimizer, owner)
        warn_of_divisor(optimizer, owner)
        super().__init__(network, as_one(optimizer), number)
        self.hyper_map = ops.HyperMap()
        self.reciprocal_sense = Tensor(1 / number, mstype.float32)

    def scale_grad(self, gradients: Any) -> Any:
        """Return the gradients divided by `sens`, in their own dtypes. A subclass may override it."""
        return cast_like(gradients, multiply(self.reciprocal_sense, cast_up(gradients)))

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        if named_inputs:
            inputs = placed_inputs(self.network, inputs, named_inputs, type(self).__name__)
        return super().__call__(*inputs)

    def construct(self, *inputs):
        output = self.network(*inputs)
        loss = loss_of(output)
        grads = self.grad(self.network, self.weights)(*inputs, gradient_seed(output, Tensor(self.sens, mstype.float32)))
        grads = self.scale_grad(grads)
        grads = self.grad_reducer(grads)
        loss = ops.depend(loss, self.optimizer(grads))
        extras = extras_of(output)
        return (loss, *extras) if extras else loss
