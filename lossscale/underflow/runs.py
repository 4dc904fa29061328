"""Runs of a copy of a network, forward and back at any scale, each from the same seed."""

import contextlib
import copy
import importlib
import math
from collections.abc import Iterator
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, dataset, nn, ops

from cells.backward import gradient_seed, loss_of
from lossscale.underflow.statistics import shortened

# Bound here: patch_mindspore() puts ours under MindSpore's name, and a look-up at the call would find that.
_stock_build = amp.build_train_network


class _ScaledGradients(nn.Cell):
    """The loss, and the gradients of scale * loss as the backward pass gives them."""

    def __init__(self, network: nn.Cell, weights: ms.ParameterTuple):
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.weights = weights
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, scale, *inputs):
        output = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, gradient_seed(output, scale))
        return loss_of(output), grads


class Runs:
    """Runs a copy of the network at any scale, each run from the same seed."""

    def __init__(self, network: nn.Cell, loss_fn: Optional[nn.Cell], amp_level: Optional[str], seed: int):
        self.network, self.loss_fn, self.amp_level, self.seed = network, loss_fn, amp_level, seed
        self.fresh = False  # whether each run takes a new copy, whose dropout starts anew
        self.cell = self.build()
        self.names = [weight.name for weight in self.cell.weights]

    def build(self) -> _ScaledGradients:
        """Return a cell that gives the gradients of a new copy."""
        copied, loss_fn = copy.deepcopy((self.network, self.loss_fn))
        weights = copied.trainable_params()
        if self.amp_level is None:
            with_loss = copied if loss_fn is None else nn.WithLossCell(copied, loss_fn)
        else:
            # MindSpore's own way to cast a network and to put the loss behind it, in float32.
            optimizer = nn.SGD(weights, learning_rate=1.0)
            train_cell = _stock_build(copied, optimizer, loss_fn, self.amp_level, loss_scale_manager=None)
            with_loss = train_cell.network
        return _ScaledGradients(with_loss, ms.ParameterTuple(weights)).set_train()

    def __call__(self, scale: float, inputs: tuple) -> tuple:
        """Return the loss, and the gradients at `scale` as numpy arrays."""
        if self.fresh:
            ms.set_seed(self.seed)
            self.cell = self.build()
        ms.set_seed(self.seed)
        loss, grads = self.cell(Tensor(scale, ms.float32), *inputs)
        return float(loss.asnumpy()), [grad.float().asnumpy() for grad in grads]

    def settle(self, inputs: tuple) -> None:
        """Choose a mode in which runs repeat, and refuse what can't be measured."""
        loss, first = self(1.0, inputs)
        if not math.isfinite(loss):
            raise ValueError(
                f"The loss of the first batch is {loss}: no loss scale can help; look at the forward pass."
            )
        bad = [name for name, grad in zip(self.names, first) if not np.isfinite(grad).all()]
        if bad:
            raise ValueError(f"The gradients of {shortened(bad)} are inf or nan at scale 1: no larger scale can help.")
        if not _equal(first, self(1.0, inputs)[1]):
            self.fresh = True
            first = self(1.0, inputs)[1]
            if not _equal(first, self(1.0, inputs)[1]):
                raise ValueError(
                    "The network's gradients differ from run to run with the same seed: nothing to compare."
                )
        if all(_equal([g * np.float32(s) for g in first], self(s, inputs)[1]) for s in (2.0**16, 2.0**32)):
            raise ValueError(
                "Nothing of this backward pass is in float16: its gradients are exact multiples at scales 1, 2**16 "
                "and 2**32. Float32 and bfloat16 need no loss scaling. Try a level on a copy by amp_level='O2', or "
                "cast the network first, for example network.to_float(mindspore.float16)."
            )


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put all random states back at the end, after an error too."""
    seed, dataset_seed = ms.get_seed(), dataset.config.get_seed()
    numpy_state, state = np.random.get_state(), ms.get_rng_state()
    try:
        yield
    finally:
        # Not set_seed(seed): it refuses None, the state in which no seed was set, and sets the seeds of others.
        importlib.import_module("mindspore.common.seed")._GLOBAL_SEED = seed  # type: ignore[attr-defined]
        dataset.config.set_seed(dataset_seed)
        np.random.set_state(numpy_state)
        ms.set_rng_state(state)


def _equal(a: list, b: list) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b))
