"""mindaudio's train steps: four wrappers with four layouts of what a step returns.

- Conformer's gives (loss, overflow, loss_scale, overflow, learning_rate), clips by the global norm, and has a
  switch that updates in spite of an overflow. The library's timing callback reads places 3 and 4.
- ECAPA's gives (loss, overflow, loss_scale, the network's output) and clips by value.
- FastSpeech2's gives the loss alone, moves the scale, and always updates.
- DeepSpeech2's uses MindSpore's cell with a fixed scale, and an optimizer that divides by that scale too.

What changes for the better: ECAPA's clip makes inf the limit before anything looks for it, so no overflow is ever
seen; here the check is first. FastSpeech2's applies nan under a dynamic scale; that is a choice here, and not the
default. Three of the four clip before gradients are reduced over devices. DeepSpeech2's gradients are divided
twice; here such an optimizer is refused.
"""

import mindspore as ms
import numpy as np
from mindspore import nn

from examples.data import batches, digits
from lossscale import (
    ClipByGlobalNorm,
    ClipByValue,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    build_train_network,
)


class ConformerCell(TrainOneStepWithLossScaleCell):
    """A train step for callbacks that look for the overflow flag at place 3 and the learning rate at place 4."""

    def select_outputs(self, output, report):
        loss, overflow, scale, rate = super().select_outputs(output, report)
        return loss, overflow, scale, overflow, rate


def conformer_cell(network, optimizer, scale_sense, *, clip_norm=5.0, force_update=False):
    """Return Conformer's train cell."""
    return ConformerCell(
        network,
        optimizer,
        scale_sense,
        clip_grad=ClipByGlobalNorm(clip_norm),
        drop_overflow_update=not force_update,
        outputs=("loss", "overflow", "loss_scale", "learning_rate"),
    )


def ecapa_cell(network, optimizer, *, loss_scale=2.0**14, clip_value=1.0):
    """Return ECAPA's train cell; `network` returns (loss, output), and the output comes back last."""
    update = FixedLossScaleUpdateCell(loss_scale)
    return TrainOneStepWithLossScaleCell(network, optimizer, update, clip_grad=ClipByValue(clip_value))


def fastspeech2_cell(network, optimizer, scale_sense):
    """Return FastSpeech2's train cell, which always updates."""
    return TrainOneStepWithLossScaleCell(network, optimizer, scale_sense, drop_overflow_update=False, outputs="loss")


def deepspeech2_cell(network, optimizer, *, loss_scale=1024.0):
    """Return DeepSpeech2's train cell; build the optimizer without `loss_scale`."""
    return build_train_network(network, optimizer, loss_scale_manager=FixedLossScaleManager(loss_scale))


class Classifier(nn.Cell):
    """Classifies short spectrograms (8 frames of 8 bands); returns (loss, scores)."""

    def __init__(self):
        super().__init__()
        self.frames = nn.Conv1d(8, 64, 3, pad_mode="same")
        self.scores = nn.Dense(64 * 8, 10)
        self.relu = nn.ReLU()
        self.flatten = nn.Flatten()
        self.loss = nn.CrossEntropyLoss()

    def construct(self, bands, labels):
        scores = self.scores(self.flatten(self.relu(self.frames(bands))))
        return self.loss(scores, labels), scores


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    (images, labels), _ = digits()  # handwriting stands in for speech: 8x8 values that mean one of ten things
    network = Classifier()
    step = ecapa_cell(network, nn.Adam(network.trainable_params(), 0.002)).set_train()
    right = []
    for bands, classes in batches(images[:, 0, ::4, ::4], labels, 16).create_tuple_iterator(num_epochs=2):
        _, _, scale, scores = step(bands, classes)
        right.append(np.mean(scores.asnumpy().argmax(axis=1) == classes.asnumpy()))
    print(f"running_accuracy={np.mean(right[-20:]):.4f} loss_scale={float(scale):.0f}")


if __name__ == "__main__":
    main()
