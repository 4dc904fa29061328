"""What a scaled step is compared with: MindSpore's own ways, and the same arithmetic by its ops alone.

The sums, products and norms of the full step are written again here on purpose: a baseline shares no code with what is
measured against it.
"""

from collections.abc import Callable

import mindspore as ms
from mindspore import Parameter, Tensor, amp, nn, ops

import lossscale
from benchmarks import workloads

_add = ops.MultitypeFuncGraph("add")
_clear = ops.MultitypeFuncGraph("clear")
_multiply = ops.MultitypeFuncGraph("multiply")
_square_sum = ops.MultitypeFuncGraph("square_sum")


@_add.register("Tensor", "Tensor")
def _add_tensor(total, grad):
    return ops.assign_add(total, grad)


@_clear.register("Tensor")
def _clear_tensor(total):
    return ops.assign(total, ops.zeros_like(total))


@_multiply.register("Tensor", "Tensor")
def _multiply_tensor(factor, grad):
    return grad * factor


@_square_sum.register("Tensor")
def _square_sum_of_tensor(grad):
    return ops.square(grad).sum()


class StockStep(nn.TrainOneStepWithLossScaleCell):
    """MindSpore's cell, with a finite check that its CPU backend has."""

    def get_overflow_status(self, status, compute_output):
        flags = self.hyper_map(_nonfinite, compute_output)
        return ops.addn(flags) > 0


def _nonfinite(grad):
    return ops.logical_not(ops.isfinite(grad).all()).astype(ms.float32)


def functional_step(network: nn.Cell, optimizer: nn.Cell) -> Callable:
    """Return MindSpore's functional recipe, amp.DynamicLossScaler and all_finite, compiled."""
    scaler = amp.DynamicLossScaler(workloads.LOSS_SCALE, 2, 10**6)

    def forward(x, y):
        loss = network(x, y)
        return scaler.scale(loss), loss

    gradients = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    @ms.jit
    def step(x, y):
        (_, loss), grads = gradients(x, y)
        grads = scaler.unscale(grads)
        finite = amp.all_finite(grads)
        scaler.adjust(finite)
        if finite:
            loss = ops.depend(loss, optimizer(grads))
        return loss

    network.set_train()
    return step


class FusedPlain(nn.TrainOneStepCell):
    """A plain step, without scaling or check, by the fused optimizer's own op."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer.apply_gradients(grads))


class FullPlain(nn.TrainOneStepCell):
    """What the full step does, without scaling or check, by MindSpore's ops.

    Mean and clip are one multiply here. `stock_clip` clips the means by `ops.clip_by_global_norm` instead.
    """

    def __init__(self, network: nn.Cell, optimizer: nn.Cell, stock_clip: bool):
        super().__init__(network, optimizer)
        self.stock_clip = stock_clip
        self.totals = self.weights.clone("accu_grads", init="zeros")
        self.micro_step = Parameter(Tensor(0, ms.int32), name="micro_step", requires_grad=False)
        self.ema = lossscale.EMA(workloads.EMA_DECAY)
        self.ema.bind(self.weights)
        self.map = ops.HyperMap()

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        totals = self.map(_add, self.totals, grads)
        micro_step = (self.micro_step + 1) % workloads.ACCUMULATE_STEPS
        ops.assign(self.micro_step, micro_step)
        if micro_step == 0:
            loss = ops.depend(loss, self.update(totals))
        return loss

    def update(self, totals):
        """Clip the means, step, average the weights, set the sums to zero."""
        done = self.optimizer(self.clipped_means(totals))
        done = ops.depend(done, self.ema())
        return ops.depend(done, self.map(_clear, self.totals))

    def clipped_means(self, totals):
        """Return the means of the gradients, clipped by their global norm."""
        share = Tensor(1.0 / workloads.ACCUMULATE_STEPS, ms.float32)
        if self.stock_clip:
            return ops.clip_by_global_norm(self.map(ops.partial(_multiply, share), totals), workloads.CLIP_NORM)
        norm = ops.sqrt(ops.addn(self.map(_square_sum, totals))) * share
        factor = ops.minimum(workloads.CLIP_NORM / norm, Tensor(1.0, ms.float32)) * share
        return self.map(ops.partial(_multiply, factor), totals)


class Order(nn.TrainOneStepCell):
    """A plain step whose optimizer waits for the last gradient, as it must where any gradient can stop it."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        waiting = ()
        for grad in grads:
            waiting += (ops.depend(grad, grads[0]),)
        return ops.depend(loss, self.optimizer(waiting))


class OrderAndBranch(nn.TrainOneStepCell):
    """A plain step that the last gradient can stop: an `if` around the optimizer, nothing else."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        if ops.isfinite(grads[0]).all():
            loss = ops.depend(loss, self.optimizer(grads))
        return loss
