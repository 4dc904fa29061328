"""Worker: a training with checkpoints that can be made to fail at a chosen place; `test_faults.py` runs it.

``training.py folder [fault]``, where the fault, on the last rank, is one of "kill" (kill -9 while the others wait for
it in mid-step), "write" (hangs in the middle of writing a checkpoint, to be killed from outside), "full" (its disk is
full) and "scales" (all ranks start with scales of their own).
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication
from mindspore.train import serialization

from lossscale import load_train_state, save_train_state
from tests.distributed.steps import poison, rows_of, settings, train_cell
from tests.oracles import parameters

STEPS = 8
EVERY = 2
LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)
OVERFLOWS = {1: 0, 4: 1}  # step: rank
FAULT = 5  # the step of a kill, and the one after whose end a save fails


def fail_while_saving(fault, folder):
    """Let the next save hang after its third Parameter, or run into a full disk."""
    if fault == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (600, LIMITS[1]))
        return
    write, written = serialization._write_parameter_bytes_data, []

    def write_three(*args, **kwargs):
        if len(written) == 3:
            args[2].flush()
            (folder / "writing").touch()
            time.sleep(300)
        written.append(args[0])
        return write(*args, **kwargs)

    serialization._write_parameter_bytes_data = write_three


def main(folder, fault=""):
    folder = Path(folder)
    settings("O0")
    communication.init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    ranks, rank = communication.get_group_size(), communication.get_rank()
    cell = train_cell()
    if fault == "scales":
        cell.set_sense_scale(Tensor(1024.0 * 2**rank))
    first = load_train_state(folder / "checkpoints", cell)
    print(f"rank {rank} starts at step {first}", flush=True)
    for step in range(first, STEPS):
        last = rank == ranks - 1
        if fault == "kill" and last and step == FAULT:
            time.sleep(1)  # the others are in the step by now
            os.kill(os.getpid(), signal.SIGKILL)
        cell(*rows_of(step, ranks, rank), poison(OVERFLOWS.get(step) == rank))
        if (step + 1) % EVERY == 0:
            if fault in ("write", "full") and last and step == FAULT:
                fail_while_saving(fault, folder)
            try:
                save_train_state(folder / "checkpoints", cell, step + 1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)  # the log is a file too
    np.savez(folder / f"end_{rank}.npz", **parameters(cell))


if __name__ == "__main__":
    main(*sys.argv[1:])
