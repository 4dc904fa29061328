"""How the cost of loss scaling grows with the number of parameters and of values: `make bench-growth`.

A network whose work is nothing but its parameters, so that what is measured is gradients, scaling and optimizer.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from benchmarks import timing, workloads

COUNTS = [10, 30, 100, 300, 1000]
VALUES_EACH = 1000
SIZES = [10**3, 10**4, 10**5, 10**6, 10**7, 10**8]
TENSORS = 10
ROUNDS = 20


def shapes() -> dict[str, tuple[int, int]]:
    """Return (parameters, values in each) for each row."""
    rows = {f"parameters {count}": (count, VALUES_EACH) for count in COUNTS}
    return rows | {f"values {size}": (TENSORS, size // TENSORS) for size in SIZES}


def mindspore_steps(count: int, size: int) -> dict[str, Callable[[], float]]:
    """Return a plain step, ours with a stock and with a fused optimizer, and MindSpore's own."""
    import mindspore as ms
    import numpy as np
    from mindspore import Parameter, Tensor, nn, ops

    import lossscale
    from benchmarks.baselines import StockStep

    class Squares(nn.Cell):
        """Half the sum of the squares of the parameters, whose gradients are the parameters."""

        def __init__(self) -> None:
            super().__init__()
            values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
            self.w = ms.ParameterTuple([Parameter(Tensor(values), name=f"w{i}") for i in range(count)])

        def construct(self, factor):
            losses = ()
            for weight in self.w:
                losses += (ops.square(weight).sum(),)
            return ops.addn(losses) * 0.5 * factor

    def build(variant: str) -> Callable[[], float]:
        network = Squares()
        optimizer = nn.Momentum(list(network.w), workloads.LEARNING_RATE, workloads.MOMENTUM)
        update = lossscale.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6)
        cells: dict[str, Callable[[], nn.Cell]] = {
            "stock": lambda: StockStep(
                network, optimizer, nn.DynamicLossScaleUpdateCell(workloads.LOSS_SCALE, 2, 10**6)
            ),
            "ours": lambda: lossscale.TrainOneStepWithLossScaleCell(network, optimizer, update),
            "ours, fused": lambda: lossscale.TrainOneStepWithLossScaleCell(network, lossscale.fuse(optimizer), update),
        }
        cell = cells.get(variant, lambda: nn.TrainOneStepCell(network, optimizer))().set_train()
        one = Tensor(1.0, ms.float32)

        def step() -> float:
            outputs = cell(one)
            return float((outputs[0] if isinstance(outputs, tuple) else outputs).asnumpy())

        return step

    ms.set_context(mode=ms.GRAPH_MODE)
    return {variant: build(variant) for variant in ("plain", "plain again", "stock", "ours", "ours, fused")}


def torch_steps(count: int, size: int) -> dict[str, Callable[[], float]]:
    """Return a plain step and one with GradScaler, by PyTorch's foreach kernels."""
    import torch

    def build(scaled: bool) -> Callable[[], float]:
        generator = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, generator=generator, requires_grad=True) for _ in range(count)]
        optimizer = torch.optim.SGD(weights, workloads.LEARNING_RATE, workloads.MOMENTUM, foreach=True)
        scaler = torch.amp.GradScaler("cpu", workloads.LOSS_SCALE, growth_interval=10**6, enabled=scaled)

        def step() -> float:
            optimizer.zero_grad()
            loss = torch.stack([weight.square().sum() for weight in weights]).sum() * 0.5
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.item()

        return step

    return {"plain": build(False), "plain again": build(False), "GradScaler": build(True)}


def draw(results: dict, path: Path) -> None:
    """Draw the ratios against the number of parameters, and of values, with quartiles as bands."""
    from matplotlib import pyplot as plt

    styles = {
        ("MindSpore", "stock"): ("MindSpore, stock", "#999999", "s"),
        ("MindSpore", "ours"): ("MindSpore, lossscale", "#0072B2", "o"),
        ("MindSpore", "ours, fused"): ("MindSpore, lossscale, fused optimizer", "#56B4E9", "^"),
        ("PyTorch", "GradScaler"): ("PyTorch, GradScaler (foreach)", "#E69F00", "D"),
    }
    figure, both = plt.subplots(1, 2, figsize=(11, 4.5), dpi=150, sharey=True)
    titles = {"parameters": f"parameters of {VALUES_EACH:,} values each", "values": f"values, in {TENSORS} parameters"}
    for axes, (kind, title) in zip(both, titles.items()):
        for (framework, variant), (label, colour, marker) in styles.items():
            rows = {int(name.split()[1]): row for name, row in results[framework].items() if name.startswith(kind)}
            found = {x: row[variant] for x, row in rows.items() if "ratio" in row.get(variant, {})}
            axes.plot(list(found), [r["ratio"] for r in found.values()], marker=marker, color=colour, label=label)
            low, high = ([r[end] for r in found.values()] for end in ("low", "high"))
            axes.fill_between(list(found), low, high, color=colour, alpha=0.2, linewidth=0)
        axes.axhline(1, color="black", linewidth=1)
        axes.set_xscale("log")
        axes.set_xlabel(title)
        axes.grid(linewidth=0.4, alpha=0.5)
    both[0].set_ylabel("time of a scaled step / plain step\n(same framework; bands: quartiles)")
    figure.suptitle("How the cost of dynamic loss scaling grows, Momentum, float32, on CPU")
    figure.legend(*both[0].get_legend_handles_labels(), loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Measure one framework where it is installed, or both and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="measure the framework of this environment and write JSON here")
    parser.add_argument("--peers", help="the Python of the environment that has PyTorch and matplotlib")
    parser.add_argument("--draw", type=Path, nargs=2, help="draw a JSON file as a picture")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    here = Path(__file__).parent
    if options.draw:
        draw(json.loads(options.draw[0].read_text(encoding="utf-8")), options.draw[1])
    elif options.out:
        build = torch_steps if find_spec("torch") else mindspore_steps
        rows = {name: lambda shape=shape: build(*shape) for name, shape in shapes().items()}
        timing.write(options.out, timing.measure(rows, options.rounds))
    else:
        results = {}
        for framework, python in (("MindSpore", sys.executable), ("PyTorch", options.peers)):
            out = here / f"growth.{framework}.json"
            command = [python, "-m", "benchmarks.growth", "--out", str(out), "--rounds", str(options.rounds)]
            subprocess.run(command, check=True, cwd=here.parent)
            results[framework] = json.loads(out.read_text(encoding="utf-8"))
            out.unlink()
        numbers, picture = here / "growth.json", here / "growth.png"
        numbers.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        command = [options.peers, "-m", "benchmarks.growth", "--draw", str(numbers), str(picture)]
        subprocess.run(command, check=True, cwd=here.parent)
        print(f"Wrote {numbers} and {picture}.")


if __name__ == "__main__":
    main()
