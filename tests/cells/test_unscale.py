"""Unscaling by size, gradient by gradient, against numpy; the finite check at every place and dtype."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from cells.gradient_ops import cast_like, cast_up, has_nonfinite, unscale, usable_scale

DTYPES = {"float16": ms.float16, "bfloat16": ms.bfloat16, "float32": ms.float32, "float64": ms.float64}
SHAPES = [(), (1,), (3, 5), (2, 1, 4)]


class Unscale(nn.Cell):
    def construct(self, scale, *grads):
        used = usable_scale(scale)
        return cast_like(grads, unscale(cast_up(grads), used))


class HasNonfinite(nn.Cell):
    def construct(self, *grads):
        return has_nonfinite(grads)


def random_grads(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return [Tensor((rng.standard_normal(shape) * 50).astype(np.float32)).astype(dtype) for shape in SHAPES]


@pytest.mark.parametrize("scale", [1, 3, 0.25, 2.0**24, 2.0**126])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unscaled_gradients_equal_numpy(mode, dtype, scale):
    grads = random_grads(DTYPES[dtype])
    for got, grad in zip(Unscale()(Tensor(scale, ms.float32), *grads), grads):
        expected = grad.asnumpy() * (np.float32(1) / np.float32(scale))
        assert got.asnumpy().dtype == dtype
        np.testing.assert_array_equal(got.asnumpy(), expected.astype(dtype))


def test_float16_gradients_are_unscaled_in_float32(mode):
    # In float16 the reciprocal of 2**24 is 0 after rounding below 2**-24, and 6e4 / 2**17 would still fit.
    grad = Tensor(np.float32([6e4, -3.0, 2.0**-10])).astype(ms.float16)
    (got,) = Unscale()(Tensor(2.0**17, ms.float32), grad)
    expected = (grad.asnumpy().astype(np.float32) / np.float32(2**17)).astype(np.float16)
    np.testing.assert_array_equal(got.asnumpy(), expected)
    assert got.asnumpy()[0] > 0


def test_scale_beyond_the_last_normal_reciprocal_is_capped():
    assert float(usable_scale(Tensor(2.0**127, ms.float32)).asnumpy()) == 2.0**126
    assert float(usable_scale(Tensor(2.0**20, ms.float32)).asnumpy()) == 2.0**20


@pytest.mark.parametrize("dtype", DTYPES)
def test_finite_gradients_are_not_flagged(mode, dtype):
    largest = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4028235e38, "float64": 1.7e308}[dtype]
    extremes = Tensor(np.array([largest, -largest, 0.0, -0.0, 1e-7], np.float64)).astype(DTYPES[dtype])
    assert not bool(HasNonfinite()(*random_grads(DTYPES[dtype]), extremes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan], ids=str)
def test_nonfinite_is_found_at_every_place(mode, dtype, value):
    cell = HasNonfinite()
    for place in range(len(SHAPES)):
        grads = random_grads(DTYPES[dtype])
        poisoned = grads[place].asnumpy().astype(np.float64) if dtype != "bfloat16" else np.ones(SHAPES[place])
        poisoned.reshape(-1)[-1] = value
        grads[place] = Tensor(poisoned).astype(DTYPES[dtype])
        assert bool(cell(*grads)), place
