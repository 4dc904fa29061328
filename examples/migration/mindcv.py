"""mindcv's train step: EMA, clipping by the global norm, accumulation, and a bare loss.

The wrapper is a subclass of MindSpore's cell, with the unscaling, the clip, the accumulators and the average
written out again. What it does follows from the type of the scale: a Tensor is never checked for overflow, an
update cell always is. The average covers all parameters, BatchNorm's statistics too, under a decay that starts
at 0 and is the full one after some thousand updates.

What changes for the better: overflow is looked for under any scale, on CPU too, and in the gradients that all
devices share; the clip comes after they are reduced; an overflow drops its window and does not shift the next;
the average follows updates only, where the wrapper's moves on every micro-step.
"""

import mindspore as ms
from mindspore import nn, ops

from examples.data import accuracy, batches, digits
from examples.nets import LeNet5
from lossscale import (
    EMA,
    ClipByGlobalNorm,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    fast_convolutions,
)


class RampedEMA(EMA):
    """An average whose decay grows as decay * (1 - exp(-updates / 2000))."""

    def decay_now(self):
        return self.decay * (1.0 - ops.exp((self.updates.astype(ms.float32) + 1.0) / -2000.0))


def train_cell(
    network,
    optimizer,
    *,
    loss_scale_type="fixed",
    loss_scale=1.0,
    drop_overflow_update=False,
    accumulate_steps=1,
    clip_value=None,
    ema_decay=None,
):
    """Return the train cell for mindcv's options; `network` holds its loss."""
    if loss_scale_type == "dynamic":
        update = DynamicLossScaleUpdateCell(loss_scale, scale_factor=2, scale_window=2000)
    else:
        update = FixedLossScaleUpdateCell(loss_scale)
    return TrainOneStepWithLossScaleCell(
        network,
        optimizer,
        update,
        accumulate_steps=accumulate_steps,
        clip_grad=None if clip_value is None else ClipByGlobalNorm(clip_value),
        ema=None if ema_decay is None else RampedEMA(ema_decay, list(network.get_parameters())),
        drop_overflow_update=drop_overflow_update,
        outputs="loss",
    )


def load_checkpoint(step, path):
    """Load a checkpoint that mindcv wrote of its train cell; return the names of states that it did not hold.

    With accumulation its names of weights and optimizer start with "optimizer.", and its sums are left out: a window
    starts anew. Its counter of averages is a float, and there without averages too.

    Raises:
        ValueError: if a weight or a state of the optimizer is missing. Nothing has been loaded then.
    """
    values = {}
    for name, value in ms.load_checkpoint(str(path)).items():
        name = name.removeprefix("optimizer.")
        if name == "updates":
            name, value = "ema.updates", ms.Parameter(ms.Tensor(int(value.asnumpy().item()), ms.int32))
        if not name.startswith(("grad_accumulation.", "accumulation_step")):
            values[name] = value
    own = {parameter.name for parameter in step.get_parameters()}
    missing = sorted(own - set(values))
    needed = [w.name for w in (*step.network.get_parameters(), *step.optimizer.get_parameters())]
    lost = sorted(set(missing) & set(needed))
    if lost:
        raise ValueError(f"{path} is no checkpoint of this network and optimizer: it has no {lost}.")
    ms.load_param_into_net(step, {name: value for name, value in values.items() if name in own})
    return missing


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    fast_convolutions()
    ms.set_seed(1)
    train_data, test_data = digits()
    network = ms.amp.auto_mixed_precision(LeNet5(), "O2")
    with_loss = nn.WithLossCell(network, nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"))
    step = train_cell(
        with_loss,
        nn.Momentum(network.trainable_params(), 0.05, 0.9),
        loss_scale_type="dynamic",
        loss_scale=2.0**24,
        drop_overflow_update=True,
        accumulate_steps=2,
        clip_value=5.0,
        ema_decay=0.999,
    ).set_train()
    for images, labels in batches(*train_data, 16).create_tuple_iterator(num_epochs=1):
        loss = step(images, labels)
    with step.ema.applied():
        averaged = accuracy(network, *test_data)
    scale = float(step.scale_sense.asnumpy())
    updates = int(step.ema.updates.asnumpy())
    print(f"loss={float(loss):.4f} averaged_accuracy={averaged:.4f} updates={updates} loss_scale={scale:.0f}")


if __name__ == "__main__":
    main()
