"""The output "grad_norms": the norm of each true gradient, before clipping, whatever way the step goes."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import EMA, ClipByGlobalNorm, ClipByNorm, ClipByValue, FusedMomentum, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven

SHAPES = [(3, 4), (5,), (), (2, 1, 3)]
CLIPS = {"none": None, "global": ClipByGlobalNorm(0.1), "norm": ClipByNorm(0.1), "value": ClipByValue(0.1)}


class Overridden(TrainOneStepWithLossScaleCell):
    """A subclass runs every stage."""


OWN = TrainOneStepWithLossScaleCell
WAYS = [
    (OWN, nn.SGD, 1, "none", "plain"),
    (OWN, nn.SGD, 1, "global", "plain"),
    (OWN, nn.SGD, 3, "none", "plain"),
    *((OWN, nn.SGD, 1, clip, "native") for clip in CLIPS),
    (OWN, nn.SGD, 3, "norm", "native"),
    (Overridden, nn.SGD, 1, "global", "native"),
    (OWN, FusedMomentum, 1, "none", "native"),
    (OWN, FusedMomentum, 3, "global", "native"),
]


@pytest.mark.parametrize(("kind", "optimizer", "steps", "clip", "backend"), WAYS)
def test_norms_equal_numpy(mode, kind, optimizer, steps, clip, backend, monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", backend)
    rng = np.random.default_rng(0)
    net = GradientsAsGiven([np.zeros(shape, np.float32) for shape in SHAPES])
    rate = {"momentum": 0.9} if optimizer is FusedMomentum else {}
    step = kind(
        net,
        optimizer(list(net.w), 0.1, **rate),
        Tensor(2.0**7),
        accumulate_steps=steps,
        clip_grad=CLIPS[clip],
        ema=EMA(0.9),
        outputs=("grad_norms", "grad_norm", "updated"),
    )
    for _ in range(2):
        total = [np.zeros(shape) for shape in SHAPES]
        for micro in range(steps):
            grads = [rng.standard_normal(shape).astype(np.float32) for shape in SHAPES]
            total = [t + grad / steps for t, grad in zip(total, grads)]
            norms, norm, updated = step(*map(Tensor, grads))
            assert norms.dtype == ms.float32 and norms.shape == (4,)
            if micro < steps - 1:
                assert norms.asnumpy().tolist() == [0.0] * 4 and not bool(updated)
        wanted = [np.sqrt(np.square(t).sum()) for t in total]
        np.testing.assert_allclose(norms.asnumpy(), wanted, rtol=1e-5)
        np.testing.assert_allclose(float(norm), np.sqrt(np.square(wanted).sum()), rtol=1e-5)
        assert bool(updated)


def test_an_overflow_shows_where_it_was(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32), np.zeros(1, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 0.1), Tensor(8.0), outputs="grad_norms")
    norms = step(Tensor(np.float32([3, 4])), Tensor(np.float32([np.inf]))).asnumpy()
    assert norms.tolist() == [5.0, np.inf]


def test_checkpoints_do_not_hold_them(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 0.1), Tensor(8.0), outputs="grad_norms")
    assert not [p.name for p in step.get_parameters() if "grad_norms" in p.name]
