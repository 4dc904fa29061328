"""MindSpore: plain, stock's ways of scaling made to run on CPU, and this library's. Run as a script."""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops

import lossscale
from benchmarks import timing, workloads

SHAPE_OF_DIGITS = (workloads.LENET_BATCH, 1, 32, 32)
GRAPH_VARIANTS = ["plain", "plain again", "stock", "stock functional"]
GRAPH_VARIANTS += ["ours", "ours, plain ops", "ours, fused", "fused plain"]
PYNATIVE_VARIANTS = ["plain", "plain again", "stock", "ours", "ours, fused"]
O2_VARIANTS = ["plain", "plain again", "stock", "ours"]
FULL_VARIANTS = ["plain", "plain again", "plain, ops.clip_by_global_norm", "ours", "ours, plain ops"]

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


class LeNet5(nn.Cell):
    """The usual one, for 32 x 32 images."""

    def __init__(self):
        super().__init__()
        self.body = nn.SequentialCell(
            nn.Conv2d(1, 6, 5, pad_mode="valid"),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 16, 5, pad_mode="valid"),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Flatten(),
            nn.Dense(400, 120),
            nn.ReLU(),
            nn.Dense(120, 84),
            nn.ReLU(),
            nn.Dense(84, 10),
        )

    def construct(self, x):
        return self.body(x)


def build_net(workload: str) -> tuple[nn.Cell, np.ndarray, np.ndarray]:
    """Return a net, a batch of inputs and one of targets of the same shape as its output."""
    ms.set_seed(1)
    rng = np.random.default_rng(1)
    if workload in workloads.MLP:
        batch, width, layers = workloads.MLP[workload]
        cells = [cell for _ in range(layers) for cell in (nn.Dense(width, width), nn.ReLU())]
        net, shape, out = nn.SequentialCell(*cells[:-1]), (batch, width), (batch, width)
    elif workload == "lenet5_b32":
        net, shape, out = LeNet5(), SHAPE_OF_DIGITS, (workloads.LENET_BATCH, 10)
    else:
        batch, length, width, heads, layers, hidden = workloads.TRANSFORMER
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        net, shape = nn.TransformerEncoder(layer, layers), (batch, length, width)
        out = shape
    inputs, targets = (rng.standard_normal(s).astype(np.float32) * 0.1 for s in (shape, out))
    return net, inputs, targets


def timed(cell: Any, parameters: list, inputs: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """Return what is timed: in GRAPH_MODE a step, in PYNATIVE_MODE a few and a weight after the last update."""
    x, y = Tensor(inputs), Tensor(targets)
    pynative = ms.get_context("mode") == ms.PYNATIVE_MODE
    smallest = min(parameters, key=lambda parameter: parameter.size)

    def step() -> float:
        for _ in range(workloads.PYNATIVE_STEPS if pynative else 1):
            outputs = cell(x, y)
            loss = float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy())
        if pynative:
            smallest.asnumpy()
        return loss

    return step


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


def full_cell(variant: str, workload: str) -> tuple[nn.Cell, Tensor, Tensor]:
    """Return a train cell that accumulates, clips and averages the weights, and the batch of its micro-steps."""
    os.environ["LOSSSCALE_BACKEND"] = "plain" if variant == "ours, plain ops" else ""
    net, inputs, targets = build_net(workload)
    network = nn.WithLossCell(net, nn.MSELoss())
    optimizer = nn.Momentum(net.trainable_params(), workloads.LEARNING_RATE, workloads.MOMENTUM)
    cell: nn.Cell
    if variant.startswith("plain"):
        cell = FullPlain(network, optimizer, stock_clip=variant.endswith("clip_by_global_norm"))
    else:
        cell = lossscale.TrainOneStepWithLossScaleCell(
            network,
            optimizer,
            lossscale.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6),
            accumulate_steps=workloads.ACCUMULATE_STEPS,
            clip_grad=lossscale.ClipByGlobalNorm(workloads.CLIP_NORM),
            ema=lossscale.EMA(workloads.EMA_DECAY),
            outputs="loss",
        )
    return cell.set_train(), Tensor(inputs), Tensor(targets)


def build_full_step(variant: str, workload: str) -> Callable[[], float]:
    """Return one whole window of micro-steps as a function that ends by reading the loss."""
    cell, x, y = full_cell(variant, workload)

    def step() -> float:
        for _ in range(workloads.ACCUMULATE_STEPS):
            loss = cell(x, y)
        return float(loss.asnumpy())

    return step


def full_rows(names: list[str]) -> dict[str, Callable[[], dict]]:
    """Return for each row of the full step's table a function that builds its steps."""
    return {name: lambda name=name: {v: build_full_step(v, name) for v in FULL_VARIANTS} for name in names}


def build_step(variant: str, workload: str, level: str, adam: bool = False) -> Callable[[], float]:
    """Return one training step as a function that ends by reading the loss."""
    os.environ["LOSSSCALE_BACKEND"] = "plain" if variant == "ours, plain ops" else ""
    net, inputs, targets = build_net(workload)
    if level != "O0":
        net = amp.auto_mixed_precision(net, level)
    network = nn.WithLossCell(net, nn.MSELoss())
    parameters, rate = net.trainable_params(), workloads.LEARNING_RATE
    fused = variant in ("ours, fused", "fused plain")
    optimizer: Any
    if adam:
        optimizer = (lossscale.FusedAdamWeightDecay if fused else nn.AdamWeightDecay)(parameters, rate)
    else:
        optimizer = (lossscale.FusedMomentum if fused else nn.Momentum)(parameters, rate, workloads.MOMENTUM)
    cell: Any
    if variant in ("plain", "plain again"):
        cell = nn.TrainOneStepCell(network, optimizer)
    elif variant == "fused plain":
        cell = FusedPlain(network, optimizer)
    elif variant == "stock":
        cell = StockStep(network, optimizer, nn.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6))
    elif variant == "stock functional":
        cell = functional_step(network, optimizer)
    else:
        update = lossscale.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6)
        cell = lossscale.TrainOneStepWithLossScaleCell(network, optimizer, update)
    if isinstance(cell, nn.Cell):
        cell.set_train()
    return timed(cell, parameters, inputs, targets)


def build_all(names: list[str], workload: str, level: str, adam: bool = False) -> dict[str, Callable[[], float]]:
    """Return the steps of all variants."""
    return {name: build_step(name, workload, level, adam) for name in names}


def all_workloads(names: list[str], mode: str, quick: bool) -> dict[str, Callable[[], dict]]:
    """Return for each row of the table a function that builds its steps; `quick` means float32 and Momentum only."""
    variants = GRAPH_VARIANTS if mode == "GRAPH" else PYNATIVE_VARIANTS
    rows: dict[str, Callable[[], dict]] = {}
    for name in names:
        rows[name] = lambda name=name: build_all(variants, name, "O0")
        if mode == "GRAPH" and not quick:
            rows[f"{name} O2"] = lambda name=name: build_all(O2_VARIANTS, name, "O2")
    if mode == "GRAPH" and not quick:
        adam = ["plain", "plain again", "ours", "ours, fused", "fused plain"]
        rows[f"{names[0]} AdamWeightDecay"] = lambda: build_all(adam, names[0], "O0", adam=True)
    return rows


def cold(variant: str, workload: str) -> dict:
    """Return the seconds of the first call, and the peak memory after five, of this process."""
    step = build_step(variant, workload, "O0")
    start = time.perf_counter()
    step()
    seconds = time.perf_counter() - start
    for _ in range(5):
        step()
    return {"first_call_s": seconds, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["GRAPH", "PYNATIVE"], default="GRAPH")
    parser.add_argument("--rounds", type=int, default=workloads.ROUNDS)
    parser.add_argument("--workloads", nargs="+", default=workloads.WORKLOADS)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--full", action="store_true", help="accumulation, clip and averages too")
    parser.add_argument("--cold", help="a variant: measure its first call and its memory in this process")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "GRAPH" else ms.PYNATIVE_MODE)
    if options.cold:
        timing.write(options.out, cold(options.cold, options.workloads[0]))
    elif options.full:
        timing.write(options.out, timing.measure(full_rows(options.workloads), options.rounds))
    else:
        table = all_workloads(options.workloads, options.mode, options.quick)
        timing.write(options.out, timing.measure(table, options.rounds))
