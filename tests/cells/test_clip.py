"""Clips on their own, against numpy and MindSpore."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mutable, nn, ops

from lossscale import ClipByGlobalNorm, ClipByNorm, ClipByValue, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven
from tests.oracles import clip_in_numpy


def random_grads(size=1.0):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal(shape) * size).astype(np.float32) for shape in [(3, 4), (5,), (1,), ()]]


def clipped(cell, grads):
    return [g.asnumpy() for g in cell(mutable(tuple(Tensor(g) for g in grads)))]


def norm_of(grads):
    return float(np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads)))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e20], ids=str)
@pytest.mark.parametrize(
    ("kind", "cell"), [("global_norm", ClipByGlobalNorm), ("norm", ClipByNorm), ("value", ClipByValue)]
)
def test_clips_equal_numpy(mode, kind, cell, size):
    grads = random_grads(size)
    expected = clip_in_numpy(kind, 0.5, grads, norm_of(grads))
    for got, want in zip(clipped(cell(0.5), grads), expected):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_global_norm_equals_mindspore(mode):
    grads = random_grads()
    expected = ops.clip_by_global_norm([Tensor(g) for g in grads], 0.5)
    for got, want in zip(clipped(ClipByGlobalNorm(0.5), grads), expected):
        np.testing.assert_allclose(got, want.asnumpy(), rtol=1e-5)


def test_small_gradients_come_back_to_the_bit(mode):
    grads = random_grads(1e-3)
    for cell in (ClipByGlobalNorm(10.0), ClipByNorm(10.0), ClipByValue(10.0)):
        for got, want in zip(clipped(cell, grads), grads):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("cell", [ClipByGlobalNorm(1.0), ClipByNorm(1.0), ClipByValue(1.0)], ids=str)
@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64], ids=str)
def test_dtypes_stay(mode, cell, dtype):
    (got,) = cell(mutable((Tensor([3.0, 4.0]).astype(dtype),)))
    assert got.dtype == dtype


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
@pytest.mark.parametrize(
    ("limit", "error"), [(0, ValueError), (-1.0, ValueError), (float("inf"), ValueError), ("1", TypeError)]
)
def test_bad_limits_are_refused(cell, limit, error):
    with pytest.raises(error, match="must be"):
        cell(limit)


def test_skip_above_below_max_norm_is_refused():
    with pytest.raises(ValueError, match="'skip_above' must be >= 'max_norm'"):
        ClipByGlobalNorm(1.0, skip_above=0.5)


class FourTimes(GradientsAsGiven):
    """Its true gradients are four times what is given, which the scaled ones need not reach."""

    def construct(self, grad):
        return (self.w[0] * grad).sum() * 4.0


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_true_gradients_beyond_float32_are_an_overflow_though_the_scaled_ones_are_finite(mode, cell):
    net = FourTimes([np.zeros(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(0.25), clip_grad=cell(4.0))
    flags = [bool(step(Tensor(np.float32([value, 0])))[1]) for value in (1.0, 3e38, 1.0)]
    assert (flags, net.w[0].asnumpy().tolist()) == ([False, True, False], [-8.0, 0.0])


@pytest.mark.parametrize("skip_above", [5.0, 4.99])
def test_only_a_norm_above_skip_above_is_a_spike(mode, skip_above):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    clip = ClipByGlobalNorm(1.0, skip_above=skip_above)
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(8.0), clip_grad=clip, outputs="updated")
    assert bool(step(Tensor(np.float32([3, 4])))) is (skip_above == 5.0)
    assert (net.w[0].asnumpy() != 0).all() == (skip_above == 5.0)
