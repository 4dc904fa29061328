"""The order of the stages, the whole step against numpy, and what a step returns."""

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn, ops

from lossscale import (
    EMA,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    DynamicLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import GradientsAsGiven, batch, mlp
from tests.oracles import DynamicScale, WholeStep, parameters, same_bits

SHAPES = [(3, 2), (4,), (1,)]
REPORT = ("overflow", "loss_scale", "grad_norm", "updated")
CLIPS = {"global_norm": ClipByGlobalNorm, "norm": ClipByNorm, "value": ClipByValue}
WHOLE_STEPS = [
    {},
    {"steps": 3},
    {"steps": 2, "clip": ("global_norm", 1.0, None), "decay": 0.75},
    {"clip": ("global_norm", 1.0, 6.0), "decay": 0.5},
    {"steps": 2, "clip": ("norm", 0.5, None)},
    {"steps": 4, "clip": ("value", 0.25, None)},
    {"steps": 1, "clip": ("global_norm", 0.5, 4.0), "drop": False},
]
SCALES = [
    {"factor": 2, "window": 2},
    {"factor": 4, "window": 1, "floor": 0.125, "ceiling": 64.0},
    {"factor": 2, "window": 2, "hysteresis": 2, "backoff": 0.25},
]


def build(setting, scale):
    weights = [np.zeros(shape, np.float32) for shape in SHAPES]
    net = GradientsAsGiven(weights)
    clip, skip = None, {}
    if setting.get("clip"):
        kind, limit, skip_above = setting["clip"]
        skip = {} if skip_above is None else {"skip_above": skip_above}
        clip = CLIPS[kind](limit, **skip)
    limits = {
        "min_loss_scale": scale.get("floor", 1.0),
        "max_loss_scale": scale.get("ceiling"),
        "backoff_factor": scale.get("backoff"),
        "hysteresis": scale.get("hysteresis", 1),
    }
    update = DynamicLossScaleUpdateCell(16.0, scale["factor"], scale["window"], **limits)
    return TrainOneStepWithLossScaleCell(
        net,
        nn.SGD(list(net.w), 0.5),
        update,
        accumulate_steps=setting.get("steps", 1),
        clip_grad=clip,
        ema=EMA(setting["decay"]) if "decay" in setting else None,
        drop_overflow_update=setting.get("drop", True),
        outputs=REPORT,
    )


COMBINATIONS = [
    # Each setting with one scale, each scale with two settings at least; the others in `make test-all`.
    pytest.param(setting, scale, id=f"{setting}-{scale}", marks=[] if i % 3 == j else pytest.mark.slow)
    for i, setting in enumerate(WHOLE_STEPS)
    for j, scale in enumerate(SCALES)
]


@pytest.mark.parametrize(("setting", "scale"), COMBINATIONS)
def test_the_whole_step_equals_numpy(mode, setting, scale):
    step = build(setting, scale)
    start = {p.name: p.asnumpy().copy() for p in step.get_parameters()}

    @settings(max_examples=12 if mode == "GRAPH" else 3, deadline=None, database=None)
    @given(st.lists(st.sampled_from(["fine", "fine", "large", "inf", "nan"]), min_size=1, max_size=12), st.integers())
    def check(kinds, seed):
        for parameter in step.get_parameters():
            ops.assign(parameter, Tensor(start[parameter.name]))
        rng = np.random.default_rng(abs(seed))
        twin = WholeStep([np.zeros(s, np.float32) for s in SHAPES], DynamicScale(16.0, **scale), 0.5, **setting)
        for kind in kinds:
            grads = [rng.standard_normal(s).astype(np.float32) for s in SHAPES]
            if kind == "large":
                grads = [g * 10 for g in grads]
            elif kind != "fine":
                grads[rng.integers(3)].reshape(-1)[0] = {"inf": np.inf, "nan": np.nan}[kind]
            overflow, loss_scale, norm, updated = step(*[Tensor(g) for g in grads])
            want = twin.step(grads)
            assert (bool(overflow), float(loss_scale), bool(updated)) == (want[0], want[1], want[3])
            np.testing.assert_allclose(float(norm), want[2], rtol=1e-5)
            for weight, expected in zip(step.weights, twin.weights):
                np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-4, atol=1e-5)
        if "decay" in setting:
            for shadow, expected in zip(step.ema.shadows, twin.shadows):
                np.testing.assert_allclose(shadow.asnumpy(), expected, rtol=1e-4, atol=1e-5)

    check()


class Trace(nn.Cell):
    """A stage that notes when it ran."""

    def __init__(self, clock, inner=None):
        super().__init__(auto_prefix=False)
        self.clock = [clock]
        self.at = Parameter(Tensor(0, ms.int32), name="at", requires_grad=False)
        self.now = clock
        self.inner = inner

    def tick(self):
        ops.assign(self.at, ops.assign_add(self.now, Tensor(1, ms.int32)) * 1)
        return self.at


class TracedClip(Trace):
    def construct(self, grads):
        return ops.depend(grads, self.tick())


class TracedUpdate(Trace):
    def get_loss_scale(self):
        return 8.0

    def construct(self, loss_scale, overflow):
        ops.assign(loss_scale, loss_scale * 2)
        return ops.depend(overflow, self.tick())


class TracedOptimizer(nn.Optimizer):
    def __init__(self, weights, trace):
        super().__init__(0.1, weights)
        self.trace = trace

    def construct(self, gradients):
        return self.trace.tick()


class TracedAverage(EMA):
    def __init__(self, trace):
        super().__init__(0.5)
        self.trace = trace

    def construct(self):
        return self.trace.tick()


def test_scale_then_clip_then_optimizer_then_average(mode):
    clock = Parameter(Tensor(0, ms.int32), name="clock", requires_grad=False)
    update, clip, inner, average = TracedUpdate(clock), TracedClip(clock), Trace(clock), Trace(clock)
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(
        net, TracedOptimizer(list(net.w), inner), update, clip_grad=clip, ema=TracedAverage(average)
    )
    _, _, scale = step(Tensor(np.float32([1, 2])))
    assert float(scale) == 16.0
    ticks = [int(stage.at.asnumpy()) for stage in (inner, average)]
    assert ticks[0] < ticks[1]
    assert int(update.at.asnumpy()) < ticks[0]
    assert int(clip.at.asnumpy()) < ticks[0]


def test_clipping_cannot_hide_an_overflow(mode):
    # By value, inf becomes the limit and nan its negative: the check must come first.
    for clip in (ClipByValue(1.0), ClipByGlobalNorm(1.0), ClipByNorm(1.0)):
        net = GradientsAsGiven([np.zeros(2, np.float32)])
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(8.0), clip_grad=clip)
        assert bool(step(Tensor(np.float32([np.inf, 1])))[1])
        assert bool(step(Tensor(np.float32([np.nan, 1])))[1])
        assert net.w[0].asnumpy().tolist() == [0, 0]


def test_a_window_is_clipped_without_reporting_its_norm(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    clip = ClipByGlobalNorm(1.0)
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(8.0), clip_grad=clip, accumulate_steps=2)
    for _ in range(2):
        assert not bool(step(Tensor(np.float32([3, 4])))[1])
    np.testing.assert_allclose(net.w[0].asnumpy(), [-0.6, -0.8], rtol=1e-6)


def test_defaults_equal_the_options_spelled_out(mode):
    def train(**options):
        ms.set_seed(3)
        net = nn.WithLossCell(mlp(), nn.MSELoss())
        update = DynamicLossScaleUpdateCell(2.0**10, 3, 2)
        step = TrainOneStepWithLossScaleCell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), update, **options)
        outputs = [step(*batch(seed=i)) for i in range(6)]
        return [[o.asnumpy() for o in output] for output in outputs], parameters(step)

    plain, weights = train()
    spelled, same = train(accumulate_steps=1, clip_grad=None, ema=None, drop_overflow_update=True)
    assert all(same_bits(a, b) for x, y in zip(plain, spelled) for a, b in zip(x, y))
    assert [name for name in weights if not same_bits(weights[name], same[name])] == []


class WithExtras(GradientsAsGiven):
    """Returns the loss, a float and an int that must not be differentiated."""

    def __init__(self, values):
        super().__init__(values)
        self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)

    def construct(self, grad):
        calls = ops.assign_add(self.calls, Tensor(1, ms.int32))
        loss = (self.w[0] * grad).sum()
        return loss, (self.w[0] * 100.0).sum(), calls * 1


def test_extras_come_back_and_are_not_differentiated(mode):
    net = WithExtras([np.ones(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(1024.0), outputs=("overflow", "loss"))
    overflow, loss, extra, calls = step(Tensor(np.float32([1, 2])))
    assert (bool(overflow), float(loss), float(extra), int(calls)) == (False, 3.0, 200.0, 1)
    assert net.w[0].asnumpy().tolist() == [0, -1]
    assert int(net.calls.asnumpy()) == 1


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ("loss", 5.0),
        (("updated", "loss_scale", "loss"), (1.0, 8.0, 5.0)),
        (["grad_norm", "learning_rate"], (5.0**0.5, 0.5)),
    ],
    ids=str,
)
def test_outputs_come_in_the_order_given(mode, outputs, expected):
    net = GradientsAsGiven([np.float32([1, 2])])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 0.5), Tensor(8.0), outputs=outputs)
    got = step(Tensor(np.float32([1, 2])))
    values = [float(g.asnumpy().item()) for g in got] if isinstance(got, tuple) else float(got)
    assert values == pytest.approx(list(expected) if isinstance(expected, tuple) else expected)


@pytest.mark.parametrize("outputs", ["lose", (), ("loss", "loss"), ("loss", "scale")], ids=str)
def test_unknown_outputs_are_refused(outputs):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="must be different names from"):
        TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w)), Tensor(8.0), outputs=outputs)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"clip_grad": 1.0}, "ClipByGlobalNorm"), ({"ema": 0.999}, "EMA"), ({"drop_overflow_update": 1}, "True or False")],
    ids=str,
)
def test_options_of_a_wrong_kind_are_refused(options, words):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    with pytest.raises(TypeError, match=words):
        TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w)), Tensor(8.0), **options)


def test_a_spike_is_skipped_and_is_a_clean_step(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    update = DynamicLossScaleUpdateCell(8.0, 2, 2)
    clip = ClipByGlobalNorm(1.0, skip_above=10.0)
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), update, clip_grad=clip, outputs=REPORT)
    got = [step(Tensor(np.float32([3 * size, 4 * size]))) for size in (1.0, 3.0, 1.0)]
    assert [(bool(o), float(s), float(n), bool(u)) for o, s, n, u in got] == [
        (False, 8.0, 5.0, True),
        (False, 16.0, 15.0, False),
        (False, 16.0, 5.0, True),
    ]
    np.testing.assert_allclose(net.w[0].asnumpy(), [-1.2, -1.6], rtol=1e-6)


class HalvesGradients(TrainOneStepWithLossScaleCell):
    def unscale_and_check(self, scaled, divisor):
        unscaled, overflow, norm = super().unscale_and_check(scaled, divisor)
        return (unscaled[0] * 0.5,), overflow, norm


@pytest.mark.parametrize("clip", [None, ClipByGlobalNorm(100.0), ClipByValue(100.0)], ids=str)
def test_an_overridden_stage_is_used_whatever_the_clip(mode, clip):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = HalvesGradients(net, nn.SGD(list(net.w), 1.0), Tensor(8.0), clip_grad=clip)
    step(Tensor(np.float32([2, 4])))
    assert net.w[0].asnumpy().tolist() == [-1, -2]


@pytest.mark.parametrize("backend", ["native", "plain"])
def test_overflow_is_judged_by_the_values_not_by_their_norm(mode, backend, monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", backend)
    net = GradientsAsGiven([np.zeros(4, np.float32)])
    clip = ClipByGlobalNorm(1.0)
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(1.0), clip_grad=clip, outputs=REPORT)
    overflow, _, norm, updated = step(Tensor(np.full(4, 3e38, np.float32)))
    assert (bool(overflow), float(norm), bool(updated)) == (False, np.inf, True)
    np.testing.assert_allclose(net.w[0].asnumpy(), [-0.5] * 4, rtol=1e-5)
    overflow, _, _, updated = step(Tensor(np.full(4, np.inf, np.float32)))
    assert (bool(overflow), bool(updated)) == (True, False)
