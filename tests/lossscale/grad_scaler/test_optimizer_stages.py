"""Misuse of `GradScaler`: each mistake gets an error that names it, and changes nothing."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import GradScaler


@pytest.fixture
def optimizer():
    return nn.SGD(nn.Dense(2, 1).trainable_params(), learning_rate=0.5)


def gradients(value=8.0):
    return Tensor(np.full((1, 2), value, np.float32)), Tensor(np.full(1, value, np.float32))


def test_unscale_twice(optimizer):
    scaler = GradScaler(8.0)
    scaler.unscale_(optimizer, gradients())
    with pytest.raises(RuntimeError, match="already been called on this optimizer since the last update"):
        scaler.unscale_(optimizer, gradients())


def test_unscale_after_step(optimizer):
    scaler = GradScaler(8.0)
    scaler.step(optimizer, gradients())
    with pytest.raises(RuntimeError, match=r"being called after step\(\)"):
        scaler.unscale_(optimizer, gradients())


def test_step_twice(optimizer):
    scaler = GradScaler(8.0)
    scaler.step(optimizer, gradients())
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called"):
        scaler.step(optimizer, gradients())
    scaler.update()
    scaler.step(optimizer, gradients())


def test_update_before_step(optimizer):
    scaler = GradScaler(8.0)
    with pytest.raises(RuntimeError, match=r"update\(\) was called before any step\(\)"):
        scaler.update()
    scaler.step(optimizer, gradients())
    scaler.update()
    with pytest.raises(RuntimeError, match="before any step"):
        scaler.update()


@pytest.mark.parametrize("value", (8.0, np.inf))
def test_update_after_unscale_alone(optimizer, value):
    """Who looks at the gradients and decides not to step may still update."""
    scaler = GradScaler(8.0, growth_interval=1)
    scaler.unscale_(optimizer, gradients(value))
    scaler.update()
    assert scaler.get_scale() == (16.0 if np.isfinite(value) else 4.0)
    assert scaler.total_skips == 0


def test_step_with_gradients_that_are_still_scaled(optimizer):
    scaler, scaled = GradScaler(8.0), gradients()
    before = optimizer.parameters[0].asnumpy().copy()
    unscaled = scaler.unscale_(optimizer, scaled)
    for grads in (scaled, list(scaled), (unscaled[0], scaled[1])):
        with pytest.raises(RuntimeError, match=r"still scaled.*grads = scaler.unscale_\(optimizer, grads\)"):
            scaler.step(optimizer, grads)
    np.testing.assert_array_equal(optimizer.parameters[0].asnumpy(), before)
    scaler.step(optimizer, unscaled)
    np.testing.assert_array_equal(optimizer.parameters[0].asnumpy(), before - 0.5)


@pytest.mark.parametrize("method", ("step", "unscale_"))
@pytest.mark.parametrize(
    ("grads", "error", "text"),
    (
        (gradients()[:1], ValueError, "1 gradients but the optimizer has 2 parameters"),
        (gradients()[::-1], ValueError, r"'weight' has the shape \(1,\), but the parameter \(1, 2\)"),
        (gradients()[0], TypeError, "must be a tuple or list"),
        ((gradients()[0], None), TypeError, "the gradient of 'bias' must be a Tensor"),
    ),
)
def test_gradients_that_do_not_fit(optimizer, method, grads, error, text):
    scaler = GradScaler(8.0)
    with pytest.raises(error, match=text):
        getattr(scaler, method)(optimizer, grads)
    with pytest.raises(RuntimeError, match="before any step"):
        scaler.update()


def test_gradients_of_another_optimizer(optimizer):
    other = nn.SGD(nn.Dense(3, 1).trainable_params(), learning_rate=0.5)
    with pytest.raises(ValueError, match="gradients of another optimizer"):
        GradScaler(8.0).step(other, gradients())


def test_arguments_in_the_wrong_order(optimizer):
    with pytest.raises(TypeError, match=r"The order is step\(optimizer, grads\)"):
        GradScaler(8.0).step(gradients(), optimizer)


def test_float16_parameters():
    net = nn.Dense(2, 1).to_float(ms.float16)
    net.weight.set_dtype(ms.float16)
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.5)
    with pytest.raises(ValueError, match=r"'weight' is float16.*auto_mixed_precision"):
        GradScaler(8.0).unscale_(optimizer, gradients())


def test_optimizer_that_unscales_by_itself():
    optimizer = nn.SGD(nn.Dense(2, 1).trainable_params(), learning_rate=0.5, loss_scale=8.0)
    with pytest.raises(ValueError, match=r"loss_scale=8.*divided twice"):
        GradScaler(8.0).step(optimizer, gradients())


def test_pickling_in_mid_iteration(optimizer):
    scaler = GradScaler(8.0)
    scaler.unscale_(optimizer, gradients())
    with pytest.raises(RuntimeError, match="between iterations"):
        scaler.__getstate__()
