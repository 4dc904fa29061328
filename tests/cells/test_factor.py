"""An optimizer that takes one factor (unscale, mean and clip in one) and a flag to skip, in numpy's terms."""

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from lossscale import EMA, ClipByGlobalNorm, ClipByValue, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.cells.test_step_order import SHAPES
from tests.nets import GradientsAsGiven
from tests.oracles import DynamicScale, WholeStep

REPORT = ("overflow", "loss_scale", "grad_norm", "updated")


class Descent(nn.Optimizer):
    """Gradient descent that multiplies and skips by itself."""

    takes_scaled_gradients = takes_gradient_factor = True

    def __init__(self, parameters, rate):
        super().__init__(rate, parameters)
        self.rate = rate

    def construct(self, gradients):
        raise ValueError("Only scaled gradients are taken.")

    def apply_scaled_gradients(self, gradients, loss_scale, factor=None, skip=None):
        rate = ops.select(skip, Tensor(0.0), Tensor(self.rate))
        done = ()
        for weight, gradient in zip(self.parameters, gradients):
            change = gradient * factor.astype(gradient.dtype)
            change = ops.select(skip, ops.zeros_like(change), change)
            done += (ops.assign_sub(weight, change * rate),)
        return done


@pytest.mark.parametrize(
    "setting",
    [
        {"steps": 2, "clip": ("global_norm", 1.0, None), "decay": 0.75},
        {"clip": ("global_norm", 1.0, 6.0), "decay": 0.5},
        {"steps": 3},
    ],
    ids=str,
)
def test_the_whole_step_equals_numpy(mode, setting):
    net = GradientsAsGiven([np.zeros(shape, np.float32) for shape in SHAPES])
    _, limit, skip_above = setting.get("clip", (None, None, None))
    step = TrainOneStepWithLossScaleCell(
        net,
        Descent(list(net.w), 0.5),
        DynamicLossScaleUpdateCell(16.0, 2, 2),
        accumulate_steps=setting.get("steps", 1),
        clip_grad=None if limit is None else ClipByGlobalNorm(limit, skip_above=skip_above),
        ema=EMA(setting["decay"]) if "decay" in setting else None,
        outputs=REPORT,
    )
    twin = WholeStep([np.zeros(s, np.float32) for s in SHAPES], DynamicScale(16.0, 2, 2), 0.5, **setting)
    rng = np.random.default_rng(0)
    for kind in ["fine", "fine", "inf", "fine", "large", "fine", "nan", "fine", "fine", "fine", "fine", "fine"]:
        grads = [rng.standard_normal(s).astype(np.float32) * (10 if kind == "large" else 1) for s in SHAPES]
        if kind in ("inf", "nan"):
            grads[1][0] = float(kind)
        overflow, scale, norm, updated = step(*[Tensor(g) for g in grads])
        want = twin.step(grads)
        assert (bool(overflow), float(scale), bool(updated)) == (want[0], want[1], want[3])
        np.testing.assert_allclose(float(norm), want[2], rtol=1e-5)
        for weight, expected in zip(step.weights, twin.weights):
            np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-5)
    if "decay" in setting:
        for shadow, expected in zip(step.ema.shadows, twin.shadows):
            np.testing.assert_allclose(shadow.asnumpy(), expected, rtol=1e-4, atol=1e-5)
    assert step.nonfinite_parameters() == ["w1"]


def test_a_clip_that_is_no_factor_gets_true_gradients():
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, Descent(list(net.w), 0.5), Tensor(8.0), clip_grad=ClipByValue(1.0))
    with pytest.raises(ValueError, match="Only scaled"):
        step(Tensor(np.float32([1, 2])))
