"""The train steps of Bert, Albert, Ernie and their like in the official models.

Each such model brings five cells: with and without accumulation, reducing over devices on each micro-step or at
the end of a window, and one whose optimizer takes the overflow flag. Gradients are added up scaled in float32,
divided once by scale * N, clipped each by its own norm (or by value, or all by the global norm), and applied; a
flag that stays up until the window ends drops the window whole. A step returns (loss, overflow, loss_scale).

What changes for the better: the accumulating cells know one kind of device only, by operators that the others
lack; the rest is written for any. They keep a second Parameter for the scale beside MindSpore's, so that
`set_sense_scale` and a resume touch the wrong one; here there is one. Clips come before the check there, after it
here. One difference: with accumulation their loss is the running mean of the window, here it is the
micro-step's own.
"""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from examples.data import batches, digits
from lossscale import (
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DynamicLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)

CLIPS = {"norm": ClipByNorm, "value": ClipByValue, "global_norm": ClipByGlobalNorm}


def train_cell(network, optimizer, scale_sense, *, accumulate_steps=1, clip="norm", clip_value=1.0):
    """Return the train cell; `clip` is "norm" (each gradient's own), "value" or "global_norm"."""
    return TrainOneStepWithLossScaleCell(
        network, optimizer, scale_sense, accumulate_steps=accumulate_steps, clip_grad=CLIPS[clip](clip_value)
    )


class MaskedModel(nn.Cell):
    """Guesses masked pixels of an 8x8 image of 17 gray levels from the others; level 17 is the mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(18, 8)
        self.layers = nn.SequentialCell(nn.Flatten(), nn.Dense(64 * 8, 128), nn.GELU(), nn.Dense(128, 64 * 17))
        self.loss = nn.CrossEntropyLoss(ignore_index=-1)

    def construct(self, masked, pixels):
        scores = self.layers(self.tokens(masked)).reshape(-1, 17)
        hidden = ops.select(masked == 17, pixels, ops.full_like(pixels, -1))
        return self.loss(scores, hidden.reshape(-1))


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    (images, _), _ = digits()
    pixels = np.rint((images[:, 0, ::4, ::4] * 0.4 + 0.3) * 16).astype(np.int32).reshape(-1, 64)
    masked = np.where(np.random.default_rng(1).random(pixels.shape) < 0.15, 17, pixels).astype(np.int32)
    network = MaskedModel()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.003)
    update = DynamicLossScaleUpdateCell(2.0**16, 2, 1000)
    step = train_cell(network, optimizer, update, accumulate_steps=2).set_train()
    losses = []
    for batch in batches(masked, pixels, 16).create_tuple_iterator(num_epochs=3):
        loss, _, scale = step(*batch)
        losses.append(float(loss))
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"first_loss={first:.4f} last_loss={last:.4f} loss_scale={float(scale):.0f}")


if __name__ == "__main__":
    main()
