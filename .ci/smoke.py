"""Is what is installed whole? Train by an installed lossscale: `python smoke.py`, from a folder without the sources."""

import sys
from pathlib import Path

import numpy as np
from mindspore import Tensor, nn

import cells
import lossscale
from lossscale import DynamicLossScaleManager, build_train_network, cli


def main():
    """Train, skip, and ask the doctor."""
    here = Path(__file__).resolve().parents[1]
    if here in Path(lossscale.__file__).resolve().parents:
        raise SystemExit(f"This is the checkout's lossscale, {lossscale.__file__}; run it from another folder.")
    if "--native" in sys.argv and lossscale.backend() != "native":
        raise SystemExit(f"The wheel has no native kernel that loads here: {lossscale.backend()}")
    network = nn.Dense(4, 1)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    manager = DynamicLossScaleManager(2.0**8)
    step = build_train_network(network, optimizer, nn.MSELoss(), level="O2", loss_scale_manager=manager)
    data, label = Tensor(np.ones((8, 4), np.float32)), Tensor(np.zeros((8, 1), np.float32))
    losses = [float(step(data, label)[0]) for _ in range(20)]
    before = network.weight.asnumpy()
    overflow, scale = step(Tensor(np.full((8, 4), np.inf, np.float32)), label)[1:]
    if not (losses[-1] < losses[0] and bool(overflow) and float(scale) == 2.0**7):
        raise SystemExit(f"The step went wrong: losses {losses}, overflow {overflow}, scale {scale}")
    if not np.array_equal(before, network.weight.asnumpy()):
        raise SystemExit("A step with inf moved the weights.")
    if cli.main(["doctor"]):
        raise SystemExit("`lossscale doctor` found a problem.")
    print(f"smoke test passed: {lossscale.__file__}, {cells.__file__}, {lossscale.backend()}")


if __name__ == "__main__":
    main()
