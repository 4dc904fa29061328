"""mindyolo's train step: a function of MindSpore's gradient functions, a scaler and an optimizer.

Its factory makes a forward function that scales the loss, takes the gradients with the parts of the loss beside them,
reduces, unscales, looks, clips, updates, and averages; the script moves the scaler. What changes is one import: the
scaler and `all_finite` are this library's, which have CPU, Ascend and GPU and a scale that never reaches inf.

What changes for the better: its option that keeps overflowing updates is True unless told, and inf then enters the
weights; here it is False. The loss that it returns is unscaled by a scaler that has not moved yet, which is kept.
"""

import mindspore as ms
from mindspore import nn, ops

from examples.data import accuracy, batches, digits
from lossscale import EMA, ClipByGlobalNorm, DynamicLossScaler, StaticLossScaler, all_finite


def loss_scaler(kind="static", scale_value=1024.0, scale_factor=2, scale_window=2000):
    """Return the scaler for mindyolo's options: "dynamic", "static" or "none"."""
    if kind == "dynamic":
        return DynamicLossScaler(scale_value, scale_factor, scale_window)
    return StaticLossScaler(scale_value if kind == "static" else 1.0)


def train_step_fn(
    network,
    loss_fn,
    optimizer,
    scaler,
    *,
    loss_ratio=1.0,
    reducer=None,
    overflow_still_update=False,
    clip_grad_value=None,
    ema=None,
):
    """Return a function of a batch that trains on it and gives (loss, its parts, whether all gradients are finite)."""
    clip = None if clip_grad_value is None else ClipByGlobalNorm(clip_grad_value)
    if ema is not None:
        ema.join(optimizer.parameters)

    def forward(images, labels):
        loss, parts = loss_fn(network(images), labels)
        return scaler.scale(loss * loss_ratio), ops.stop_gradient(parts)

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    @ms.jit
    def train_step(images, labels):
        (loss, parts), grads = grad_fn(images, labels)
        if reducer is not None:
            grads = reducer(grads)
        grads = scaler.unscale(grads)
        finite = all_finite(grads)
        if clip is not None:
            grads = clip(grads)
        updates = ops.logical_or(finite, overflow_still_update)
        if updates:
            loss = ops.depend(loss, optimizer(grads))
            if ema is not None:
                loss = ops.depend(loss, ema())
        loss = scaler.unscale(loss)
        return ops.depend(loss, scaler.adjust(finite)), parts, finite

    return train_step


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(1)
    train_data, test_data = digits()
    network = nn.SequentialCell(
        nn.Flatten(), nn.Dense(1024, 64).to_float(ms.float16), nn.ReLU(), nn.Dense(64, 10).to_float(ms.float32)
    )

    def loss_and_parts(logits, labels):
        loss = ops.cross_entropy(logits, labels)
        decay = 1e-4 * (network[1].weight ** 2).sum()
        return loss + decay, ops.stack((loss, decay))

    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    scaler = loss_scaler("dynamic", 2.0**24)
    step = train_step_fn(network, loss_and_parts, optimizer, scaler, clip_grad_value=5.0, ema=EMA(0.99))
    skipped = 0
    for images, labels in batches(*train_data, 32).repeat(4).create_tuple_iterator(num_epochs=1):
        loss, parts, finite = step(images, labels)
        skipped += not finite
    scale = float(scaler.scale_value.asnumpy())
    print(
        f"loss={float(loss):.4f} of_weights={float(parts[1]):.4f} accuracy={accuracy(network, *test_data):.4f} "
        f"skipped={skipped} loss_scale={scale:.0f}"
    )


if __name__ == "__main__":
    main()
