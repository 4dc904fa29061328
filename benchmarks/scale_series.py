"""Compare the scales of `lossscale.GradScaler` with those of PyTorch's own, on the same overflows, to the bit.

Run it where PyTorch is installed: ``python -m benchmarks.scale_series [number of series]``.
"""

import sys

import mindspore as ms
import numpy as np
from mindspore import Tensor

from lossscale import GradScaler

LENGTH = 12
GRADIENTS = (1.0, float("inf"))


class Idle:
    """An optimizer of one scalar that does nothing."""

    def __init__(self):
        self.parameters = (ms.Parameter(Tensor(1.0), name="w"),)

    def __call__(self, grads):
        """Do nothing."""


def our_series(settings, overflows):
    """The scale after each iteration, by this library."""
    scaler, optimizer, scales = GradScaler(*settings), Idle(), []
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


def count_differences(count, seed=0):
    """Return in how many of `count` random cases the two series differ."""
    rng = np.random.default_rng(seed)
    cases = [random_case(rng) for _ in range(count)]
    return sum(our_series(*case) != torch_series(*case) for case in cases)


def main():
    """Print how many series differ; fail if any does."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    different = count_differences(count)
    print(f"{count} series of {LENGTH} iterations: {different} differ from PyTorch's")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
