import copy
import inspect
import math
import pickle

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn

from lossscale import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaleManager,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import batch, mlp
from tests.oracles import DynamicScale


def train_cell(update_cell, **options):
    net = mlp()
    return TrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.01), update_cell, **options
    )


def run(cell, overflows):
    """Take steps in a train cell of `train_cell`; an inf in the data makes one overflow."""
    x, y = batch()
    bad = Tensor(np.full(x.shape, np.inf, np.float32))
    for overflow in overflows:
        cell(bad if overflow else x, y)


def test_managers_are_mindspores():
    assert issubclass(LossScaleManager, mindspore.amp.LossScaleManager)
    assert issubclass(FixedLossScaleManager, LossScaleManager)
    assert issubclass(DynamicLossScaleManager, LossScaleManager)
    assert LossScaleManager().get_drop_overflow_update() is False


@pytest.mark.parametrize("name", ["FixedLossScaleManager", "DynamicLossScaleManager"])
def test_arguments_and_defaults_start_as_mindspores(name):
    import lossscale

    ours = list(inspect.signature(getattr(lossscale, name)).parameters.values())
    stock = list(inspect.signature(getattr(mindspore.amp, name)).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(stock)]] == [(p.name, p.default) for p in stock]
    assert all(p.kind is p.KEYWORD_ONLY for p in ours[len(stock) :])


def test_fixed_defaults():
    manager = FixedLossScaleManager()
    assert manager.get_loss_scale() == 128.0
    assert manager.get_drop_overflow_update() is True
    cell = manager.get_update_cell()
    assert isinstance(cell, FixedLossScaleUpdateCell)
    assert cell.get_loss_scale() == 128.0


def test_fixed_scale_never_moves():
    manager = FixedLossScaleManager(1024.0)
    for overflow in (True, False) * 1500:
        manager.update_loss_scale(overflow)
    for _ in range(1500):
        manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 1024.0


def test_fixed_that_keeps_overflowing_updates_has_no_update_cell():
    manager = FixedLossScaleManager(1024.0, False)
    assert manager.get_drop_overflow_update() is False
    assert manager.get_update_cell() is None


@pytest.mark.parametrize("value", [0.999, 0, -1, math.nan, math.inf, -math.inf, 1e39, 10**400])
def test_fixed_refuses_a_scale_below_one_or_not_finite(value):
    with pytest.raises(ValueError, match=r"FixedLossScaleManager.*'loss_scale'.*but got"):
        FixedLossScaleManager(value)


@pytest.mark.parametrize("value", ["128", None, True, [128.0]])
def test_fixed_refuses_what_is_no_number(value):
    with pytest.raises(TypeError, match=r"'loss_scale' must be a number"):
        FixedLossScaleManager(value)


def test_fixed_refuses_a_drop_flag_that_is_no_bool():
    with pytest.raises(TypeError, match="drop_overflow_update"):
        FixedLossScaleManager(128.0, 1)


def test_dynamic_defaults():
    manager = DynamicLossScaleManager()
    assert manager.get_loss_scale() == manager.loss_scale == 2**24
    assert (manager.scale_factor, manager.increase_ratio, manager.decrease_ratio) == (2, 2, 0.5)
    assert manager.scale_window == 2000
    assert (manager.cur_iter, manager.last_overflow_iter) == (1, 0)
    assert (manager.bad_step, manager.bad_step_max) == (0, 1000)
    assert manager.get_drop_overflow_update() is True
    cell = manager.get_update_cell()
    assert isinstance(cell, DynamicLossScaleUpdateCell)
    assert cell.get_loss_scale() == 2**24


@pytest.mark.parametrize("number", [np.float32(4), np.int64(4), 4.0, 4])
def test_dynamic_takes_any_kind_of_number(number):
    assert DynamicLossScaleManager(number, number, 4).get_loss_scale() == 4


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("init_loss_scale", 0.999, ValueError),
        ("init_loss_scale", -1, ValueError),
        ("init_loss_scale", math.nan, ValueError),
        ("init_loss_scale", math.inf, ValueError),
        ("init_loss_scale", 1e39, ValueError),
        ("init_loss_scale", "2", TypeError),
        ("init_loss_scale", None, TypeError),
        ("scale_factor", 0, ValueError),
        ("scale_factor", -2, ValueError),
        ("scale_factor", math.nan, ValueError),
        ("scale_factor", math.inf, ValueError),
        ("scale_factor", 10**400, ValueError),
        ("scale_factor", 1e38, ValueError),
        ("scale_factor", "2", TypeError),
        ("scale_factor", True, TypeError),
        ("scale_window", 0, ValueError),
        ("scale_window", -1, ValueError),
        ("scale_window", 2.0, TypeError),
        ("scale_window", True, TypeError),
        ("scale_window", None, TypeError),
    ],
)
def test_dynamic_refuses(name, value, error):
    with pytest.raises(error, match=f"DynamicLossScaleManager.*'{name}'.*got"):
        DynamicLossScaleManager(**{name: value})


def test_two_positional_arguments_are_the_initial_scale_and_the_factor():
    with pytest.warns(UserWarning, match=r"scale_factor=3000.*DynamicLossScaleManager\(scale_factor=4, scale_window"):
        manager = DynamicLossScaleManager(4, 3000)
    assert (manager.get_loss_scale(), manager.scale_factor, manager.scale_window) == (4, 3000, 2000)


def test_a_factor_of_256_does_not_warn():
    assert DynamicLossScaleManager(4, 256).scale_factor == 256


LIMITS = {"floor": "min_loss_scale", "ceiling": "max_loss_scale", "backoff": "backoff_factor"}


@settings(deadline=None, max_examples=60)
@given(
    scale=st.floats(1, 2.0**127, width=32) | st.sampled_from([2.0**127, 10.0]),
    factor=st.floats(1, 256, width=32) | st.sampled_from([2, 3, 1.1]),
    window=st.integers(1, 5) | st.just(2**31),
    limits=st.sampled_from([{}, {"floor": 2.0**-3}, {"ceiling": 2.0**20, "backoff": 0.25}, {"hysteresis": 2}]),
    overflows=st.lists(st.booleans(), max_size=30),
)
@pytest.mark.filterwarnings("ignore:.*outside the limits:UserWarning")
def test_host_rule_equals_plain_python(scale, factor, window, limits, overflows):
    options = {LIMITS.get(name, name): value for name, value in limits.items()}
    manager = DynamicLossScaleManager(scale, factor, window, **options)
    twin = DynamicScale(manager.get_loss_scale(), factor, window, **limits)
    marks = [number for number, overflow in enumerate(overflows, 1) if overflow]
    for overflow in overflows:
        manager.update_loss_scale(overflow)
        assert manager.get_loss_scale() == twin.step(overflow)
        assert manager.bad_step == twin.in_a_row
    assert (manager.cur_iter, manager.last_overflow_iter) == (len(overflows) + 1, max(marks, default=0))


def test_manager_cell_and_scaler_give_the_same_series(mode):
    """From 2**127 growing stops, and factor 1.1 is applied in float32, everywhere."""
    for start, factor in ((2.0**127, 2), (10.0, 1.1)):
        manager = DynamicLossScaleManager(start, factor, 1)
        cell, scaler = manager.get_update_cell(), DynamicLossScaler(start, factor, 1)
        scale = Parameter(Tensor(start, mindspore.float32), name="scale_sense")
        for overflow in (False, False, True, False):
            cell(scale, Tensor(overflow))
            scaler.adjust(not overflow)
            manager.update_loss_scale(overflow)
            assert manager.get_loss_scale() == float(scale.asnumpy()) == float(scaler.scale_value.asnumpy())


@pytest.mark.parametrize("wraps", [False, True], ids=["one step", "two micro-steps"])
def test_loss_scale_can_be_assigned(mode, wraps):
    manager = DynamicLossScaleManager(1024, 2, 100)
    update = manager.get_update_cell()
    manager.loss_scale = 64
    assert manager.get_loss_scale() == update.get_loss_scale() == manager.get_update_cell().get_loss_scale() == 64
    cell = train_cell(update, accumulate_steps=2 if wraps else 1)
    run(cell, [False])
    if wraps:
        with pytest.raises(RuntimeError, match="inside a window"):
            manager.loss_scale = 8
        assert manager.loss_scale == 64
        run(cell, [False])
    manager.loss_scale = 16
    assert manager.loss_scale == float(cell.scale_sense.asnumpy()) == 16
    run(cell, [True] * (2 if wraps else 1))
    assert manager.loss_scale == 8


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (1e39, ValueError), (10**400, ValueError), ("8", TypeError)]
)
def test_what_cannot_be_a_scale_is_not_assigned(value, error):
    manager = DynamicLossScaleManager(1024)
    with pytest.raises(error, match="loss_scale"):
        manager.loss_scale = value
    assert manager.loss_scale == 1024


def test_an_assigned_scale_keeps_to_the_limits():
    manager = DynamicLossScaleManager(1024, max_loss_scale=2048.0)
    with pytest.warns(UserWarning, match="outside the limits"):
        manager.loss_scale = 4096
    assert manager.loss_scale == 2048


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
@pytest.mark.parametrize("bound", [False, True])
def test_copies_after_get_update_cell(copied, bound):
    manager = DynamicLossScaleManager(1024, 2, 3)
    update = manager.get_update_cell()
    if bound:
        run(train_cell(update), [True])
    other = copied(manager)
    assert other.loss_scale == manager.loss_scale == (512 if bound else 1024)
    other.loss_scale = 8
    assert (other.loss_scale, manager.loss_scale) == (8, 512 if bound else 1024)
    run(train_cell(other.get_update_cell()), [True])
    assert other.loss_scale == 4


@pytest.mark.parametrize("bound", [False, True])
def test_the_1001st_overflow_in_a_row_raises(bound):
    manager = DynamicLossScaleManager()
    if bound:
        train_cell(manager.get_update_cell())
    manager.update_loss_scale(True)
    manager.update_loss_scale(False)
    assert manager.bad_step == 0
    manager.bad_step = 990
    for _ in range(10):
        manager.update_loss_scale(True)
    with pytest.raises(RuntimeError, match="1001 overflows in a row"):
        manager.update_loss_scale(True)


def test_overflows_that_a_restored_train_cell_saw_count():
    manager = DynamicLossScaleManager()
    cell = train_cell(manager.get_update_cell())
    cell.loss_scaling_manager.consecutive_overflows.set_data(Tensor(1000, mindspore.int32))
    manager.update_loss_scale(True)
    run(cell, [True])
    with pytest.raises(RuntimeError, match="1001 overflows in a row"):
        manager.update_loss_scale(True)


def test_bound_manager_reads_the_train_cell(mode):
    manager = DynamicLossScaleManager(1024, 2, 3)
    cell = train_cell(manager.get_update_cell())
    run(cell, [True, False, False])
    assert manager.get_loss_scale() == manager.loss_scale == 512
    run(cell, [False])
    assert manager.get_loss_scale() == 1024
    cell.scale_sense.set_data(Tensor(8.0, mindspore.float32))
    assert manager.get_loss_scale() == 8


def test_bound_manager_leaves_the_scale_alone():
    manager = DynamicLossScaleManager(1024, 2, 1)
    cell = train_cell(manager.get_update_cell())
    for overflow in (True, False, False, True):
        manager.update_loss_scale(overflow)
        assert manager.get_loss_scale() == float(cell.scale_sense) == 1024
    assert manager.bad_step == 1


def test_an_update_cell_without_a_train_cell_binds_nothing():
    manager = DynamicLossScaleManager(1024)
    manager.get_update_cell()
    manager.update_loss_scale(True)
    assert manager.get_loss_scale() == 512


def test_last_train_cell_wins():
    manager = DynamicLossScaleManager(1024)
    early, late = manager.get_update_cell(), manager.get_update_cell()
    first = train_cell(late)
    assert manager.get_loss_scale() == 1024
    second = train_cell(early)
    first.scale_sense.set_data(Tensor(2.0, mindspore.float32))
    second.scale_sense.set_data(Tensor(16.0, mindspore.float32))
    assert manager.get_loss_scale() == 16


def test_a_new_update_cell_starts_at_the_current_scale():
    manager = DynamicLossScaleManager(1024)
    cell = train_cell(manager.get_update_cell())
    cell.scale_sense.set_data(Tensor(64.0, mindspore.float32))
    assert manager.get_update_cell().get_loss_scale() == 64


def test_update_cell_takes_the_managers_limits():
    limits = {"min_loss_scale": 2.0, "max_loss_scale": 32.0, "backoff_factor": 0.25, "hysteresis": 2}
    manager = DynamicLossScaleManager(32.0, 2, 1, **limits)
    cell = manager.get_update_cell()
    scale, seen = Parameter(Tensor(32.0), name="scale_sense"), []
    for overflow in (False, True, True, True, True, False):
        cell(scale, Tensor(overflow))
        seen.append(float(scale.asnumpy()))
    assert seen == [32, 32, 8, 2, 2, 4]


def test_update_cell_takes_the_managers_rule():
    manager = DynamicLossScaleManager(1024, 4, 2)
    cell = train_cell(manager.get_update_cell())
    run(cell, [True, False, False])
    assert manager.get_loss_scale() == 1024
    run(cell, [True])
    assert manager.get_loss_scale() == 256
