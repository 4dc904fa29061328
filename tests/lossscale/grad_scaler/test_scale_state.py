"""The series of scales against PyTorch's arithmetic in plain Python, and the state that is saved."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn

from lossscale import DynamicLossScaler, GradScaler
from lossscale.grad_scaler.scale_state import next_scale
from tests.fixtures import train_cells
from tests.oracles import TorchScale, same_bits

STATE_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


class Given:
    """An optimizer of one scalar, to hand a scaler good and bad gradients."""

    def __init__(self):
        self.parameters = (ms.Parameter(Tensor(1.0), name="w"),)

    def __call__(self, grads):
        self.grads = grads


GOOD, BAD = Tensor(1.0), Tensor(float("inf"))


FACTORS = (st.floats(1e-38, 3.4e38), st.floats(1.0009765625, 1000.0), st.floats(0.001, 0.9990234375))


@settings(deadline=None, max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_arithmetic_equals_pytorch_to_the_bit(seed):
    """Thousands of series at once: the rule works elementwise."""
    rng = np.random.default_rng(seed)
    init = 2.0 ** rng.uniform(-126, 127.99, 1000)
    growth, backoff = 1 + 2.0 ** rng.uniform(-10, 8, 1000), rng.uniform(0.001, 0.999, 1000)
    oracles = [TorchScale(*each, 1) for each in zip(init, growth, backoff)]
    overflows = rng.random((10, 1000)) < rng.random(1000)
    growth, backoff = Tensor(growth), Tensor(backoff)
    scale = Tensor(init.astype(np.float32))
    for overflow in overflows:
        scale = next_scale(scale, Tensor(overflow), Tensor(~overflow), growth, backoff)
        for oracle, flag in zip(oracles, overflow):
            oracle.update(flag)
        assert same_bits(scale.asnumpy(), np.array([oracle.scale for oracle in oracles], np.float32))


@settings(deadline=None, max_examples=100)
@given(*FACTORS, st.integers(1, 4), st.lists(st.booleans(), max_size=10))
def test_scale_series_equals_pytorch_to_the_bit(init, growth, backoff, interval, overflows):
    init = max(init, 2.0**-126)
    scaler = GradScaler(init, growth, backoff, interval)
    oracle = TorchScale(init, growth, backoff, interval)
    for overflow in overflows:
        scaler._state.adjust(overflow)
        oracle.update(overflow)
        assert (scaler.get_scale(), scaler._state.growth_tracker) == (float(oracle.scale), oracle.tracker)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from((2.0, 1.7)), st.sampled_from((0.5, 0.3)), st.lists(st.booleans(), max_size=8))
def test_step_and_update_follow_the_series(growth, backoff, overflows):
    scaler, oracle, optimizer = GradScaler(1000.0, growth, backoff, 2), TorchScale(1000.0, growth, backoff, 2), Given()
    for overflow in overflows:
        scaler.step(optimizer, (BAD if overflow else GOOD,))
        scaler.update()
        oracle.update(overflow)
        assert scaler.get_scale() == float(oracle.scale)


def test_grad_scaling_update_scale():
    """Two clean steps with interval 2 grow the scale, one bad step backs off and sets the tracker back."""
    scaler, optimizer = GradScaler(4.0, 2.0, 0.25, 2), Given()
    seen = []
    for grad in (GOOD, GOOD, GOOD, BAD, GOOD):
        scaler.step(optimizer, (grad,))
        scaler.update()
        seen.append((scaler.get_scale(), scaler.state_dict()["_growth_tracker"]))
    assert seen == [(4.0, 1), (8.0, 0), (8.0, 1), (2.0, 0), (2.0, 1)]


def test_scale_stops_at_the_smallest_normal_float32():
    scaler = GradScaler(2.0**-120)
    for _ in range(20):
        scaler._state.adjust(True)
    assert scaler.get_scale() == 2.0**-126
    scaler.set_growth_interval(1)
    scaler._state.adjust(False)
    assert scaler.get_scale() == 2.0**-125


def test_grad_scaling_state_dict():
    """All five values are taken over by a scaler of other settings."""
    scaler = GradScaler(1000.0, 3.0, 0.25, 7)
    for _ in range(4):
        scaler._state.adjust(False)
    state = scaler.state_dict()
    assert set(state) == STATE_KEYS
    assert state == {
        "scale": 1000.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 4,
    }
    resumed = GradScaler()
    resumed.load_state_dict(state)
    for overflow in (False, False, False, True, False):
        scaler._state.adjust(overflow)
        resumed._state.adjust(overflow)
        assert resumed.state_dict() == scaler.state_dict()


def test_bad_state_dicts_are_refused_and_change_nothing():
    scaler = GradScaler(8.0)
    good = scaler.state_dict()
    with pytest.raises(RuntimeError, match=r"empty.*enabled=False"):
        scaler.load_state_dict({})
    for key in STATE_KEYS:
        with pytest.raises(ValueError, match=f"lacks the keys .'{key}'"):
            scaler.load_state_dict({name: value for name, value in good.items() if name != key})
    for key, value, error in (
        ("extra", 1, ValueError),
        ("scale", 0.0, ValueError),
        ("scale", "8", TypeError),
        ("growth_factor", 1.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("_growth_tracker", -1, ValueError),
        ("_growth_tracker", None, TypeError),
    ):
        with pytest.raises(error, match=key):
            scaler.load_state_dict({**good, "scale": 4.0, key: value})
    assert scaler.state_dict() == good


def test_update_with_a_new_scale(mode):
    scaler = GradScaler(8.0)
    scaled = ms.jit(scaler.scale)
    for new_scale, expected in ((3.0, 3.0), (Tensor([5.0]), 5.0), (Tensor(7, ms.int32), 7.0)):
        scaler.update(new_scale)
        assert scaler.get_scale() == expected == float(scaled(Tensor(1.0)))
    for bad, error in (
        (0.0, ValueError),
        (float("nan"), ValueError),
        ("3", TypeError),
        (Tensor([1.0, 2.0]), ValueError),
    ):
        with pytest.raises(error, match="new_scale"):
            scaler.update(bad)
    assert scaler.get_scale() == 7.0


def test_get_scale_in_a_compiled_function_is_live(mode):
    scaler = GradScaler(8.0)

    @ms.jit
    def inverse(x):
        return x * (1.0 / scaler.get_scale())

    for scale in (8.0, 2.0, 16.0):
        scaler.update(scale)
        assert float(inverse(Tensor(1.0))) == 1.0 / scale


def test_getters_and_setters():
    scaler = GradScaler(8.0)
    scaler.set_growth_factor(4.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(1)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (4.0, 0.25, 1)
    scaler._state.adjust(False)
    assert scaler.get_scale() == 32.0
    scaler._state.adjust(True)
    assert scaler.get_scale() == 8.0
    with pytest.raises(ValueError, match="growth_factor"):
        scaler.set_growth_factor(0.5)
    with pytest.raises(ValueError, match="backoff_factor"):
        scaler.set_backoff_factor(1.5)
    with pytest.raises(TypeError, match="growth_interval"):
        scaler.set_growth_interval(1.5)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    (
        (("cuda",), TypeError, r"takes no device.*GradScaler\(init_scale=2.0\*\*16\)"),
        ((0.0,), ValueError, "init_scale"),
        ((float("inf"),), ValueError, "init_scale"),
        ((8.0, 1.0), ValueError, "growth_factor"),
        ((8.0, 2.0, 1.0), ValueError, "backoff_factor"),
        ((8.0, 2.0, 0.5, 0), ValueError, "growth_interval"),
        ((8.0, 2.0, 0.5, 2000.0), TypeError, "growth_interval"),
        ((8.0, 2.0, 0.5, 2000, 1), TypeError, "enabled"),
    ),
)
def test_arguments_are_checked(arguments, error, text):
    with pytest.raises(error, match=text):
        GradScaler(*arguments)


def test_defaults_are_pytorch_s():
    assert GradScaler().state_dict() == {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 0,
    }


def test_resumed_training_equals_the_unbroken_run():
    def run(parts):
        net = nn.Dense(2, 1, weight_init="ones")
        optimizer = nn.SGD(net.trainable_params(), learning_rate=0.5)
        scaler, scales = GradScaler(8.0, 1.7, 0.3, 2), []
        for part in parts:
            for value in part:
                scaler.step(optimizer, (Tensor([[value, 1.0]], ms.float32), Tensor([1.0])))
                scaler.update()
                scales.append(scaler.get_scale())
            state, scaler = scaler.state_dict(), GradScaler()
            scaler.load_state_dict(state)
        return scales, net.weight.asnumpy().tolist()

    inf = np.inf
    assert run([[1.0, 1.0, 1.0, inf, 1.0, 1.0, 1.0]]) == run([[1.0, 1.0, 1.0], [inf, 1.0], [1.0, 1.0]])


def test_an_interval_below_the_count_takes_effect_after_the_next_overflow():
    """PyTorch compares by ==, so a count that has passed the interval grows on."""
    scaler, expected = GradScaler(8.0, growth_interval=9), TorchScale(8.0, 2.0, 0.5, 9)
    for overflow, interval in ((0, 9), (0, 9), (0, 2), (0, 2), (0, 2), (1, 2), (0, 2), (0, 2)):
        scaler.set_growth_interval(interval)
        expected.interval = interval
        scaler._state.adjust(bool(overflow))
        expected.update(overflow)
        assert scaler.get_scale() == expected.scale
    assert scaler.get_scale() == 8.0


def test_state_dicts_of_0_1_0_load_and_go_on():
    states = json.loads((Path(train_cells.__file__).parent / "0.1.0" / "state_dicts.json").read_text())
    scaler = GradScaler()
    scaler.load_state_dict(states["GradScaler"])
    assert scaler.state_dict() == states["GradScaler"]
    for _ in range(3):  # the count is 2 of 5, the factor 3
        assert scaler.get_scale() == 2.0
        scaler._state.adjust(False)
    assert scaler.get_scale() == 6.0
    functional, scale = DynamicLossScaler(1.0, 3.0, 5), np.float32(states["DynamicLossScaler"]["scale_value"])
    functional.load_state_dict(states["DynamicLossScaler"])
    for _ in range(3):
        assert functional.state_dict()["scale_value"] == scale
        functional.adjust(Tensor(True))
    assert functional.state_dict()["scale_value"] == scale * np.float32(3)
