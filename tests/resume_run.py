"""A short training whose steps partly overflow, for `tests/test_checkpoint.py` to stop and to resume elsewhere.

Run as a program it resumes from each checkpoint of a folder: ``python -m tests.resume_run GRAPH folder``.
"""

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from lossscale import DynamicLossScaleManager, build_train_network
from tests.nets import batch, mlp

STEPS = 8
OVERFLOWS = (1, 2, 6)
MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}


def new_train_cell():
    """A train cell with optimizer states, a learning-rate schedule and a dynamic scale."""
    net = mlp()
    rates = nn.ExponentialDecayLR(0.05, 0.9, 2)
    optimizer = nn.Adam(net.trainable_params(), rates, weight_decay=0.01)
    manager = DynamicLossScaleManager(2**15, 2, 3)
    return build_train_network(net, optimizer, nn.MSELoss(), level="O2", loss_scale_manager=manager)


def train(train_cell, first_step, after_step=None):
    """Take the steps from `first_step` on; return what each gave."""
    outputs = []
    for step in range(first_step, STEPS):
        x, y = batch(seed=step)
        outputs.append([value.asnumpy() for value in train_cell(x, y * np.inf if step in OVERFLOWS else y)])
        if after_step is not None:
            after_step(step + 1)
    return outputs


def main(mode, folder):
    ms.set_context(mode=MODES[mode])
    for step in range(STEPS):
        train_cell = new_train_cell()
        ms.load_param_into_net(train_cell, ms.load_checkpoint(str(Path(folder) / f"{step}.ckpt")), strict_load=True)
        outputs = train(train_cell, step)
        ms.save_checkpoint(train_cell, str(Path(folder) / f"resumed_{step}.ckpt"))
        np.save(Path(folder) / f"losses_{step}.npy", np.array([output[0] for output in outputs]))


if __name__ == "__main__":
    main(*sys.argv[1:])
