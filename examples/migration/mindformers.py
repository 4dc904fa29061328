"""mindformers' train step: a clip by the global norm, a loss per token, skipped spikes, five values reported.

`MFTrainOneStepCell` is a subclass of MindSpore's cell. Under `calculate_per_token_loss` the network returns the sum of
its losses and the number of tokens, the gradients are divided by the number of this call and device, and then
averaged over the devices. A global norm above a threshold leaves the weights.

What changes for the better: sums and tokens are added up over a window and over the devices before the one division,
so that a short micro-batch does not weigh as much as a long one; overflow is looked for in what the optimizer gets,
on CPU too; with groups the learning rates of all groups are reported, where the wrapper has the last one's. Not here:
its pipelines, its norms of each device's own gradients, its several losses in one (add them up in the network).
"""

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from examples.data import batches, digits
from lossscale import ClipByGlobalNorm, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell


def train_cell(
    network,
    optimizer,
    scale_sense=1.0,
    *,
    max_grad_norm=None,
    global_norm_spike_threshold=None,
    calculate_per_token_loss=False,
    accumulate_steps=1,
):
    """Return the train cell; a step gives (loss, overflow, loss_scale, learning_rate, global norm)."""
    clip = None
    if max_grad_norm is not None or global_norm_spike_threshold is not None:
        largest = max_grad_norm or global_norm_spike_threshold  # what is skipped need not be clipped
        clip = ClipByGlobalNorm(largest, skip_above=global_norm_spike_threshold)
    return TrainOneStepWithLossScaleCell(
        network,
        optimizer,
        ms.Tensor(scale_sense, ms.float32) if isinstance(scale_sense, (int, float)) else scale_sense,
        accumulate_steps=accumulate_steps,
        clip_grad=clip,
        outputs=("loss", "overflow", "loss_scale", "learning_rate", "grad_norm"),
        calculate_per_token_loss=calculate_per_token_loss,
    )


class NextPixel(nn.Cell):
    """Says each pixel of a digit from the eight before it; returns the sum of the losses and the number of pixels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(8 + 64, 64), nn.ReLU(), nn.Dense(64, 17))
        self.places = ms.Tensor(np.eye(64, dtype=np.float32)[None])

    def construct(self, pixels, lengths):
        padded = ops.pad(pixels.astype(ms.float32) / 16.0, (8, 0))
        before = ops.stack([padded[:, i : i + 64] for i in range(8)], -1)
        places = self.places.broadcast_to((len(pixels), 64, 64))
        logits = self.layers(ops.cat((before, places), -1))
        losses = ops.cross_entropy(logits.reshape(-1, 17), pixels.reshape(-1), reduction="none")
        mask = (ops.arange(64).reshape(1, 64) < lengths.reshape(-1, 1)).astype(ms.float32)
        return (losses * mask.reshape(-1)).sum(), mask.sum()


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    (images, _), _ = digits()
    pixels = np.rint((images[:, 0, ::4, ::4].reshape(-1, 64) * 0.4 + 0.3) * 16).astype(np.int32)
    lengths = np.int32([np.flatnonzero(row).max() + 1 for row in pixels])  # up to the last ink
    network = NextPixel()
    optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.003)
    update = DynamicLossScaleUpdateCell(2.0**12, 2, 1000)
    options = {"max_grad_norm": 1.0, "global_norm_spike_threshold": 100.0, "accumulate_steps": 2}
    step = train_cell(network, optimizer, update, calculate_per_token_loss=True, **options).set_train()
    losses = []
    for batch in batches(pixels, lengths, 16).repeat(2).create_tuple_iterator(num_epochs=1):
        loss, _, scale, rate, norm = step(*batch)
        losses.append(float(loss))
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    print(
        f"first_loss={first:.4f} last_loss={last:.4f} loss_scale={float(scale):.0f} "
        f"learning_rate={float(rate):.4f} norm={float(norm):.4f}"
    )


if __name__ == "__main__":
    main()
