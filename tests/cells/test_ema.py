"""The average of the weights: when it moves, against numpy, evaluating with it, and in checkpoints."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import EMA, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import Poisoned, batch, mlp
from tests.oracles import parameters, same_bits

NONE, INF = Tensor(np.zeros(4, np.float32)), Tensor(np.float32([0, np.inf, 0, 0]))


def averaging(ema, steps=1):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    update = DynamicLossScaleUpdateCell(1024.0, 2, 100)
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    return TrainOneStepWithLossScaleCell(net, optimizer, update, ema=ema, accumulate_steps=steps)


@pytest.mark.parametrize("warmup", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_it_follows_real_updates_only(mode, warmup, steps):
    ema = EMA(0.9, warmup=warmup)
    step = averaging(ema, steps)
    shadow, updates = step.weights[0].asnumpy().copy(), 0
    for i in range(8):
        step(*batch(seed=i), INF if i == 3 else NONE)
        if (i + 1) % steps == 0 and i != 3:
            decay = min(0.9, (1 + updates) / (10 + updates)) if warmup else 0.9
            shadow = shadow + (step.weights[0].asnumpy() - shadow) * np.float32(1 - decay)
            updates += 1
        np.testing.assert_allclose(ema.shadows[0].asnumpy(), shadow, rtol=1e-5, atol=1e-7)
    assert int(ema.updates.asnumpy()) == updates


def test_applied_swaps_in_the_averages_and_back(mode):
    ema = EMA(0.5)
    step = averaging(ema)
    for i in range(3):
        step(*batch(seed=i), NONE)
    trained = parameters(step)
    with ema.applied():
        for weight, shadow in zip(step.weights, ema.shadows):
            assert same_bits(weight.asnumpy(), shadow.asnumpy())
        averaged = float(step.network(*batch(seed=9), NONE))
        with pytest.raises(RuntimeError, match="already"):
            ema.apply()
    restored = parameters(step)
    assert [name for name in trained if not same_bits(trained[name], restored[name])] == []
    assert float(step.network(*batch(seed=9), NONE)) != averaged
    with pytest.raises(RuntimeError, match="No weights are kept"):
        ema.restore()


def test_it_is_saved_under_names_of_its_own(tmp_path):
    step = averaging(EMA(0.5))
    step(*batch(), NONE)
    ms.save_checkpoint(step, str(tmp_path / "ema.ckpt"))
    fresh = averaging(EMA(0.5))
    loaded = ms.load_checkpoint(str(tmp_path / "ema.ckpt"))
    assert {f"ema.{w.name}" for w in step.weights} | {"ema.updates"} <= set(loaded)
    assert ms.load_param_into_net(fresh, loaded) == ([], [])
    assert same_bits(fresh.ema.shadows[0].asnumpy(), step.ema.shadows[0].asnumpy())


def test_float16_weights_are_averaged_in_float32(mode):
    weight = ms.Parameter(Tensor([1.0], ms.float16), name="w")
    ema = EMA(0.999, [weight])
    ms.ops.assign(weight, Tensor([2.0], ms.float16))
    for _ in range(3):
        ema()
    assert ema.shadows[0].dtype == ms.float32
    np.testing.assert_allclose(ema.shadows[0].asnumpy(), [2 - 0.999**3], rtol=1e-5)


def test_float64_weights_are_averaged_in_float64(mode):
    weight = ms.Parameter(Tensor([1 + 2.0**-40], ms.float64), name="w")
    ema = EMA(0.5, [weight])
    ms.ops.assign(weight, Tensor([1 + 2.0**-39], ms.float64))
    ema()
    assert ema.shadows[0].asnumpy().tolist() == [1 + 1.5 * 2.0**-40]


def test_an_error_while_evaluating_gives_the_weights_back(mode):
    weight = ms.Parameter(Tensor([1.0]), name="w")
    ema = EMA(0.5, [weight])
    ms.ops.assign(weight, Tensor([3.0]))
    ema()
    with pytest.raises(KeyboardInterrupt), ema.applied():
        assert weight.asnumpy().tolist() == [2.0]
        raise KeyboardInterrupt
    assert weight.asnumpy().tolist() == [3.0]
    with ema.applied():  # and can be applied again
        assert weight.asnumpy().tolist() == [2.0]


@pytest.mark.parametrize(
    ("decay", "error"), [(1.0, ValueError), (-0.1, ValueError), (float("nan"), ValueError), ("0.9", TypeError)]
)
def test_bad_decays_are_refused(decay, error):
    with pytest.raises(error, match="decay"):
        EMA(decay)


def test_averages_without_weights_are_refused():
    with pytest.raises(RuntimeError, match="no weights yet"):
        EMA(0.9).apply()
