"""Defects that train steps written by hand have had, one test each, named after the defect.

Those that belong to one module, such as a clip that hides an overflow, are in its own tests.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from lossscale import (
    EMA,
    ClipByGlobalNorm,
    ClipByValue,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    Model,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import GradientsAsGiven, batch, mlp

REPORT = ("overflow", "loss_scale", "grad_norm", "updated")


def given(scale_sense, values=((0.0, 0.0),), optimizer=lambda w: nn.SGD(w, 1.0), dtypes=None, **options):
    net = GradientsAsGiven([np.float32(v) for v in values], dtypes)
    return TrainOneStepWithLossScaleCell(net, optimizer(list(net.w)), scale_sense, **options)


def grad(*values):
    return Tensor(np.float32(values))


def value(cell, place=0):
    return cell.weights[place].asnumpy().tolist()


def test_clip_hides_overflow_inside_a_window(mode):
    """Audio and language models clip before they look; by value, inf then is the limit."""
    step = given(Tensor(8.0), accumulate_steps=2, clip_grad=ClipByValue(1.0))
    flags = [bool(step(g)[1]) for g in (grad(np.inf, 1), grad(1, 1), grad(1, 1), grad(3, 3))]
    assert flags == [False, True, False, False]
    assert value(step) == [-1, -1]


def test_clip_hides_which_parameter_overflowed(mode):
    """Pipelines that clip by the global norm first make every gradient nan or 0."""
    step = given(Tensor(8.0), [[0.0], [0.0], [0.0]], clip_grad=ClipByGlobalNorm(1.0))
    assert bool(step(grad(1), grad(np.nan), grad(1))[1])
    assert step.nonfinite_parameters() == ["w1"]


def test_each_micro_step_is_clipped(mode):
    """Detection libraries clip each micro-batch; the noise of one counts, though their mean is small."""
    step = given(Tensor(8.0), accumulate_steps=2, clip_grad=ClipByGlobalNorm(1.0), outputs=REPORT)
    step(grad(30, 0))
    _, _, norm, _ = step(grad(-29, 0))
    assert (float(norm), value(step)) == (0.5, [-0.5, 0])


class OtherDevice(nn.Cell):
    """Stands in for the mean over two devices: the other one's gradients are `other`."""

    def __init__(self, other):
        super().__init__()
        self.other = Parameter(Tensor(np.float32(other)), name="other", requires_grad=False)

    def construct(self, grads):
        return ((grads[0] + self.other) / 2,)


def test_clip_and_check_before_reduce(mode):
    """Most wrappers clip, and with accumulation check, what one device has, and not what all share."""
    step = given(Tensor(1.0), clip_grad=ClipByGlobalNorm(1.0), outputs=REPORT)
    step.grad_reducer, step.reducer_flag = OtherDevice([-29, 0]), True
    _, _, norm, _ = step(grad(30, 0))
    assert (float(norm), value(step)) == (0.5, [-0.5, 0])
    ops.assign(step.grad_reducer.other, grad(np.inf, 0))
    overflow, _, _, updated = step(grad(30, 0))
    assert (bool(overflow), bool(updated), value(step)) == (True, False, [-0.5, 0])


def test_ema_moves_on_a_spike(mode):
    """Averages are stepped wherever there was no overflow, moved weights or not."""
    step = given(Tensor(8.0), ema=EMA(0.5), clip_grad=ClipByGlobalNorm(1.0, skip_above=10.0), outputs="updated")
    assert [bool(step(g)) for g in (grad(2, 0), grad(20, 0))] == [True, False]
    assert (step.ema.shadows[0].asnumpy().tolist(), int(step.ema.updates.asnumpy())) == ([-0.5, 0], 1)


def test_poisoned_accumulators(mode):
    """MindSpore's accumulating cell clears by a multiply: inf * 0 is nan for ever. Kept overflows must end too."""
    step = given(Tensor(8.0), [[0.0], [0.0]], accumulate_steps=2, drop_overflow_update=False)
    for first in (grad(np.inf), grad(np.nan), grad(1)):
        step(first, grad(1))
        step(grad(1), grad(1))
    assert [total.asnumpy().tolist() for total in step.accumulator.totals] == [[0], [0]]
    assert value(step, 1) == [-3]
    assert not bool(step(grad(1), grad(1))[1])


def test_an_overflow_is_forgotten_by_the_end_of_its_window(mode):
    """An accumulating step that looks at the last micro-batch only; or a flag that stays up in the next window."""
    step = given(Tensor(8.0), accumulate_steps=3)
    flags = [bool(step(grad(np.inf if i == 0 else 1, 1))[1]) for i in range(6)]
    assert flags == [False, False, True, False, False, False]


def test_reported_loss_is_divided_by_the_window(mode):
    """A step that divides the loss it reports by N, but not the one it differentiates."""
    step = given(Tensor(64.0), [[1.0]], accumulate_steps=4, outputs="loss", optimizer=lambda w: nn.SGD(w, 0.5))
    assert [float(step(grad(3))) for _ in range(4)] == [3.0] * 4
    assert value(step) == [-0.5]


def test_loss_reported_after_the_scale_moved(mode):
    """Functional steps divide the scaled loss by the scale of the next step: 3.0 becomes 1.5, or 6.0."""
    update = DynamicLossScaleUpdateCell(8.0, 2, 1)
    step = given(update, [[1.0], [0.0]], optimizer=lambda w: nn.SGD(w, 0.0))
    got = [step(grad(3), g)[::2] for g in (grad(1), grad(2.0**125), grad(1))]
    assert [(float(loss), float(scale)) for loss, scale in got] == [(3.0, 16.0), (3.0, 8.0), (3.0, 16.0)]


def test_double_unscale():
    """Scripts that scale in the cell and divide in the optimizer too."""
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=1024.0)
    with pytest.raises(ValueError, match=r"loss_scale=1024.*divided twice"):
        Model(net, nn.MSELoss(), optimizer, loss_scale_manager=FixedLossScaleManager(1024.0))


class LeftToOptimizer(TrainOneStepWithLossScaleCell):
    """Unscales in the optimizer, as MindSpore's fixed scale that keeps overflows does."""

    def unscale_and_check(self, grads, totals, divisor):
        _, overflow, flags = super().unscale_and_check(grads, totals, divisor)
        return totals, overflow, flags


def test_a_subclass_may_leave_the_unscaling_to_the_optimizer(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = LeftToOptimizer(net, nn.SGD(list(net.w), 1.0, loss_scale=8.0), Tensor(8.0))
    step(grad(1, 2))
    assert net.w[0].asnumpy().tolist() == [-1, -2]


@pytest.mark.parametrize(
    "make",
    [lambda: Tensor(8.0), lambda: FixedLossScaleUpdateCell(8.0), lambda: DynamicLossScaleUpdateCell(8.0, 2, 100)],
    ids=["tensor", "fixed", "dynamic"],
)
def test_dynamic_scaling_that_applies_nan(mode, make):
    """One speech model moves its scale and applies the nan; other libraries never look under a fixed scale."""
    step = given(make(), outputs=REPORT)
    overflow, _, _, updated = step(grad(np.nan, 1))
    assert (bool(overflow), bool(updated), value(step)) == (True, False, [0, 0])


@pytest.mark.parametrize("where", range(3))
def test_an_overflow_in_one_dtype_is_overwritten_by_the_next(mode, where):
    """A scaler that looks at gradients dtype by dtype and keeps the last answer."""
    dtypes = [ms.float16, ms.float32, ms.float64]
    step = given(Tensor(1.0), [[0.0]] * 3, dtypes=dtypes, optimizer=KeepsAll)
    grads = [Tensor([np.inf if i == where else 1.0]).astype(dtype) for i, dtype in enumerate(dtypes)]
    assert bool(step(*grads)[1])


class KeepsAll(nn.Optimizer):
    """An optimizer for any mix of dtypes, which does nothing."""

    def __init__(self, parameters):
        super().__init__(0.1, parameters)

    def construct(self, gradients):
        return True


def test_a_resume_without_a_scale_starts_at_zero(mode):
    """Libraries read 0 where a checkpoint holds no scale, and the first step is 0 / 0."""
    step = given(DynamicLossScaleUpdateCell(64.0, 2, 100))
    loaded = {p.name: p for p in given(Tensor(8.0)).get_parameters() if p.name != "scale_sense"}
    missing, _ = ms.load_param_into_net(step, loaded)
    assert "scale_sense" in missing
    assert float(step(grad(1, 2))[2]) == 64.0
    with pytest.raises(ValueError, match="> 0"):
        step.set_sense_scale(Tensor(0.0))


def test_two_parameters_for_one_scale(mode):
    """Language models keep a second one, and setting or restoring the first does nothing."""
    step = given(DynamicLossScaleUpdateCell(77.0, 2, 100), accumulate_steps=2, clip_grad=ClipByGlobalNorm(1.0))
    holders = [p.name for p in step.get_parameters() if p.size == 1 and float(p.asnumpy().item()) == 77.0]
    assert holders == ["scale_sense"]
    ms.load_param_into_net(step, {"scale_sense": Parameter(Tensor(16.0), name="scale_sense")})
    assert [float(step(grad(np.inf, 1))[2]) for _ in range(2)] == [16.0, 8.0]


class TwoSteps(nn.Cell):
    """Two networks trained in one compiled graph, as an adversarial pair is."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def construct(self, a, b):
        return self.first(a)[1:], self.second(b)[1:]


def test_two_dynamic_scales_in_one_graph(mode):
    """Two of MindSpore's functional scalers can't be compiled together: both call their Parameter `scale_value`."""
    options = {"accumulate_steps": 2, "clip_grad": ClipByGlobalNorm(10.0)}
    steps = [given(DynamicLossScaleUpdateCell(s, 2, 100), ema=EMA(0.5), **options) for s in (64.0, 256.0)]
    pair = TwoSteps(*steps)
    for _ in range(2):
        (first, one), (second, other) = pair(grad(np.inf, 1), grad(1, 1))
    assert [bool(first), float(one), bool(second), float(other)] == [True, 32.0, False, 256.0]
    assert [value(step) for step in steps] == [[0, 0], [-1, -1]]
    assert {"first.scale_sense", "second.scale_sense"} <= {p.name for p in pair.get_parameters()}


def test_nan_passes_the_loss_monitor(mode):
    """MindSpore's LossMonitor stops at nan only where the step returns the bare loss."""
    net = nn.WithLossCell(mlp(), nn.MSELoss())
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    step = TrainOneStepWithLossScaleCell(net, optimizer, Tensor(8.0), outputs="loss")
    x, y = (t.asnumpy() for t in batch())
    data = ms.dataset.NumpySlicesDataset((x, y * np.nan), shuffle=False).batch(4)
    with pytest.raises(ValueError, match="loss is NAN or INF"):
        Model(step).train(1, data, callbacks=[ms.train.LossMonitor()], dataset_sink_mode=False)


@pytest.mark.parametrize("steps", [None, 0, 2.0], ids=str)
def test_no_accumulation_is_divided_by_none(steps):
    """A default of None that is divided by later."""
    with pytest.raises((TypeError, ValueError), match="accumulate_steps"):
        given(Tensor(8.0), accumulate_steps=steps)
