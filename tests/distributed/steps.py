"""Worker: train steps of all kinds on every rank of one job, written to a folder for the tests to judge.

As a module, `sweep` is what the tests run on one process, with the batches of all ranks, as the oracle.
"""

import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn, ops

from lossscale import (
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    GradScaler,
    TrainOneStepWithLossScaleCell,
    all_finite,
)
from tests.nets import Poisoned, batch, mlp
from tests.oracles import parameters

STEPS = 5
ROWS = 4
MICRO = 2


def settings(mode):
    """Set MindSpore's mode by its short name: O0, O1 or PYNATIVE."""
    if mode == "PYNATIVE":
        ms.set_context(mode=ms.PYNATIVE_MODE)
    else:
        ms.set_context(mode=ms.GRAPH_MODE, jit_config={"jit_level": mode})


def train_cell(kind=TrainOneStepWithLossScaleCell, window=2, **options):
    """A small train cell with momentum and a dynamic scale, the same on every call and rank."""
    ms.set_seed(7)
    np.random.seed(7)
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    optimizer = nn.Momentum(net.trainable_params(), 0.05, 0.9)
    return kind(net, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, window), **options)


class ChecksLocalGradients(TrainOneStepWithLossScaleCell):
    """A third-party train cell that asks for the overflow before it reduces."""

    def construct(self, x, y, poison):
        scale = self.scale_sense * 1.0
        loss = self.network(x, y, poison)
        grads = self.scaled_gradients((x, y, poison), loss, scale)
        overflow = self.get_overflow_status(Tensor([0] * 8, ms.int32), grads)
        unscaled, _, _ = self.unscale_and_check(self.reduce_gradients(grads), scale)
        skip = self.process_loss_scale(overflow)
        if not skip:
            loss = ops.depend(loss, self.optimizer(unscaled))
        return loss, overflow, self.scale_sense * 1.0


def poison(bad):
    return Tensor(np.array([0, 0, np.inf if bad else 0, 0], np.float32))


def rows_of(step, ranks, rank=None):
    """The rows of one rank in one step, or of all ranks together."""
    x, y = batch(size=ROWS * ranks, seed=step)
    rows = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
    return Tensor(x.asnumpy()[rows]), Tensor(y.asnumpy()[rows])


def restore(cell, values):
    """Set all Parameters, in place: `load_param_into_net` leaves a compiled optimizer with the old ones."""
    for parameter in cell.get_parameters():
        ops.assign(parameter, Tensor(values[parameter.name].copy()))


def sweep(cell, ranks, rank=None):
    """Train with an overflow on each (rank, step) in turn, and with none; `rank` None is one process with all rows.

    Returns:
        (losses, overflow flags, scales), each of shape (cases, STEPS), and the weights after each case.
    """
    first = parameters(cell)
    cases = [None] + [(bad_rank, step) for bad_rank in range(ranks) for step in range(STEPS)]
    outputs, weights = [], []
    for case in cases:
        restore(cell, first)
        row = []
        for step in range(STEPS):
            bad = case is not None and step == case[1] and rank in (None, case[0])
            row.append([float(value) for value in cell(*rows_of(step, ranks, rank), poison(bad))])
        outputs.append(row)
        weights.append(np.concatenate([w.asnumpy().ravel() for w in cell.weights]))
    losses, overflows, scales = np.array(outputs).transpose(2, 0, 1)
    return {"losses": losses, "overflows": overflows, "scales": scales, "weights": np.array(weights)}


def micro_steps_alone(rank, folder):
    """Rank 1 waits outside while rank 0 takes all but the last micro-step of a window: they must not communicate."""
    cell = train_cell(accumulate_steps=3)
    done = folder / "micro_steps_done"
    cell_inputs = [(*rows_of(step, 2, rank), poison(False)) for step in range(3)]
    deadline = time.monotonic() + 60
    cell(*cell_inputs[0])  # together: the ranks compare their scales on the first call
    if rank == 0:
        cell(*cell_inputs[1])
        done.touch()
    else:
        while not done.exists():
            if time.monotonic() > deadline:
                raise SystemExit("rank 0 waits for rank 1 in a micro-step that ends no window")
            time.sleep(0.05)
        cell(*cell_inputs[1])
    cell(*cell_inputs[2])


def accumulated(cell, ranks, rank, bad_rank):
    """Three windows of MICRO micro-steps, the second with an overflow on one rank in its first micro-step."""
    outputs = []
    for step in range(3 * MICRO):
        bad = step == MICRO and rank in (None, bad_rank)
        outputs.append([float(value) for value in cell(*rows_of(step, ranks, rank), poison(bad))][1:])
    weights = np.concatenate([w.asnumpy().ravel() for w in cell.weights])
    return {"accumulated": np.array(outputs), "accumulated_weights": weights}


class SumOfTokens(nn.Cell):
    """Returns the sum of the losses of some rows and how many they are."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def construct(self, x, y, mask):
        losses = ((self.net(x) - y) ** 2).mean(axis=1)
        return (losses * mask).sum(), mask.sum()


def per_token(ranks, rank, accumulate_steps):
    """Weights and flags after six calls with other numbers of tokens in every call and rank, an inf in the third."""
    ms.set_seed(7)
    np.random.seed(7)
    net = SumOfTokens()
    cell = TrainOneStepWithLossScaleCell(
        net,
        nn.Momentum(net.trainable_params(), 0.05, 0.9),
        DynamicLossScaleUpdateCell(1024.0, 2, 2),
        accumulate_steps=accumulate_steps,
        calculate_per_token_loss=True,
    )
    flags = []
    for step in range(6):
        mask = np.random.default_rng(step).permutation(np.arange(ROWS * ranks) < 3).astype(np.float32)
        mask[0] = np.inf if step == 2 else mask[0]
        rows = slice(None) if rank is None else slice(rank * ROWS, (rank + 1) * ROWS)
        flags.append(float(cell(*rows_of(step, ranks, rank), Tensor(mask[rows]))[1]))
    return cell, np.concatenate([*(w.asnumpy().ravel() for w in cell.weights), np.array(flags)])


def all_per_token(ranks, rank):
    """What `per_token` gives with and without accumulation, where reducers take the mean and where the sum."""
    found = {}
    for mean in (True, False):
        if rank is not None:
            ms.set_auto_parallel_context(gradients_mean=mean)
        for window in (1, MICRO):
            found[f"per_token_{mean}_{window}"] = per_token(ranks, rank, window)[1]
    if rank is not None:
        ms.set_auto_parallel_context(gradients_mean=True)
    return found


def all_reduces(cell, rank, folder, last=None):
    """How many AllReduce nodes the compiled step of a train cell holds, by MindSpore's own dump of the graph."""
    ms.set_context(save_graphs=1, save_graphs_path=str(folder))
    cell(*rows_of(0, 2, rank), poison(False) if last is None else last)
    ms.set_context(save_graphs=0)
    graphs = sorted(folder.rglob("*_validate_*.ir"))
    return [graph.read_text().count("= AllReduce(") for graph in graphs]


def grad_scaler(rank):
    """For four steps of `GradScaler`, of which each rank overflows in one, before or after the reduce: what it did.

    Returns:
        {"before" or "after": rows of (skipped, scale, AllReduces of flags, weight)}.
    """
    found = {}
    for order in ("before", "after"):
        ms.set_seed(7)
        weight = ms.Parameter(Tensor(np.ones(3, np.float32)), name="w")
        optimizer = nn.SGD([weight], 0.5)
        reducer = nn.DistributedGradReducer(optimizer.parameters, True, 2)
        scaler, rows = GradScaler(1024.0, growth_interval=2), []
        all_reduce, flags = ops.AllReduce, []
        for step in range(4):
            grads = (Tensor(np.full(3, np.inf if step == rank + 1 else 0.25 * scaler.get_scale(), np.float32)),)
            ops.AllReduce = lambda made=all_reduce, flags=flags: flags.append(1) or made()
            try:
                if order == "after":
                    grads = reducer(scaler.unscale_(optimizer, grads))
                    scaler.step(optimizer, grads)
                else:
                    scaler.step(optimizer, reducer(grads))
            finally:
                ops.AllReduce = all_reduce
            scaler.update()
            rows.append([scaler.step_was_skipped(), scaler.get_scale(), len(flags), float(weight.asnumpy()[0])])
        found[order] = rows
    return found


def functional_scaler(rank):
    """The functional scaler on reduced gradients, in one compiled step: rows of (finite, scale)."""
    net = nn.Dense(3, 1)
    scaler = DynamicLossScaler(1024.0, 2, 2)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    reducer = nn.DistributedGradReducer(optimizer.parameters, True, 2)

    def forward(x):
        return scaler.scale(net(x).mean())

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def train_step(x):
        _, grads = grad_fn(x)
        grads = scaler.unscale(reducer(grads), keep_dtype=False)
        finite = all_finite(grads)
        scaler.adjust(finite)
        if finite:
            optimizer(grads)
        return finite

    rows = []
    for step in range(4):
        finite = train_step(Tensor(np.full((2, 3), np.inf if step == rank + 1 else 1.0, np.float32)))
        rows.append([bool(finite), float(scaler.scale_value.asnumpy())])
    return rows


def different_scales(rank):
    """The error of ranks that start with different scales."""
    cell = train_cell()
    cell.set_sense_scale(Tensor(1024.0 * 2**rank))
    try:
        cell(*rows_of(0, 2, rank), poison(False))
    except RuntimeError as error:
        return str(error)
    return "no error"


def main(mode, folder, bad_rank):
    settings(mode)
    communication.init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    ranks, rank = communication.get_group_size(), communication.get_rank()
    folder = Path(folder)
    found = sweep(train_cell(), ranks, rank)
    found.update(accumulated(train_cell(accumulate_steps=MICRO), ranks, rank, int(bad_rank)))
    local = sweep(train_cell(ChecksLocalGradients), ranks, rank)
    found.update({f"local_{name}": values for name, values in local.items()})
    found.update(all_per_token(ranks, rank))
    found["different_scales"] = different_scales(rank)
    if ranks == 2:
        found.update({f"grad_scaler_{order}": rows for order, rows in grad_scaler(rank).items()})
        found["functional_scaler"] = functional_scaler(rank)
    if mode != "PYNATIVE" and ranks == 2:
        for name, cell in (
            ("plain", train_cell()),
            ("accumulating", train_cell(accumulate_steps=MICRO)),
            ("local", train_cell(ChecksLocalGradients)),
        ):
            found[f"all_reduces_{name}"] = all_reduces(cell, rank, folder / f"graphs_{name}_{rank}")
        cell, _ = per_token(2, rank, 1)
        mask = Tensor(np.ones(ROWS, np.float16))  # another dtype, which compiles anew
        found["all_reduces_per_token"] = all_reduces(cell, rank, folder / f"graphs_tokens_{rank}", mask)
    np.savez(folder / f"rank_{rank}.npz", **found)
    if ranks == 2:
        micro_steps_alone(rank, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
