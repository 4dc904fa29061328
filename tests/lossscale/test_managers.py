import inspect
import math

import mindspore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Tensor, nn

from lossscale import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    FixedLossScaleUpdateCell,
    LossScaleManager,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import batch, mlp

LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def train_cell(update_cell):
    net = mlp()
    return TrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nn.MSELoss()), nn.SGD(net.trainable_params(), 0.01), update_cell
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


@pytest.mark.parametrize("value", [0.999, 0, -1, math.nan, math.inf, -math.inf])
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


class HostRule:
    """The host's rule in plain Python."""

    def __init__(self, scale, factor, window):
        self.scale, self.factor, self.window = scale, factor, window
        self.step, self.mark, self.in_a_row = 1, 0, 0

    def update(self, overflow):
        if overflow:
            self.scale = max(self.scale * (1 / self.factor), 1)
            self.mark = self.step
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            if (self.step - self.mark) % self.window == 0:
                self.scale = min(self.scale * self.factor, LARGEST_FLOAT32)
        self.step += 1


@settings(deadline=None, max_examples=300)
@given(
    scale=st.floats(1, 2.0**127),
    factor=st.floats(1, 256) | st.sampled_from([2, 3, 4]),
    window=st.integers(1, 5),
    overflows=st.lists(st.booleans(), max_size=60),
)
def test_host_rule(scale, factor, window, overflows):
    manager, rule = DynamicLossScaleManager(scale, factor, window), HostRule(scale, factor, window)
    for overflow in overflows:
        manager.update_loss_scale(overflow)
        rule.update(overflow)
        seen = (manager.get_loss_scale(), manager.cur_iter, manager.last_overflow_iter, manager.bad_step)
        assert seen == (rule.scale, rule.step, rule.mark, rule.in_a_row)


@pytest.mark.parametrize("bound", [False, True])
def test_the_1001st_overflow_in_a_row_raises(bound):
    manager = DynamicLossScaleManager()
    if bound:
        train_cell(manager.get_update_cell())
    manager.update_loss_scale(True)
    manager.update_loss_scale(False)
    for _ in range(1000):
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


def test_update_cell_takes_the_managers_rule():
    manager = DynamicLossScaleManager(1024, 4, 2)
    cell = train_cell(manager.get_update_cell())
    run(cell, [True, False, False])
    assert manager.get_loss_scale() == 1024
    run(cell, [True])
    assert manager.get_loss_scale() == 256
