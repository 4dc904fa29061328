"""How often does one rank overflow, and what does that cost many? Prints the tables of docs/scaling.md.

Measured: the share of steps in which a batch of one rank overflows in float16 at a given scale, LeNet5 on real
digits. Computed from these rates by simulation of the scale's rule: what any number of independent ranks skips.
"""

import argparse
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.data import digits
from examples.nets import LeNet5
from lossscale import FixedLossScaleManager, build_train_network

RANKS = (1, 8, 64, 512, 1000, 10000)
WINDOW = 2000


def measure(exponents, batches, batch_size, warm_up):
    """Return, for each exponent, the share of batches that overflow at a scale of 2**exponent.

    The network is first trained at a low scale; while measuring its weights stand still (learning rate 0).
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    (images, labels), _ = digits()
    rng = np.random.default_rng(0)
    network = LeNet5()
    optimizer = nn.SGD(network.trainable_params(), learning_rate=0.05)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    cell = build_train_network(network, optimizer, loss, level="O2", loss_scale_manager=FixedLossScaleManager(256.0))

    def overflows():
        rows = rng.choice(len(labels), batch_size, replace=False)
        return bool(cell(Tensor(images[rows]), Tensor(labels[rows]))[1].asnumpy())

    for _ in range(warm_up):
        overflows()
    ms.ops.assign(optimizer.learning_rate, Tensor(0.0))
    result = {}
    for exponent in exponents:
        cell.set_sense_scale(Tensor(2.0**exponent))
        result[exponent] = sum(overflows() for _ in tqdm(range(batches), desc=f"2**{exponent}", leave=False)) / batches
    return result


def any_of(rate, ranks):
    """The chance that at least one of independent ranks overflows."""
    return 1 - (1 - rate) ** ranks


def simulate(rates, ranks, hysteresis, steps, transient=0.0, window=WINDOW, seed=0):
    """Return (share of steps skipped, mean log2 of the scale) once the dynamic rule has settled; its floor is 1.

    `rates` maps exponents to rates of one rank; below the smallest the rate is 0, above the largest 1. `transient` is
    the rate of overflows that no scale prevents.
    """
    draws = np.random.default_rng(seed).random(2 * steps)
    exponent, clean, in_a_row, skipped, total = max(rates), 0, 0, 0, 0
    chances = {e: any_of(max(rate, transient), ranks) for e, rate in rates.items()}
    below = any_of(transient, ranks)
    for step, draw in enumerate(draws):
        chance = chances.get(exponent, below if exponent < min(rates) else 1.0)
        if draw < chance:
            in_a_row, clean = in_a_row + 1, 0
            skipped += step >= steps
            if in_a_row >= hysteresis:
                exponent = max(exponent - 1, 0)
        else:
            in_a_row, clean = 0, clean + 1
            if clean == window:
                exponent, clean = exponent + 1, 0
        total += exponent if step >= steps else 0
    return skipped / steps, total / steps


def main():
    """Measure, compute and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=500, help="per scale")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=200, help="steps of training before the measurement")
    parser.add_argument("--steps", type=int, default=200_000, help="of each simulation, after as many to settle")
    args = parser.parse_args()
    rates = measure(range(14, 23), args.batches, args.batch_size, args.warm_up)

    header = "| scale | one rank, measured | " + " | ".join(f"any of {ranks:,}" for ranks in RANKS[1:]) + " |"
    print(header + "\n" + "| --- " * (len(RANKS) + 1) + "|")
    for exponent, rate in rates.items():
        chances = " | ".join(f"{any_of(rate, ranks):.4g}" for ranks in RANKS[1:])
        print(f"| 2^{exponent} | {rate:.4g} | {chances} |")

    for transient in (0.0, 1e-6):
        print(f"\nOverflows at any scale: {transient:g} of one rank's steps\n")
        print("| ranks | hysteresis | steps skipped | mean log2 of the scale |\n| --- | --- | --- | --- |")
        for ranks in RANKS:
            for hysteresis in (1, 2, 4):
                skipped, mean = simulate(rates, ranks, hysteresis, args.steps, transient)
                print(f"| {ranks:,} | {hysteresis} | {100 * skipped:.3f} % | {mean:.2f} |")


if __name__ == "__main__":
    main()
