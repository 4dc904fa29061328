"""Flax: plain, and with its DynamicScale, skipping by select. Run as a script in the benchmark's own environment."""

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.training.dynamic_scale import DynamicScale

from benchmarks import timing, workloads


class Mlp(linen.Module):
    """Dense + ReLU layers of one width."""

    width: int
    layers: int

    @linen.compact
    def __call__(self, x):
        """Return the output of the last layer, without ReLU."""
        for i in range(self.layers):
            x = linen.Dense(self.width)(x)
            x = linen.relu(x) if i + 1 < self.layers else x
        return x


class LeNet5(linen.Module):
    """The usual one, for 32 x 32 images."""

    @linen.compact
    def __call__(self, x):
        """Return ten values for each image."""
        for features in (6, 16):
            x = linen.relu(linen.Conv(features, (5, 5), padding="VALID")(x))
            x = linen.max_pool(x, (2, 2), (2, 2))
        x = x.reshape((x.shape[0], -1))
        for features in (120, 84):
            x = linen.relu(linen.Dense(features)(x))
        return linen.Dense(10)(x)


class Transformer(linen.Module):
    """An encoder with normalisation after each sub-layer."""

    width: int
    heads: int
    layers: int
    hidden: int

    @linen.compact
    def __call__(self, x):
        """Return a sequence of the same shape."""
        for _ in range(self.layers):
            x = linen.LayerNorm()(x + linen.MultiHeadDotProductAttention(self.heads)(x))
            y = linen.Dense(self.width)(linen.relu(linen.Dense(self.hidden)(x)))
            x = linen.LayerNorm()(x + y)
        return x


def build_net(workload: str) -> tuple[linen.Module, np.ndarray, np.ndarray]:
    """Return a net, a batch of inputs and one of targets of the same shape as its output."""
    rng = np.random.default_rng(1)
    net: linen.Module
    if workload in workloads.MLP:
        batch, width, layers = workloads.MLP[workload]
        net, shape, out = Mlp(width, layers), (batch, width), (batch, width)
    elif workload == "lenet5_b32":
        net, shape, out = LeNet5(), (workloads.LENET_BATCH, 32, 32, 1), (workloads.LENET_BATCH, 10)
    else:
        batch, length, width, heads, layers, hidden = workloads.TRANSFORMER
        net, shape = Transformer(width, heads, layers, hidden), (batch, length, width)
        out = shape
    inputs, targets = (rng.standard_normal(s).astype(np.float32) * 0.1 for s in (shape, out))
    return net, inputs, targets


def build_step(variant: str, workload: str) -> Callable[[], float]:
    """Return one training step as a function that ends by reading the loss."""
    net, inputs, targets = build_net(workload)
    x, y = jnp.asarray(inputs), jnp.asarray(targets)
    parameters = net.init(jax.random.PRNGKey(1), x)
    optimizer = optax.sgd(workloads.LEARNING_RATE, workloads.MOMENTUM)
    scale = DynamicScale(growth_interval=10**6, scale=workloads.LOSS_SCALE)
    state = {"parameters": parameters, "optimizer": optimizer.init(parameters), "scale": scale}

    def loss_fn(parameters):
        return jnp.square(net.apply(parameters, x) - y).mean()

    def plain(state):
        loss, grads = jax.value_and_grad(loss_fn)(state["parameters"])
        updates, moments = optimizer.update(grads, state["optimizer"], state["parameters"])
        return {**state, "parameters": optax.apply_updates(state["parameters"], updates), "optimizer": moments}, loss

    def scaled(state):
        new_scale, finite, loss, grads = state["scale"].value_and_grad(loss_fn)(state["parameters"])
        updates, moments = optimizer.update(grads, state["optimizer"], state["parameters"])
        stepped = optax.apply_updates(state["parameters"], updates)

        def keep(new, old):
            return jax.tree_util.tree_map(lambda a, b: jnp.where(finite, a, b), new, old)

        parameters = keep(stepped, state["parameters"])
        return {"parameters": parameters, "optimizer": keep(moments, state["optimizer"]), "scale": new_scale}, loss

    compiled = jax.jit(scaled if variant == "DynamicScale" else plain, donate_argnums=0)

    def step() -> float:
        nonlocal state
        state, loss = compiled(state)
        return float(loss)

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=workloads.ROUNDS)
    parser.add_argument("--workloads", nargs="+", default=workloads.WORKLOADS)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    variants = ["plain", "plain again", "DynamicScale"]
    rows = {name: lambda name=name: {v: build_step(v, name) for v in variants} for name in options.workloads}
    timing.write(options.out, timing.measure(rows, options.rounds))
