"""A train step whose optimizer could be fused does what its options say: the same training as with MindSpore's own."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from cells.native import library_path
from lossscale import EMA, ClipByGlobalNorm, DynamicLossScaleUpdateCell, FusedMomentum, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven, batch, copy_parameters, mlp
from tests.oracles import parameters

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")

OPTIONS = {
    "accumulate": lambda: {"accumulate_steps": 2},
    "clip": lambda: {"clip_grad": ClipByGlobalNorm(1.0)},
    "skip spikes": lambda: {"clip_grad": ClipByGlobalNorm(1.0, skip_above=10.0)},
    "average": lambda: {"ema": EMA(0.5)},
    "norm": lambda: {"outputs": ("overflow", "grad_norm", "updated")},
    "learning rate": lambda: {"outputs": ("overflow", "learning_rate", "updated")},
    "keep overflows": lambda: {"drop_overflow_update": False},
}


def given(optimizer, update, **options):
    net = GradientsAsGiven([np.zeros(2, np.float32), np.ones(1, np.float32)])
    return TrainOneStepWithLossScaleCell(net, optimizer(list(net.w), 0.5, 0.9), update, **options)


def take(step, first, second=1.0):
    return step(Tensor(np.float32(first)), Tensor(np.float32([second])))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_every_option_is_obeyed(mode, options):
    steps = [given(make, DynamicLossScaleUpdateCell(8.0, 2, 2), **options()) for make in (nn.Momentum, FusedMomentum)]
    before = steps[0].weights[0].asnumpy().copy()
    for grad in ((3, 4), (1, 2), (30, 40), (3, 4), (np.inf, 1), (3, 4), (3, 4)):
        stock, fused = ([value.asnumpy() for value in take(step, grad)] for step in steps)
        np.testing.assert_array_equal(stock, fused)
    states = [parameters(step) for step in steps]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)
    assert (states[1]["w0"] != before).any()


class AlwaysSkips(nn.Cell):
    """An update cell of one's own that lets no step through."""

    def get_loss_scale(self):
        return 8.0

    def construct(self, loss_scale, overflow):
        return overflow | Tensor(True)


def test_an_update_cell_of_ones_own_is_obeyed(mode):
    step = given(FusedMomentum, AlwaysSkips())
    _, overflow, scale = take(step, (3, 4))
    assert (bool(overflow), float(scale), step.weights[0].asnumpy().tolist()) == (False, 8.0, [0, 0])


def test_a_scale_of_the_call_leaves_the_update_cell_alone(mode):
    def build(optimizer):
        net = nn.WithLossCell(mlp(), nn.MSELoss())
        update = DynamicLossScaleUpdateCell(1024.0, 2, 2)
        return TrainOneStepWithLossScaleCell(net, optimizer(net.trainable_params(), 0.1, 0.9), update)

    stock, fused = build(nn.Momentum), build(FusedMomentum)
    copy_parameters(stock, fused)
    x, y = batch()
    for inputs in ((x, y), (x, y, Tensor(8.0)), (x * np.inf, y, Tensor(4.0)), (x, y), (x, y)):
        np.testing.assert_array_equal(*[[float(value) for value in step(*inputs)] for step in (stock, fused)])
    assert fused.loss_scaling_manager.get_loss_scale() == 2048.0  # window of 2: two of the three own clean steps
    for name, value in parameters(stock).items():
        np.testing.assert_array_equal(value, parameters(fused)[name], err_msg=name)


def test_the_names_of_an_overflow_outlive_clean_steps(mode):
    step = given(FusedMomentum, DynamicLossScaleUpdateCell(8.0, 2, 2))
    take(step, (3, 4))
    assert step.nonfinite_parameters() == []
    take(step, (3, 4), np.nan)
    for _ in range(2):
        assert step.nonfinite_parameters() == ["w1"]
        take(step, (3, 4))
