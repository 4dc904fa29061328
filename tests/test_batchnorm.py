"""What an overflowing step, which is skipped, leaves in BatchNorm's moving statistics (docs/troubleshooting.md)."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell

FLOAT16_MAX = 65504


class Net(nn.Cell):
    """float16 around a float32 BatchNorm, as amp level O2 makes it; the gains place an overflow."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.9)
        self.dense = nn.Dense(3, 1)

    def construct(self, x, gain_before, gain_after):
        before = (x.astype(ms.float16) * gain_before.astype(ms.float16)).astype(ms.float32)
        after = (self.norm(before).astype(ms.float16) * gain_after.astype(ms.float16)).astype(ms.float32)
        return self.dense(after).mean()


def run_one_step(gain_before=1.0, gain_after=1.0, loss_scale=1024.0):
    """Return (inputs, overflow, net) after one step; the weights must have moved exactly if it did not overflow."""
    net = Net()
    weight = net.dense.weight.asnumpy().copy()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = TrainOneStepWithLossScaleCell(net, optimizer, DynamicLossScaleUpdateCell(loss_scale, 2, 1000)).set_train()
    x = (1 + np.random.rand(8, 3)).astype(np.float16).astype(np.float32)
    _, overflow, _ = step(Tensor(x), Tensor(gain_before, ms.float32), Tensor(gain_after, ms.float32))
    assert np.array_equal(weight, net.dense.weight.asnumpy()) == bool(overflow)
    return x, bool(overflow), net


def test_clean_step_moves_the_statistics(mode):
    x, overflow, net = run_one_step()
    assert not overflow
    np.testing.assert_allclose(net.norm.moving_mean.asnumpy(), 0.1 * x.mean(axis=0), rtol=1e-4)


def test_overflow_in_the_backward_pass_moves_them_as_a_clean_step_would(mode):
    x, overflow, net = run_one_step(loss_scale=2.0**40)
    assert overflow
    np.testing.assert_allclose(net.norm.moving_mean.asnumpy(), 0.1 * x.mean(axis=0), rtol=1e-4)
    assert np.isfinite(net.norm.moving_variance.asnumpy()).all()


def test_overflow_in_the_forward_pass_behind_batchnorm_spoils_nothing(mode):
    x, overflow, net = run_one_step(gain_after=FLOAT16_MAX)
    assert overflow
    np.testing.assert_allclose(net.norm.moving_mean.asnumpy(), 0.1 * x.mean(axis=0), rtol=1e-4)
    assert np.isfinite(net.norm.moving_variance.asnumpy()).all()


@pytest.mark.parametrize("statistic", ["moving_mean", "moving_variance"])
def test_overflow_in_the_forward_pass_before_batchnorm_spoils_them(mode, statistic):
    _, overflow, net = run_one_step(gain_before=FLOAT16_MAX)
    assert overflow
    assert not np.isfinite(getattr(net.norm, statistic).asnumpy()).all()


def test_spoilt_statistics_do_not_heal_by_clean_steps_and_inference_is_lost(mode):
    x, _, net = run_one_step(gain_before=FLOAT16_MAX)
    one = Tensor(1.0, ms.float32)
    net.set_train()
    for _ in range(3):
        assert np.isfinite(net(Tensor(x), one, one).asnumpy())  # training goes on as if nothing were wrong
    net.set_train(False)
    assert not np.isfinite(net(Tensor(x), one, one).asnumpy())


def test_reset_statistics_make_inference_finite_again(mode):
    x, _, net = run_one_step(gain_before=FLOAT16_MAX)
    net.norm.moving_mean.set_data(Tensor(np.zeros(3, np.float32)))
    net.norm.moving_variance.set_data(Tensor(np.ones(3, np.float32)))
    one = Tensor(1.0, ms.float32)
    net.set_train()
    for _ in range(44):  # 0.9**44 < 1 %
        net(Tensor(x), one, one)
    np.testing.assert_allclose(net.norm.moving_mean.asnumpy(), x.mean(axis=0), rtol=0.02)
    net.set_train(False)
    assert np.isfinite(net(Tensor(x), one, one).asnumpy())
