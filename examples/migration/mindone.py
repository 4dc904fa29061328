"""mindone's train steps: the trainers' wrapper, and the one of its diffusers.

The trainers' wrapper is a subclass of MindSpore's cell with accumulation, clipping by the global norm, an average
that a cell of its own keeps, and a switch that keeps overflowing updates. The diffusers' step is made of small
parts: each micro-step's loss is scaled by the script, gradients are added up scaled, and at the end of a window
they are unscaled, checked, clipped and applied; it returns the loss and whatever else the network gives.

What changes for the better: the first fakes "no overflow" on CPU, checks each device's own gradients where it
accumulates, loses an overflowing micro-step and so shifts its windows, and averages on micro-steps; learning
rates no longer depend on `get_lr` counting micro-steps. The second divides the loss by a scale that has moved
already, so that the reported loss is wrong whenever it moves, and never checks under a fixed scale. Their ways of
saving the scale are not needed: it is a Parameter of the train cell, and saved with it.
"""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from examples.data import batches, digits
from lossscale import EMA, ClipByGlobalNorm, TrainOneStepWithLossScaleCell


def trainer_cell(
    network, optimizer, scale_sense, *, accumulate_steps=1, clip_norm=None, ema_decay=None, drop_overflow_update=True
):
    """Return the trainers' train cell; a step gives (loss, overflow, loss_scale)."""
    return TrainOneStepWithLossScaleCell(
        network,
        optimizer,
        scale_sense,
        accumulate_steps=accumulate_steps,
        clip_grad=None if clip_norm is None else ClipByGlobalNorm(clip_norm),
        ema=None if ema_decay is None else EMA(ema_decay),
        drop_overflow_update=drop_overflow_update,
    )


def diffusers_cell(network, optimizer, scale_sense, *, accumulate_steps=1, clip_norm=None):
    """Return the diffusers' train cell; a step gives (loss, what the network returns beside it...)."""
    return TrainOneStepWithLossScaleCell(
        network,
        optimizer,
        scale_sense,
        accumulate_steps=accumulate_steps,
        clip_grad=None if clip_norm is None else ClipByGlobalNorm(clip_norm),
        outputs="loss",
    )


class NoisePrediction(nn.Cell):
    """Learns to tell the noise in an image of noise; returns the loss and the prediction's own size."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(65, 128), nn.SiLU(), nn.Dense(128, 64))

    def construct(self, pixels, noise):
        level = noise[:, :1]
        noise = noise[:, 1:]
        noisy = ops.sqrt(1.0 - level) * pixels + ops.sqrt(level) * noise
        predicted = self.layers(ops.cat((noisy, level), axis=1))
        return ((predicted - noise) ** 2).mean(), (predicted**2).mean()


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    (images, _), _ = digits()
    pixels = images[:, 0, ::4, ::4].reshape(-1, 64)
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((len(pixels), 65)).astype(np.float32)
    noise[:, 0] = rng.uniform(0.05, 0.95, len(pixels))
    network = NoisePrediction()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.003)
    step = diffusers_cell(network, optimizer, ms.Tensor(2.0**12), accumulate_steps=2, clip_norm=1.0).set_train()
    losses = []
    for batch in batches(pixels, noise, 16).create_tuple_iterator(num_epochs=2):
        loss, size = step(*batch)
        losses.append(float(loss))
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(f"first_loss={first:.4f} last_loss={last:.4f} size={float(size):.4f}")


if __name__ == "__main__":
    main()
