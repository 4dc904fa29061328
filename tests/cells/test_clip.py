"""Clips on their own, against numpy and MindSpore."""

import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mutable, nn, ops

from cells import gradient_ops, unscale
from cells import outputs as outputs_module
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


class OverShards(ms.nn.Cell):
    """The norms as they are taken where weights are spread over devices, here over one."""

    def construct(self, grads):
        return gradient_ops.norms_over_shards(grads)


@pytest.mark.parametrize("size", [0.0, 1e-6, 1.0, 1e20, 1e29], ids=str)
def test_norms_over_one_shard_equal_float64(mode, size):
    grads = random_grads(size)
    norms = OverShards()(mutable(tuple(Tensor(g) for g in grads)))
    np.testing.assert_allclose(norms.asnumpy(), [norm_of([g]) for g in grads], rtol=1e-6)


@pytest.mark.parametrize("cell", [ClipByGlobalNorm, ClipByNorm])
def test_one_set_of_norms_serves_clip_and_report_over_shards(mode, monkeypatch, cell):
    monkeypatch.setattr(unscale, "has_shards", lambda: True)
    net = GradientsAsGiven([np.zeros(2, np.float32), np.zeros(1, np.float32)])
    outputs = ("overflow", "grad_norm")
    step = TrainOneStepWithLossScaleCell(
        net, nn.SGD(list(net.w), 1.0), Tensor(8.0), clip_grad=cell(1.0), outputs=outputs
    )
    assert isinstance(step._stage_unscaling, unscale.ShardedUnscale)
    grads = [np.float32([3.0, 4.0]), np.float32([12.0])]
    overflow, norm = step(*[Tensor(g) for g in grads])
    assert (bool(overflow), float(norm)) == (False, 13.0)
    kind = "global_norm" if cell is ClipByGlobalNorm else "norm"
    for weight, want in zip(net.w, clip_in_numpy(kind, 1.0, grads, 13.0)):
        np.testing.assert_allclose(-weight.asnumpy(), want, rtol=1e-6)
    kept = [weight.asnumpy() for weight in net.w]
    overflow, _ = step(Tensor(np.float32([3.0, np.inf])), Tensor(np.float32([1.0])))
    assert bool(overflow)
    assert [weight.asnumpy().tolist() for weight in net.w] == [weight.tolist() for weight in kept]


@pytest.mark.parametrize("options", [{"clip_grad": ClipByNorm(1.0)}, {"outputs": "grad_norm"}], ids=["clip", "norm"])
def test_norms_of_sums_over_shards_are_refused(monkeypatch, options):
    monkeypatch.setattr(outputs_module, "has_shards", lambda: True)
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="not for sums of them"):
        TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w)), Tensor(8.0), accumulate_steps=2, **options)


def test_a_pipeline_is_sent_to_mindspores_cell():
    net = nn.PipelineCell(nn.Dense(2, 2), 2)
    with pytest.raises(TypeError, match="build_train_network"):
        TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params()), Tensor(8.0))
