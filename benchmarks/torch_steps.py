"""PyTorch: plain, and with its GradScaler. Run as a script in the benchmark's own environment."""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from benchmarks import timing, workloads


def build_net(workload: str) -> tuple[nn.Module, np.ndarray, np.ndarray]:
    """Return a net, a batch of inputs and one of targets of the same shape as its output."""
    torch.manual_seed(1)
    rng = np.random.default_rng(1)
    if workload in workloads.MLP:
        batch, width, layers = workloads.MLP[workload]
        modules = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
        net, shape, out = nn.Sequential(*modules[:-1]), (batch, width), (batch, width)
    elif workload == "lenet5_b32":
        net = nn.Sequential(
            nn.Conv2d(1, 6, 5),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Flatten(),
            nn.Linear(400, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, 10),
        )
        shape, out = (workloads.LENET_BATCH, 1, 32, 32), (workloads.LENET_BATCH, 10)
    else:
        batch, length, width, heads, layers, hidden = workloads.TRANSFORMER
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        net, shape = nn.TransformerEncoder(layer, layers), (batch, length, width)
        out = shape
    inputs, targets = (rng.standard_normal(s).astype(np.float32) * 0.1 for s in (shape, out))
    return net, inputs, targets


def make_optimizer(name: str, parameters: list) -> torch.optim.Optimizer:
    """Return an optimizer by its name."""
    if name == "AdamW":
        return torch.optim.AdamW(parameters, workloads.LEARNING_RATE)
    return torch.optim.SGD(parameters, workloads.LEARNING_RATE, workloads.MOMENTUM)


def build_step(variant: str, workload: str) -> Callable[[], float]:
    """Return one training step as a function that ends by reading the loss."""
    net, inputs, targets = build_net(workload)
    optimizer = make_optimizer("Momentum", list(net.parameters()))
    loss_fn = nn.MSELoss()
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    scaler = torch.amp.GradScaler("cpu", init_scale=workloads.LOSS_SCALE, growth_interval=10**6)

    def plain() -> float:
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    def scaled() -> float:
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return scaled if variant == "GradScaler" else plain


def build_full_step(variant: str, workload: str, optimizer_name: str) -> Callable[[], float]:
    """Return one whole window of micro-steps, clipped and averaged, as a function that ends by reading the loss."""
    net, inputs, targets = build_net(workload)
    parameters = list(net.parameters())
    averages = [parameter.detach().clone() for parameter in parameters]
    optimizer = make_optimizer(optimizer_name, parameters)
    loss_fn = nn.MSELoss()
    x, y = torch.from_numpy(inputs), torch.from_numpy(targets)
    scaled = variant == "GradScaler"
    scaler = torch.amp.GradScaler("cpu", workloads.LOSS_SCALE, growth_interval=10**6)

    def step() -> float:
        optimizer.zero_grad()
        for _ in range(workloads.ACCUMULATE_STEPS):
            loss = loss_fn(net(x), y)
            mean = loss / workloads.ACCUMULATE_STEPS
            (scaler.scale(mean) if scaled else mean).backward()
        if scaled:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, workloads.CLIP_NORM)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 1 - workloads.EMA_DECAY)
        return loss.item()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=workloads.ROUNDS)
    parser.add_argument("--workloads", nargs="+", default=workloads.WORKLOADS)
    parser.add_argument("--full", action="store_true", help="accumulation, clip and averages too")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    variants = ["plain", "plain again", "GradScaler"]
    rows: dict[str, Callable[[], dict]]
    if options.full:
        rows = {
            f"{name} {kind}": lambda name=name, kind=kind: {v: build_full_step(v, name, kind) for v in variants}
            for name in options.workloads
            for kind in workloads.FULL_OPTIMIZERS
        }
    else:
        rows = {name: lambda name=name: {v: build_step(v, name) for v in variants} for name in options.workloads}
    timing.write(options.out, timing.measure(rows, options.rounds))
