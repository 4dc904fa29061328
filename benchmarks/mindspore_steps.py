"""MindSpore: plain, stock's ways of scaling made to run on CPU, and this library's. Run as a script."""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops

import lossscale
from benchmarks import timing, workloads

SHAPE_OF_DIGITS = (workloads.LENET_BATCH, 1, 32, 32)
GRAPH_VARIANTS = ["plain", "plain again", "stock", "stock functional", "ours", "ours, plain ops", "ours, fused"]
PYNATIVE_VARIANTS = ["plain", "plain again", "stock", "ours", "ours, plain ops", "ours, fused"]


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
    x, y = Tensor(inputs), Tensor(targets)

    def step() -> float:
        outputs = cell(x, y)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        return float(loss.asnumpy())

    return step


def build_all(names: list[str], workload: str, level: str, adam: bool = False) -> dict[str, Callable[[], float]]:
    """Return the steps of all variants."""
    return {name: build_step(name, workload, level, adam) for name in names}


def all_workloads(names: list[str], mode: str, quick: bool) -> dict[str, Callable[[], dict]]:
    """Return for each row of the table a function that builds its steps; `quick` means float32 and Momentum only."""
    variants = GRAPH_VARIANTS if mode == "GRAPH" else PYNATIVE_VARIANTS
    rows: dict[str, Callable[[], dict]] = {}
    for name in names:
        rows[name] = lambda name=name: build_all([*variants, "fused plain"], name, "O0")
        if mode == "GRAPH" and not quick:
            amp_variants = [variant for variant in variants if variant != "stock functional"]
            rows[f"{name} O2"] = lambda name=name, chosen=amp_variants: build_all(chosen, name, "O2")
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
    parser.add_argument("--cold", help="a variant: measure its first call and its memory in this process")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "GRAPH" else ms.PYNATIVE_MODE)
    if options.cold:
        timing.write(options.out, cold(options.cold, options.workloads[0]))
    else:
        timing.write(
            options.out, timing.measure(all_workloads(options.workloads, options.mode, options.quick), options.rounds)
        )
