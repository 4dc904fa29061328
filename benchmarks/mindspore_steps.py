"""MindSpore: plain, stock's ways of scaling made to run on CPU, and this library's. Run as a script."""

import argparse
import os
import resource
import time
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn
from mindspore.experimental import optim

import lossscale
from benchmarks import timing, workloads
from benchmarks.baselines import FullPlain, FusedPlain, OrderAndBranch, StockStep, functional_step
from benchmarks.nets import build_net

GRAPH_VARIANTS = ["plain", "plain again", "fixed", "order and branch", "stock", "stock functional"]
GRAPH_VARIANTS += ["ours", "ours, plain ops", "ours, fused", "fused plain"]
PYNATIVE_VARIANTS = ["plain", "plain again", "fixed", "stock", "ours", "ours, fused"]
FAMILY_VARIANTS = ["plain", "plain again", "ours", "ours, fused", "fused plain"]
FULL_VARIANTS = ["plain", "plain again", "plain, ops.clip_by_global_norm", "ours", "ours, plain ops", "ours, fused"]


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


def make_optimizer(name: str, parameters: list, fused: bool, loss_scale: float = 1.0) -> Any:
    """Return an optimizer by its name, or its fused twin."""
    rate, momentum = workloads.LEARNING_RATE, workloads.MOMENTUM
    makers: dict[str, Callable[[], Any]] = {
        "Momentum": lambda: nn.Momentum(parameters, rate, momentum, loss_scale=loss_scale),
        "SGD": lambda: nn.SGD(parameters, rate, momentum, loss_scale=loss_scale),
        "Adam": lambda: nn.Adam(parameters, rate, loss_scale=loss_scale),
        "AdamWeightDecay": lambda: nn.AdamWeightDecay(parameters, rate),
        "AdamW": lambda: optim.AdamW(parameters, rate),
    }
    optimizer = makers[name]()
    return lossscale.fuse(optimizer) if fused else optimizer


def full_cell(variant: str, workload: str, optimizer_name: str = "Momentum") -> tuple[nn.Cell, Tensor, Tensor]:
    """Return a train cell that accumulates, clips and averages the weights, and the batch of its micro-steps."""
    os.environ["LOSSSCALE_BACKEND"] = "plain" if variant == "ours, plain ops" else ""
    net, inputs, targets = build_net(workload)
    network = nn.WithLossCell(net, nn.MSELoss())
    optimizer = make_optimizer(optimizer_name, net.trainable_params(), variant == "ours, fused")
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


def build_full_step(variant: str, workload: str, optimizer_name: str) -> Callable[[], float]:
    """Return one whole window of micro-steps as a function that ends by reading the loss."""
    cell, x, y = full_cell(variant, workload, optimizer_name)

    def step() -> float:
        for _ in range(workloads.ACCUMULATE_STEPS):
            loss = cell(x, y)
        return float(loss.asnumpy())

    return step


def full_rows(names: list[str]) -> dict[str, Callable[[], dict]]:
    """Return for each row of the full step's table a function that builds its steps."""
    return {
        f"{name} {optimizer}": lambda name=name, optimizer=optimizer: {
            variant: build_full_step(variant, name, optimizer) for variant in FULL_VARIANTS
        }
        for name in names
        for optimizer in workloads.FULL_OPTIMIZERS
    }


def build_step(variant: str, workload: str, level: str = "O0", optimizer_name: str = "Momentum") -> Callable[[], float]:
    """Return one training step as a function that ends by reading the loss."""
    os.environ["LOSSSCALE_BACKEND"] = "plain" if variant == "ours, plain ops" else ""
    net, inputs, targets = build_net(workload)
    if level != "O0":
        net = amp.auto_mixed_precision(net, level)
    network = nn.WithLossCell(net, nn.MSELoss())
    parameters = net.trainable_params()
    fixed_scale = workloads.LOSS_SCALE if variant == "fixed" else 1.0
    fused = variant in ("ours, fused", "fused plain")
    optimizer = make_optimizer(optimizer_name, parameters, fused, fixed_scale)
    cell: Any
    if variant in ("plain", "plain again", "fixed"):
        cell = nn.TrainOneStepCell(network, optimizer, sens=fixed_scale)
    elif variant == "order and branch":
        cell = OrderAndBranch(network, optimizer)
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


def build_all(names: list[str], *arguments: str) -> dict[str, Callable[[], float]]:
    """Return the steps of all variants."""
    return {name: build_step(name, *arguments) for name in names}


def all_workloads(names: list[str], mode: str, quick: bool) -> dict[str, Callable[[], dict]]:
    """Return for each row of the table a function that builds its steps; `quick` means float32 and Momentum only."""
    variants = GRAPH_VARIANTS if mode == "GRAPH" else PYNATIVE_VARIANTS
    rows: dict[str, Callable[[], dict]] = {}
    for name in names:
        rows[name] = lambda name=name: build_all(variants, name)
        if mode == "GRAPH" and not quick:
            rows[f"{name} O2"] = lambda name=name: build_all(GRAPH_VARIANTS, name, "O2")
    return rows


def family(names: list[str]) -> dict[str, Callable[[], dict]]:
    """Return the rows that compare each fused optimizer with MindSpore's own."""
    return {
        f"{name} {optimizer}": lambda name=name, optimizer=optimizer: build_all(FAMILY_VARIANTS, name, "O0", optimizer)
        for name in names
        for optimizer in workloads.OPTIMIZERS
    }


def cold(variant: str, workload: str) -> dict:
    """Return the seconds of the first call, and the peak memory after five, of this process."""
    step = build_step(variant, workload)
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
    parser.add_argument("--family", action="store_true", help="each optimizer beside its fused twin")
    parser.add_argument("--cold", help="a variant: measure its first call and its memory in this process")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE if options.mode == "GRAPH" else ms.PYNATIVE_MODE)
    lossscale.fast_convolutions()
    if options.cold:
        timing.write(options.out, cold(options.cold, options.workloads[0]))
    elif options.full:
        timing.write(options.out, timing.measure(full_rows(options.workloads), options.rounds))
    elif options.family:
        timing.write(options.out, timing.measure(family(options.workloads), options.rounds))
    else:
        table = all_workloads(options.workloads, options.mode, options.quick)
        timing.write(options.out, timing.measure(table, options.rounds))
