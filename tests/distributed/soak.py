"""Worker: 10,000 steps with random overflows; notes the scale of each, memory on the way and compilations.

``soak.py folder`` on the ranks of a job, or on one process as ``python -m tests.distributed.soak folder alone``.
"""

import resource
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import communication

from tests.distributed.steps import poison, rows_of, settings, train_cell

STEPS = 10_000
WINDOW = 20
PAGE = resource.getpagesize()


def overflowing_rank():
    """For each step the rank that overflows, -1 for none, the same on every rank: about one step in 25."""
    rng = np.random.default_rng(3)
    return np.where(rng.random(STEPS) < 0.04, rng.integers(0, 2, STEPS), -1)


def resident():
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def main(folder, alone=""):
    settings("O0")
    rank = None
    if not alone:
        communication.init()
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
        rank = communication.get_rank()
    cell = train_cell(window=WINDOW)
    bad_rank = overflowing_rank()
    rows = [rows_of(step, 2, rank) for step in range(8)]
    flags = {bad: poison(bad) for bad in (False, True)}
    scales, memory = np.zeros(STEPS), {}
    for step in range(STEPS):
        bad = bad_rank[step] >= 0 and rank in (None, bad_rank[step])
        _, _, scale = cell(*rows[step % 8], flags[bool(bad)])
        scales[step] = float(scale)
        if step + 1 in (1000, STEPS):
            memory[step + 1] = resident()
    np.savez(
        Path(folder) / f"soak_{'alone' if rank is None else rank}.npz",
        scales=scales,
        memory=[memory[1000], memory[STEPS]],
        compiled=len(cell.compile_cache),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
