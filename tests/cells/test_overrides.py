"""A stage that a subclass overrides is asked, whichever options are on: no short cut goes around it."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from lossscale import EMA, ClipByGlobalNorm, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven

OPTIONS = {
    "plain": dict,
    "clip": lambda: {"clip_grad": ClipByGlobalNorm(100.0)},
    "accumulate and average": lambda: {"accumulate_steps": 2, "ema": EMA(0.5)},
    "keep overflows": lambda: {"drop_overflow_update": False, "outputs": "loss"},
}


class HalfGradients(TrainOneStepWithLossScaleCell):
    def scaled_gradients(self, inputs, output, scale):
        return super().scaled_gradients(inputs, output, scale / 2)


class HalfReduced(TrainOneStepWithLossScaleCell):
    def reduce_gradients(self, grads):
        return (grads[0] / 2,)


class HalfUnscaled(TrainOneStepWithLossScaleCell):
    def unscale_and_check(self, scaled, divisor):
        return super().unscale_and_check(scaled, divisor * 2)


class HalfStep(TrainOneStepWithLossScaleCell):
    def apply_update(self, grads):
        return super().apply_update((grads[0] / 2,))


class SkipsByNorm(TrainOneStepWithLossScaleCell):
    def skips_update(self, overflow, norm):
        return ops.logical_or(super().skips_update(overflow, norm), norm > 7)


class HalfClip(ClipByGlobalNorm):
    def construct(self, grads):
        return (grads[0] / 2,)


def train(cls, values=(3.0, 4.0), **options):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = cls(net, nn.SGD(list(net.w), 1.0), Tensor(8.0), **options)
    for _ in range(options.get("accumulate_steps", 1)):
        step(Tensor(np.float32(values)))
    return net.w[0].asnumpy().tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("cls", [HalfGradients, HalfReduced, HalfUnscaled, HalfStep])
def test_own_arithmetic_is_used(mode, cls, options):
    assert train(cls, **options()) == [-1.5, -2.0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_own_skipping_is_asked_with_the_true_norm(mode, options):
    assert train(SkipsByNorm, **options()) == [-3.0, -4.0]
    assert train(SkipsByNorm, (6.0, 8.0), **options()) == [0.0, 0.0]


def test_a_clip_made_of_ours_is_called(mode):
    assert train(TrainOneStepWithLossScaleCell, clip_grad=HalfClip(100.0)) == [-1.5, -2.0]
