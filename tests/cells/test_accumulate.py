"""Gradient accumulation: windows, what moves when, and an unfinished window in a checkpoint."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import Poisoned, batch, copy_parameters, mlp
from tests.oracles import parameters, same_bits

NONE, INF = Tensor(np.zeros(4, np.float32)), Tensor(np.float32([0, np.inf, 0, 0]))


def accumulating(steps, update=None, optimizer=lambda p: nn.Momentum(p, 0.1, 0.9)):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    update = update or DynamicLossScaleUpdateCell(1024.0, 2, 2)
    return TrainOneStepWithLossScaleCell(net, optimizer(net.trainable_params()), update, accumulate_steps=steps)


def test_only_the_accumulators_move_inside_a_window(mode):
    step = accumulating(3)
    before = parameters(step)
    outputs = [step(*batch(seed=i), NONE) for i in range(2)]
    after = parameters(step)
    moved = {name for name in before if not same_bits(before[name], after[name])}
    assert moved == {"accu_step"} | {name for name in before if name.startswith("accu_grads.")}
    assert [(bool(overflow), float(scale)) for _, overflow, scale in outputs] == [(False, 1024.0)] * 2
    step(*batch(seed=2), NONE)
    ended = parameters(step)
    assert not same_bits(before["0.weight"], ended["0.weight"])
    assert all(not ended[name].any() for name in before if name.startswith(("accu_grads.", "accu_step.")))
    assert int(ended["global_step"].item()) == 1


@pytest.mark.parametrize("steps", [2, 5])
def test_micro_batches_equal_one_large_batch(mode, steps):
    small, large = accumulating(steps), accumulating(1)
    copy_parameters(large.network, small.network)
    for window in range(3):
        batches = [batch(seed=10 * window + i) for i in range(steps)]
        for x, y in batches:
            small(x, y, NONE)
        large(ms.ops.cat([x for x, _ in batches]), ms.ops.cat([y for _, y in batches]), NONE)
    for a, b in zip(small.weights, large.weights):
        np.testing.assert_allclose(a.asnumpy(), b.asnumpy(), rtol=1e-5, atol=1e-6)
    assert int(small.optimizer.global_step.asnumpy().item()) == 3


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_overflow_anywhere_drops_the_whole_window(mode, where):
    step = accumulating(3)
    before = parameters(step)
    outputs = [step(*batch(seed=i), INF if i == where else NONE) for i in range(3)]
    after = parameters(step)
    assert [bool(overflow) for _, overflow, _ in outputs] == [False, False, True]
    assert [float(scale) for _, _, scale in outputs] == [1024.0, 1024.0, 512.0]
    assert all(same_bits(before[w.name], after[w.name]) for w in step.weights)
    assert all(not after[name].any() for name in before if name.startswith("accu_grads."))
    assert int(after["accu_step"]) == 0
    assert step.nonfinite_parameters() == [step.weights[1].name]
    for i in range(3):  # the next window is whole and clean
        _, overflow, _ = step(*batch(seed=i), NONE)
    assert not bool(overflow)
    assert not same_bits(before["0.weight"], step.weights[0].asnumpy())


def test_a_resume_inside_a_window_continues_exactly(mode, tmp_path):
    whole = accumulating(3)
    for i in range(7):
        whole(*batch(seed=i), INF if i == 1 else NONE)
    ms.save_checkpoint(whole, str(tmp_path / "inside.ckpt"))
    resumed = accumulating(3)
    missing, unexpected = ms.load_param_into_net(resumed, ms.load_checkpoint(str(tmp_path / "inside.ckpt")))
    assert (missing, unexpected) == ([], [])
    for i in range(7, 15):
        a, b = whole(*batch(seed=i), NONE), resumed(*batch(seed=i), NONE)
        assert all(same_bits(x.asnumpy(), y.asnumpy()) for x, y in zip(a, b))
    before, after = parameters(whole), parameters(resumed)
    assert [name for name in before if not same_bits(before[name], after[name])] == []


def test_schedules_count_updates(mode):
    rates = [0.4, 0.2, 0.1, 0.05]
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    step = TrainOneStepWithLossScaleCell(
        net, nn.SGD(net.trainable_params(), rates), Tensor(8.0), accumulate_steps=2, outputs="learning_rate"
    )
    got = [float(step(*batch(seed=i), INF if i == 3 else NONE).asnumpy().item()) for i in range(8)]
    assert got == pytest.approx([0.4, 0.4, 0.2, 0.2, 0.2, 0.2, 0.1, 0.1])


def test_sums_that_overflow_float32_are_an_overflow(mode):
    step = accumulating(2, Tensor(2.0**100))
    for _ in range(2):
        _, overflow, _ = step(*batch(), Tensor(np.float32([2.0**27, 0, 0, 0])))
    assert bool(overflow)


def test_float16_gradients_are_summed_in_float32(mode):
    from tests.nets import GradientsAsGiven

    net = GradientsAsGiven([np.zeros(1, np.float32)], [ms.float16])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(1.0), accumulate_steps=4)
    for value in (2048.0, 1.0, 1.0, 1.0):  # 2048 + 1 is 2048 in float16
        step(Tensor([value]).astype(ms.float16))
    assert net.w[0].asnumpy().tolist() == [np.float16(-2051 / 4)]


def test_the_scale_is_constant_inside_a_window(mode):
    step = accumulating(2)
    x, y = batch()
    step(x, y, NONE)
    with pytest.raises(RuntimeError, match="constant inside a window"):
        step.set_sense_scale(Tensor(8.0))
    assert float(step.scale_sense.asnumpy()) == 1024.0
    step(x, y, NONE)
    step.set_sense_scale(Tensor(8.0))
    with pytest.raises(ValueError, match="constant inside a window"):
        step(x, y, NONE, Tensor(4.0))


@pytest.mark.parametrize(("steps", "error"), [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError)])
def test_bad_windows_are_refused(steps, error):
    with pytest.raises(error, match="accumulate_steps"):
        accumulating(steps)


def test_a_window_needs_a_scale_of_its_own():
    net = nn.WithLossCell(mlp(), nn.MSELoss())
    with pytest.raises(ValueError, match="needs 'scale_sense'"):
        TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params()), accumulate_steps=2)


def saved_after(calls, steps, path):
    step = accumulating(steps)
    for i in range(calls):
        step(*batch(seed=i), NONE)
    ms.save_checkpoint(step, str(path))
    return ms.load_checkpoint(str(path))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_window_is_resumed_by_its_own_number_of_micro_steps_only(mode, tmp_path, stepped):
    step = accumulating(2)
    if stepped:
        for i in range(2):
            step(*batch(seed=i), NONE)
    ms.load_param_into_net(step, saved_after(5, 4, tmp_path / "a.ckpt"))
    before = parameters(step)
    with pytest.raises(ValueError, match=r"1 of 4 micro-steps .* accumulate_steps=2.*accumulate_steps=4"):
        step(*batch(), NONE)
    assert all(same_bits(before[name], value) for name, value in parameters(step).items())


def test_at_a_boundary_another_number_is_fine(mode, tmp_path):
    step = accumulating(2)
    ms.load_param_into_net(step, saved_after(4, 4, tmp_path / "a.ckpt"))
    outputs = [step(*batch(seed=i), NONE) for i in range(2)]
    assert int(step.accumulator.steps) == 2 and not bool(outputs[-1][1])
    assert int(step.optimizer.global_step.asnumpy().item()) == 2


def test_a_checkpoint_without_the_number_of_micro_steps_loads(mode, tmp_path):
    saved = saved_after(4, 3, tmp_path / "a.ckpt")  # as version 0.1.0 wrote them
    del saved["accu_steps"]
    resumed, whole = accumulating(3), accumulating(3)
    assert ms.load_param_into_net(resumed, saved) == (["accu_steps"], [])
    for i in range(6):
        whole(*batch(seed=i), NONE) if i < 4 else [cell(*batch(seed=i), NONE) for cell in (whole, resumed)]
    assert int(resumed.accumulator.step) == 0


@pytest.mark.parametrize("steps", [2**31, 10**400])
def test_windows_beyond_int32_are_refused(steps):
    with pytest.raises(ValueError, match="accumulate_steps"):
        accumulating(steps)
