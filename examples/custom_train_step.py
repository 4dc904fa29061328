"""Train with AdamWeightDecay, an optimizer that can't unscale, under a fixed loss scale; then with a stage overridden.

Scaling the loss by 1024 makes the gradients 1024 times larger. Optimizers such as `nn.Momentum` can divide them
(`loss_scale=1024.0`), `nn.AdamWeightDecay` can't: the train step has to. `CustomTrainOneStepCell` does, and a
network built with it is trained in a loop of one's own, or handed to `Model`. Both are shown, from the same
start, and end with the same weights.

The third training overrides one stage of `TrainOneStepWithLossScaleCell`, the step with all options, and keeps the
others: scaling, the check for overflow, the dynamic scale.
"""

import argparse
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for `python examples/custom_train_step.py`

from examples.data import accuracy, batches, digits
from examples.nets import LeNet5
from lossscale import (
    ClipByGlobalNorm,
    CustomTrainOneStepCell,
    DynamicLossScaleUpdateCell,
    Model,
    TrainOneStepWithLossScaleCell,
    fast_convolutions,
)

LOSS_SCALE = 1024.0


class CentralizedStep(TrainOneStepWithLossScaleCell):
    """Takes the mean out of each weight's gradient (H. Yong et al., Gradient Centralization, ECCV 2020).

    `apply_update` gets true, checked and clipped gradients, and only where the weights are to move.
    """

    def apply_update(self, grads):
        centered = ()
        for grad in grads:
            if grad.ndim > 1:  # not the biases
                rows = grad.reshape((grad.shape[0], -1))
                grad = (rows - rows.mean(axis=1, keep_dims=True)).reshape(grad.shape)
            centered += (grad,)
        return super().apply_update(centered)


def make_network():
    ms.set_seed(1)
    network = LeNet5()
    with_loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    optimizer = nn.AdamWeightDecay(network.trainable_params(), learning_rate=0.002, weight_decay=0.01)
    return network, with_loss, optimizer


def make_train_cell():
    network, with_loss, optimizer = make_network()
    return network, CustomTrainOneStepCell(with_loss, optimizer, LOSS_SCALE).set_train()


def main():
    parser = argparse.ArgumentParser(description="Loss scaling for an optimizer that can't unscale.")
    parser.add_argument("--epochs", type=int, default=4)
    epochs = parser.parse_args().epochs
    ms.set_context(mode=ms.GRAPH_MODE)
    fast_convolutions()
    train_data, test_data = digits()

    # 1) A loop of one's own: call the train cell with a batch, get the unscaled loss.
    looped, train_cell = make_train_cell()
    dataset = batches(*train_data, 32)
    with tqdm(total=epochs * dataset.get_dataset_size(), desc="loop", unit="step") as bar:
        iterator = dataset.create_tuple_iterator(num_epochs=epochs)
        for epoch in range(epochs):
            for images, labels in iterator:
                loss = train_cell(images, labels)
                bar.update()
            bar.write(f"epoch {epoch + 1}: loss={float(loss.asnumpy()):.4f}")

    # 2) The same cell in Model, which then needs neither optimizer nor loss_scale_manager.
    modelled, train_cell = make_train_cell()
    Model(train_cell).train(epochs, batches(*train_data, 32), callbacks=[ms.train.LossMonitor(44)])

    # 3) A stage of one's own, beside the others' options.
    own, with_loss, optimizer = make_network()
    update = DynamicLossScaleUpdateCell(2.0**24, scale_factor=2, scale_window=2000)
    train_cell = CentralizedStep(with_loss, optimizer, update, clip_grad=ClipByGlobalNorm(5.0)).set_train()
    for images, labels in batches(*train_data, 32).create_tuple_iterator(num_epochs=epochs):
        train_cell(images, labels)
    print(f"with centralized gradients: accuracy={accuracy(own, *test_data):.4f}")

    pairs = zip(looped.trainable_params(), modelled.trainable_params())
    difference = max(float(np.abs(a.asnumpy() - b.asnumpy()).max()) for a, b in pairs)
    print(f"largest difference of the weights, loop against Model: {difference}")
    print(f"accuracy={accuracy(looped, *test_data):.4f} loss_scale={LOSS_SCALE:.0f}")


if __name__ == "__main__":
    main()
