"""Mixed precision by one call, and by hand; each step is told its own loss scale.

`build_train_network(..., level="O2")` casts the network to float16 and puts loss scaling around it. By hand: float16
flags on the cells, float32 where it matters, and `TrainOneStepWithLossScaleCell` around it. Both train cells
take the scale of a call as one more input after the network's own, and return (loss, overflow, loss_scale). To
look at, a scale that is too large for float16: the step says so, and leaves the weights alone.
"""

import argparse
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/mixed_precision.py`

from examples.data import accuracy, batches, digits
from examples.nets import LeNet5
from lossscale import TrainOneStepWithLossScaleCell, build_train_network, fast_convolutions

GOOD_SCALE = Tensor(np.full(1, 1024.0), ms.float32)
LARGE_SCALE = Tensor(np.full(1, 2.0**40), ms.float32)


def automatic():
    """Everything but the loss and BatchNorm in float16."""
    network = LeNet5()
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.03, momentum=0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return network, build_train_network(network, optimizer, loss, level="O2")


def manual():
    """The cells in float16 by a flag, the last layer in float32; so the loss is computed in float32, too."""
    network = LeNet5()
    network.add_flags_recursive(fp16=True)
    network.fc3.add_flags_recursive(fp16=False, fp32=True)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.03, momentum=0.9)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return network, TrainOneStepWithLossScaleCell(nn.WithLossCell(network, loss), optimizer)


def train(name, train_cell, dataset, epochs):
    train_cell.set_train()
    with tqdm(total=epochs * dataset.get_dataset_size(), desc=name, unit="step") as bar:
        iterator = dataset.create_tuple_iterator(num_epochs=epochs)
        for epoch in range(epochs):
            for images, labels in iterator:
                loss, _, loss_scale = train_cell(images, labels, GOOD_SCALE)
                bar.update()
            bar.write(f"{name} epoch {epoch + 1}: loss={float(loss.asnumpy()):.4f} loss_scale={loss_scale}")


def main():
    parser = argparse.ArgumentParser(description="Mixed precision by one call and by hand.")
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    ms.set_context(mode=ms.GRAPH_MODE)
    fast_convolutions()
    train_data, test_data = digits()

    for make in (automatic, manual):
        ms.set_seed(1)
        network, train_cell = make()
        train(make.__name__, train_cell, batches(*train_data, 32), epochs)

        before = [weight.asnumpy().copy() for weight in network.trainable_params()]
        images, labels = Tensor(train_data[0][:32]), Tensor(train_data[1][:32])
        _, overflow, _ = train_cell(images, labels, LARGE_SCALE)
        same = all(np.array_equal(a, b.asnumpy()) for a, b in zip(before, network.trainable_params()))
        print(
            f"{make.__name__}: accuracy={accuracy(network, *test_data):.4f}; "
            f"at a scale of 2**40: overflow={overflow}, weights unchanged={same}"
        )


if __name__ == "__main__":
    main()
