"""The full step of the benchmark and the plain one that it is compared with do the same arithmetic."""

import mindspore as ms
import numpy as np
import pytest

from benchmarks import mindspore_steps, nets, workloads

WINDOWS = 3


@pytest.fixture(params=[1e-3, 1e3], ids=["clips", "does not clip"])
def clip_norm(request, monkeypatch):
    """Make the net small and the updates large, and return the limit of the norm."""
    monkeypatch.setenv("LOSSSCALE_BACKEND", "")
    monkeypatch.setitem(workloads.MLP, "small", (4, 8, 2))
    monkeypatch.setattr(workloads, "EMA_DECAY", 0.5)
    monkeypatch.setattr(workloads, "CLIP_NORM", request.param)
    ms.set_context(mode=ms.GRAPH_MODE)
    return request.param


def moved(variant):
    """Return by how much the weights, then their averages, have moved after some windows."""
    cell, x, y = mindspore_steps.full_cell(variant, "small")
    start = [weight.asnumpy().copy() for weight in cell.weights]
    for _ in range(WINDOWS * workloads.ACCUMULATE_STEPS):
        cell(x, y)
    return [value.asnumpy() - old for values in (cell.weights, cell.ema.shadows) for value, old in zip(values, start)]


def moved_by_numpy(clip_norm):
    """Return the same by numpy, from MindSpore's gradients alone."""
    net, x, y = nets.build_net("small")
    weights = ms.ParameterTuple(net.trainable_params())
    gradient = ms.ops.GradOperation(get_by_list=True)(ms.nn.WithLossCell(net, ms.nn.MSELoss()), weights)
    start = [weight.asnumpy().copy() for weight in weights]
    averages, moments = [old.copy() for old in start], [np.zeros_like(old) for old in start]
    for _ in range(WINDOWS):
        grads = [grad.asnumpy() for grad in gradient(ms.Tensor(x), ms.Tensor(y))]
        norm = np.sqrt(sum((grad.astype(np.float64) ** 2).sum() for grad in grads))
        assert norm > 2 * workloads.CLIP_NORM or norm < workloads.CLIP_NORM / 2
        for i, weight in enumerate(weights):
            moments[i] = workloads.MOMENTUM * moments[i] + grads[i] * min(1, clip_norm / norm)
            ms.ops.assign(weight, ms.Tensor(weight.asnumpy() - workloads.LEARNING_RATE * moments[i]))
            averages[i] += (weight.asnumpy() - averages[i]) * (1 - workloads.EMA_DECAY)
    return [value - old for values in ([w.asnumpy() for w in weights], averages) for value, old in zip(values, start)]


@pytest.mark.parametrize("variant", [v for v in mindspore_steps.FULL_VARIANTS if v != "plain again"])
def test_all_full_steps_accumulate_clip_step_and_average(variant, clip_norm, monkeypatch):
    monkeypatch.setattr(workloads, "LEARNING_RATE", 1 / clip_norm if clip_norm < 1 else 1.0)
    for value, expected in zip(moved(variant), moved_by_numpy(clip_norm)):
        assert np.abs(expected).max() > 1e-3
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)
