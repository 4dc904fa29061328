"""mindocr's train step: a scale from a configuration, accumulation, clipping, EMA, and updates that overflow.

The wrapper is a subclass of MindSpore's cell. A configuration names the kind of scale; most of the library's own
keep updates that overflow. Where it accumulates, it stretches the rule of the dynamic scale over micro-steps:
factor ** (1 / N), window * N. The average covers all parameters, with mindcv's ramp.

What changes for the better: overflow is found on CPU, where the wrapper says "none"; with accumulation it is
found in what all devices share, and not in each one's own; the rule of the scale counts windows, so that an
overflow halves it whatever N is; an overflow drops its window and does not shift the next; the average follows
updates only; and resuming needs no code. The library saves the scale it started with as the current one, and
reads 0 where a file has none; here the scale is a Parameter of the train cell, saved and loaded with it.
"""

import mindspore as ms
import numpy as np
from mindspore import nn

from examples.data import batches, digits
from examples.migration.mindcv import RampedEMA
from lossscale import (
    ClipByGlobalNorm,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    fast_convolutions,
)


def update_cell(loss_scaler):
    """Return the update cell for a configuration such as {"type": "dynamic", "loss_scale": 512}."""
    if loss_scaler["type"] == "dynamic":
        return DynamicLossScaleUpdateCell(
            loss_scaler["loss_scale"], loss_scaler.get("scale_factor", 2.0), int(loss_scaler.get("scale_window", 2000))
        )
    return FixedLossScaleUpdateCell(loss_scaler["loss_scale"])


def train_cell(
    network,
    optimizer,
    loss_scaler,
    *,
    drop_overflow_update=False,
    accumulate_steps=1,
    clip_norm=None,
    ema_decay=None,
):
    """Return the train cell for mindocr's options; a step gives (loss, overflow, loss_scale)."""
    return TrainOneStepWithLossScaleCell(
        network,
        optimizer,
        update_cell(loss_scaler),
        accumulate_steps=accumulate_steps,
        clip_grad=None if clip_norm is None else ClipByGlobalNorm(clip_norm),
        ema=None if ema_decay is None else RampedEMA(ema_decay, list(network.get_parameters())),
        drop_overflow_update=drop_overflow_update,
    )


class Line(nn.Cell):
    """Reads lines of three digits: a small image of 8x24 in, scores of ten digits at three places out."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(
            nn.Conv2d(1, 16, 3, pad_mode="same"), nn.ReLU(), nn.Flatten(), nn.Dense(16 * 8 * 24, 3 * 10)
        )

    def construct(self, lines):
        return self.layers(lines).reshape(-1, 10)


class LineLoss(nn.Cell):
    """The mean loss over all places of all lines."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss = nn.CrossEntropyLoss()

    def construct(self, lines, texts):
        return self.loss(self.network(lines), texts.reshape(-1))


def lines_of(images, labels):
    """Return lines of three digits each, 1x8x24, and their texts of three labels."""
    small = images[: len(images) // 3 * 3, 0, ::4, ::4].reshape(-1, 3, 8, 8)
    return small.transpose(0, 2, 1, 3).reshape(-1, 1, 8, 24).copy(), labels[: len(small) * 3].reshape(-1, 3)


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    fast_convolutions()
    ms.set_seed(1)
    train_data, test_data = digits()
    network = Line()
    step = train_cell(
        LineLoss(network),
        nn.Adam(network.trainable_params(), 0.003),
        {"type": "dynamic", "loss_scale": 512},
        drop_overflow_update=True,
        accumulate_steps=2,
        clip_norm=5.0,
        ema_decay=0.999,
    ).set_train()
    for lines, texts in batches(*lines_of(*train_data), 8).create_tuple_iterator(num_epochs=4):
        _, _, scale = step(lines, texts)
    lines, texts = lines_of(*test_data)
    with step.ema.applied():
        read = network(ms.Tensor(lines)).asnumpy().argmax(axis=1)
    print(f"accuracy={np.mean(read == texts.reshape(-1)):.4f} loss_scale={float(scale):.0f}")


if __name__ == "__main__":
    main()
