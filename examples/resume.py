"""Stop a run with dynamic loss scaling, resume it in a fresh train cell, and get the same bits.

`save_checkpoint(train_cell)` saves more than the weights: the optimizer's state, the loss scale and the counters
that decide when it moves next. Saving only the network would start the scale anew at 2**24.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/resume.py`

from examples.data import digits
from examples.nets import LeNet5
from lossscale import DynamicLossScaleManager, build_train_network, fast_convolutions


def make_train_cell(seed):
    ms.set_seed(seed)
    network = LeNet5()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.05, momentum=0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    manager = DynamicLossScaleManager(scale_window=10)  # a short window, so that the scale moves in a short run
    return build_train_network(network, optimizer, loss, level="O2", loss_scale_manager=manager)


def train(name, train_cell, steps, images, labels, batch_size=32):
    """Train on batches number `steps`, and return what each step returned."""
    record = []
    for step in tqdm(steps, desc=name, unit="step"):
        batch = np.arange(step * batch_size, (step + 1) * batch_size) % len(labels)
        outputs = train_cell(Tensor(images[batch]), Tensor(labels[batch]))
        record.append(tuple(output.asnumpy().item() for output in outputs))
    return record


def main():
    parser = argparse.ArgumentParser(description="Save, resume and compare bit by bit.")
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    ms.set_context(mode=ms.GRAPH_MODE)
    fast_convolutions()
    (images, labels), _ = digits()

    unbroken = make_train_cell(seed=1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "half_way.ckpt")
        train("first half", unbroken, range(steps // 2), images, labels)
        ms.save_checkpoint(unbroken, path)  # the train cell, not the network
        expected = train("unbroken", unbroken, range(steps // 2, steps), images, labels)

        resumed = make_train_cell(seed=2)  # other weights, until the checkpoint is loaded
        missing, unused = ms.load_param_into_net(resumed, ms.load_checkpoint(path))
        print(f"not in the checkpoint: {missing}; not in the train cell: {unused}")
    found = train("resumed", resumed, range(steps // 2, steps), images, labels)

    print("step  loss    overflow  loss_scale  (resumed, last five)")
    for step, (loss, overflow, loss_scale) in list(enumerate(found, steps // 2))[-5:]:
        print(f"{step:4d}  {loss:.4f}  {overflow!s:8}  {loss_scale:.0f}")
    pairs = zip(unbroken.get_parameters(), resumed.get_parameters())
    parameters_equal = all(np.array_equal(a.asnumpy(), b.asnumpy()) for a, b in pairs)
    print(f"outputs identical={found == expected} parameters identical={parameters_equal}")


if __name__ == "__main__":
    main()
