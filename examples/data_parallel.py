"""Train LeNet5 on real digits in data parallel, with one dynamic loss scale on all ranks: `make train-distributed`.

Each rank takes its own rows of every batch, so N ranks with batch b train like one process with batch N * b. Started
again after a crash, it goes on from the last checkpoint that all ranks have.
"""

import argparse
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/data_parallel.py`

from examples.data import accuracy, digits
from examples.nets import LeNet5
from lossscale import (
    DynamicLossScaleManager,
    build_train_network,
    fast_convolutions,
    load_train_state,
    save_train_state,
)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--device", default="CPU", choices=["CPU", "GPU", "Ascend"])
    parser.add_argument("--mode", default="GRAPH", choices=["GRAPH", "PYNATIVE"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32, help="rows of each rank in a step")
    parser.add_argument("--checkpoints", help="folder to save to after each epoch, and to resume from")
    parser.add_argument("--single", action="store_true", help="one process, without msrun")
    return parser.parse_args()


def rows_of_step(step, steps_per_epoch, count, rows, rank):
    """The rows of one rank in one step: each epoch is shuffled by its own number, the same way on every rank."""
    epoch, place = divmod(step, steps_per_epoch)
    order = np.random.default_rng(epoch).permutation(count)
    first = place * rows * communication.get_group_size() if rank is not None else place * rows
    return order[first + (rank or 0) * rows :][:rows]


def weights_are_equal(network):
    """Whether all ranks hold the same weights, to the bit."""
    weights = np.concatenate([weight.asnumpy().ravel() for weight in network.trainable_params()])
    everyone = ms.ops.AllGather()(Tensor(weights)).asnumpy().reshape(-1, weights.size)
    return bool((everyone == everyone[0]).all())


def main():
    args = parse_arguments()
    ms.set_device(args.device)
    ms.set_context(mode=getattr(ms, f"{args.mode}_MODE"))
    fast_convolutions()
    rank, ranks = None, 1
    if not args.single:
        communication.init()
        ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
        rank, ranks = communication.get_rank(), communication.get_group_size()
    ms.set_seed(1)  # the same on every rank: all start with the same weights

    (images, labels), (test_images, test_labels) = digits()
    steps_per_epoch = len(labels) // (args.batch_size * ranks)
    steps = args.epochs * steps_per_epoch
    network = LeNet5()
    learning_rate = nn.cosine_decay_lr(0.0, 0.03, steps, steps_per_epoch, args.epochs)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate, momentum=0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    # Starts at 2**24, where float16 overflows on real images: the first steps are skipped, by all ranks together.
    train_cell = build_train_network(
        network, optimizer, loss, level="O2", loss_scale_manager=DynamicLossScaleManager(scale_window=100)
    )

    first_step = load_train_state(args.checkpoints, train_cell) if args.checkpoints else 0
    overflows = 0
    for step in tqdm(range(first_step, steps), unit="step", disable=bool(rank), dynamic_ncols=True):
        rows = rows_of_step(step, steps_per_epoch, len(labels), args.batch_size, rank)
        _, overflow, _ = train_cell(Tensor(images[rows]), Tensor(labels[rows]))
        overflows += int(overflow.asnumpy())
        if args.checkpoints and (step + 1) % steps_per_epoch == 0:
            save_train_state(args.checkpoints, train_cell, step + 1)

    equal = ranks == 1 or weights_are_equal(network)
    if not rank:
        print(
            f"ranks={ranks} accuracy={accuracy(network, test_images, test_labels):.4f} "
            f"loss_scale={float(train_cell.scale_sense.asnumpy()):.0f} overflows={overflows} steps={steps} "
            f"equal_weights={equal}"
        )
    if not equal:
        raise SystemExit("The ranks have different weights.")


if __name__ == "__main__":
    main()
