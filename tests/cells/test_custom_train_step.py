"""Seed 000's step: a fixed scale, unscaled here, applied overflow or not."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import CustomTrainOneStepCell
from tests.nets import GradientsAsGiven, batch, copy_parameters, mlp
from tests.oracles import parameters, same_bits


def given_step(values, sens, dtypes=None):
    net = GradientsAsGiven(values, dtypes)
    return CustomTrainOneStepCell(net, nn.SGD(list(net.w), 1.0), sens)


@pytest.mark.parametrize("sens", [1, 3, 0.25, 2.0**24, 2.0**126])
def test_gradients_reach_the_optimizer_at_their_true_size(mode, sens):
    grad = np.float32([0.01, -0.3, 0.02])
    step = given_step([np.zeros(3, np.float32)], sens)
    step(Tensor(grad))
    expected = (grad * np.float32(sens)) * np.float32(1 / sens)
    np.testing.assert_array_equal(-step.weights[0].asnumpy(), expected)


def test_float16_parameters_are_unscaled_in_float32(mode):
    # In float16, 1 / 40000 has 9 bits left, and the result would be 0.999.
    step = given_step([np.zeros(2, np.float32)], 40000.0, [ms.float16])
    step(Tensor(np.float32([1.0, -0.5])).astype(ms.float16))
    assert step.weights[0].asnumpy().tolist() == [-1.0, 0.5]


def test_an_overflow_is_applied(mode):
    step = given_step([np.zeros(2, np.float32)], 1024.0)
    step(Tensor(np.float32([np.inf, 1.0])))
    assert step.weights[0].asnumpy().tolist() == [-np.inf, -1.0]


def test_with_adam_weight_decay_it_equals_the_plain_step(mode):
    def train(make):
        net = nn.WithLossCell(mlp(), nn.MSELoss())
        step = make(net, nn.AdamWeightDecay(net.trainable_params(), 0.01))
        copy_parameters(reference, net)
        return [step(*batch(seed=i)).asnumpy() for i in range(10)], parameters(net)

    reference = mlp()
    plain_losses, plain = train(nn.TrainOneStepCell)
    losses, scaled = train(lambda net, optimizer: CustomTrainOneStepCell(net, optimizer, 1024.0))
    assert all(same_bits(a, b) for a, b in zip(plain_losses, losses))
    for name in plain:  # a power of two: scaling and unscaling are exact
        np.testing.assert_array_equal(plain[name], scaled[name])


class ClipAfterUnscale(CustomTrainOneStepCell):
    def scale_grad(self, gradients):
        gradients = super().scale_grad(gradients)
        return self.hyper_map(ms.ops.partial(_limit, Tensor(0.5)), gradients)


_limit = ms.ops.MultitypeFuncGraph("limit")


@_limit.register("Tensor", "Tensor")
def _limit_tensor(limit, grad):
    return ms.ops.minimum(grad, limit)


def test_scale_grad_can_be_overridden(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = ClipAfterUnscale(net, nn.SGD(list(net.w), 1.0), 1024.0)
    step(Tensor(np.float32([2.0, 0.25])))
    assert net.w[0].asnumpy().tolist() == [-0.5, -0.25]
    assert float(step.reciprocal_sense) == 1 / 1024


@pytest.mark.parametrize(
    ("sens", "error", "words"),
    [
        (0, ValueError, "> 0"),
        (-1.0, ValueError, "> 0"),
        (float("nan"), ValueError, "finite"),
        (float("inf"), ValueError, "finite"),
        (1e39, ValueError, r"2\*\*126"),
        ("1024", TypeError, "number"),
        (None, TypeError, "number"),
        (True, TypeError, "number"),
    ],
)
def test_bad_scales_are_refused(sens, error, words):
    with pytest.raises(error, match=words):
        given_step([np.zeros(2, np.float32)], sens)
