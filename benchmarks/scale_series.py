"""Compare the scales of `lossscale.GradScaler` with those of PyTorch's own, on the same overflows, to the bit.

Where both are installed: ``python -m benchmarks.scale_series``. `make bench` has them in two environments: there one
writes its series (``--out``), and the other writes those of the same cases (``--cases``).
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks import timing

LENGTH = 12
GRADIENTS = (1.0, float("inf"))


class Idle:
    """An optimizer of one scalar that does nothing."""

    def __init__(self, *parameters):
        self.parameters = parameters

    def __call__(self, grads):
        """Do nothing."""


def our_series(settings, overflows):
    """The scale after each iteration, by this library."""
    from mindspore import Parameter, Tensor

    from lossscale import GradScaler

    scaler, optimizer, scales = GradScaler(*settings), Idle(Parameter(Tensor(1.0), name="w")), []
    for overflow in overflows:
        scaler.step(optimizer, (Tensor(GRADIENTS[overflow]),))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def torch_series(settings, overflows):
    """The scale after each iteration, by PyTorch."""
    import torch

    init, growth, backoff, interval = settings
    scaler = torch.amp.GradScaler("cpu", init, growth, backoff, interval)
    weight = torch.ones((), requires_grad=True)
    optimizer, scales = torch.optim.SGD([weight], lr=0.0), []
    for overflow in overflows:
        scaler.scale(weight)  # PyTorch makes its scale on the first call
        weight.grad = torch.tensor(GRADIENTS[overflow])
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def random_case(rng):
    """Settings and overflows; scales stay above 2**-126, where PyTorch's would go on to 0."""
    factors = ((2.0, 0.5), (1 + 2.0 ** rng.uniform(-8, 4), rng.uniform(0.1, 0.99)))[int(rng.integers(2))]
    settings = (float(2.0 ** rng.uniform(-60, 127.9)), *map(float, factors), int(rng.integers(1, 5)))
    return settings, [bool(flag) for flag in rng.random(LENGTH) < rng.random()]


def random_cases(count, seed=0):
    """Return `count` random cases."""
    rng = np.random.default_rng(seed)
    return [random_case(rng) for _ in range(count)]


def count_differences(series, others):
    """Return how many series differ from the others' of the same cases."""
    return sum(ours != theirs for ours, theirs in zip(series, others, strict=True))


def main():
    """Print how many series differ, and fail if any does; or write the series of one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of series")
    parser.add_argument("--out", help="write this library's cases and series to a file")
    parser.add_argument("--cases", help="with --out: such a file, for whose cases PyTorch's series are written")
    options = parser.parse_args()
    if options.cases:
        cases = json.loads(Path(options.cases).read_text(encoding="utf-8"))["cases"]
        timing.write(options.out, {"series": [torch_series(*case) for case in cases]})
        return
    cases = random_cases(options.count)
    series = [our_series(*case) for case in cases]
    if options.out:
        timing.write(options.out, {"cases": cases, "series": series})
        return
    different = count_differences(series, [torch_series(*case) for case in cases])
    print(f"{options.count} series of {LENGTH} iterations: {different} differ from PyTorch's")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
