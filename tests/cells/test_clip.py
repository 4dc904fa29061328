"""Clips on their own, against numpy and MindSpore."""

import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mutable, ops

from cells import gradient_ops
from lossscale import ClipByGlobalNorm, ClipByNorm, ClipByValue
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


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
@pytest.mark.parametrize(("limit", "error"), [(1e-50, ValueError), (1e39, ValueError), (10**400, ValueError)], ids=str)
def test_limits_that_float32_can_not_hold_are_refused(cell, limit, error):
    with pytest.raises(error, match="must be"):
        cell(limit)


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_nan_and_inf_do_not_become_an_update(mode, cell):
    (got,) = clipped(cell(1.0), [np.float32([np.nan, 3.0])])
    assert np.isnan(got[0])
    (got,) = clipped(cell(1.0), [np.float32([np.inf, 3.0])])
    assert got[0] == 1.0 or np.isnan(got[0])


def test_a_limit_below_float16_leaves_what_it_can(mode):
    (got,) = ClipByValue(1e-7)(mutable((Tensor([1.0, -2.0, 1e-7]).astype(ms.float16),)))
    np.testing.assert_array_equal(got.astype(ms.float32).asnumpy(), np.float32(np.float16([1e-7, -1e-7, 1e-7])))


@pytest.fixture(params=["native", "plain"])
def backend(request, monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", request.param)


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm])
def test_a_norm_beyond_float32_is_clipped(mode, backend, cell):
    grads = [np.full(4, 3e38, np.float32), np.full(4, -3e38, np.float32)]
    norm = norm_of(grads) if cell is ClipByGlobalNorm else norm_of(grads[:1])
    for got, grad in zip(clipped(cell(1.0), grads), grads):
        np.testing.assert_allclose(got, grad / norm, rtol=1e-5)


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm])
def test_many_gradients(backend, cell):
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(3).astype(np.float32) for _ in range(400)]
    kind = "global_norm" if cell is ClipByGlobalNorm else "norm"
    for got, want in zip(clipped(cell(0.5), grads), clip_in_numpy(kind, 0.5, grads, norm_of(grads))):
        np.testing.assert_allclose(got, want, rtol=1e-6)


class InFloat32(ms.nn.Cell):
    """The norms as they are taken on Ascend and GPU."""

    def construct(self, grads):
        return gradient_ops.global_norm(gradient_ops.norms_of(grads))


@pytest.mark.parametrize("size", [0.0, 1e-20, 1.0, 1e20, 1e30], ids=str)
def test_norms_in_float32_equal_float64(monkeypatch, mode, size):
    monkeypatch.setattr(gradient_ops, "on_cpu", not_on_cpu)
    grads = random_grads(size)
    norm = InFloat32()(mutable(tuple(Tensor(g) for g in grads)))
    assert norm.dtype == ms.float32
    np.testing.assert_allclose(norm.asnumpy(), norm_of(grads), rtol=1e-6)


@ops.constexpr
def not_on_cpu():
    return False


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm, ClipByValue])
def test_copies_clip_alike(backend, cell, clone):
    original = cell(0.5)
    for got, want in zip(clipped(clone(original), random_grads()), clipped(original, random_grads())):
        np.testing.assert_array_equal(got, want)
