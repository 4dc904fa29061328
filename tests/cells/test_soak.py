"""Thousands of calls leave no memory behind: the whole step beside stock's, 64 parameters."""

import ctypes

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import EMA, ClipByGlobalNorm, ClipByNorm, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.oracles import StockTrainStep
from tests.soak import bytes_per_call

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc tells its use from 2.33 on")
EVERYTHING = ("loss", "overflow", "loss_scale", "grad_norm", "learning_rate", "updated")


class Sum(nn.Cell):
    """A network of n parameters whose gradients are the input."""

    def __init__(self, count):
        super().__init__()
        weights = [ms.Parameter(Tensor(np.zeros(4, np.float32)), name=f"w{i}") for i in range(count)]
        self.w = ms.ParameterTuple(weights)

    def construct(self, x):
        loss = 0.0
        for weight in self.w:
            loss = loss + (weight * x).sum()
        return loss


def calls_of(make, count=64):
    net = Sum(count)
    step = make(net, nn.Momentum(list(net.w), 0.01, 0.9)).set_train()
    inputs = [Tensor(np.full(4, value, np.float32)) for value in (1, np.inf, 1, 1)] * 3 + [
        Tensor(np.ones(4), ms.float32)
    ]
    place = iter(range(10**9))
    return lambda: step(inputs[next(place) % len(inputs)])


def whole(net, optimizer, clip=ClipByGlobalNorm, steps=3):
    return TrainOneStepWithLossScaleCell(
        net,
        optimizer,
        DynamicLossScaleUpdateCell(1024.0, 2, 2),
        accumulate_steps=steps,
        clip_grad=clip(1.0),
        ema=EMA(0.9),
        outputs=EVERYTHING,
    )


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_no_call_leaves_memory_behind(monkeypatch, backend):
    monkeypatch.setenv("LOSSSCALE_BACKEND", backend)
    ms.set_context(mode=ms.GRAPH_MODE)
    assert bytes_per_call(calls_of(whole)) < 150  # one tensor passed between two `if`s costs 600


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("clip", [ClipByGlobalNorm, ClipByNorm])
def test_no_long_run_leaves_memory_behind(mode, clip, steps):
    stock = bytes_per_call(calls_of(lambda *cells: StockTrainStep(*cells, Tensor(8.0))), calls=500)
    ours = bytes_per_call(calls_of(lambda *cells: whole(*cells, clip, steps)), calls=3000)
    assert ours < max(150, 2 * stock)
