"""Update cells: whole sequences against the plain-Python twin, binding, and refused arguments."""

import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mindspore import Parameter, Tensor, nn

from cells.native import library_path
from lossscale import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import mlp
from tests.oracles import DynamicScale

LARGEST = float(np.finfo(np.float32).max)
SETTINGS = [
    {"factor": 2, "window": 1},
    {"factor": 2, "window": 3},
    {"factor": 3, "window": 2},
    {"factor": 1.5, "window": 2, "backoff": 0.25, "floor": 0.125},
    {"factor": 2, "window": 2, "hysteresis": 2, "ceiling": 4096.0},
    {"factor": 4, "window": 3, "hysteresis": 3},
]


def cell_and_scale(start, factor=2, window=2, floor=1.0, ceiling=None, backoff=None, hysteresis=1):
    cell = DynamicLossScaleUpdateCell(
        start,
        factor,
        window,
        min_loss_scale=floor,
        max_loss_scale=ceiling,
        backoff_factor=backoff,
        hysteresis=hysteresis,
    )
    return cell, Parameter(Tensor(start, ms.float32), name="scale_sense")


def reset(cell, scale, start):
    scale.set_data(Tensor(start, ms.float32))
    for counter, value in (("cur_iter", 1), ("last_overflow_iter", 0), ("consecutive_overflows", 0)):
        getattr(cell, counter).set_data(Tensor(value, ms.int32))
    cell.total_overflows.set_data(Tensor(0, ms.int32))


@pytest.fixture(params=["native", "plain"])
def backend(request, monkeypatch):
    if request.param == "native" and library_path() is None:
        pytest.skip("the native kernel is not built")
    monkeypatch.setenv("LOSSSCALE_BACKEND", request.param)
    return request.param


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sequences_equal_plain_python(mode, backend, setting):
    cell, scale = cell_and_scale(1024.0, **setting)
    flags = Tensor(True), Tensor(False)

    @settings(max_examples=100 if mode == "GRAPH" or backend == "native" else 40, deadline=None, database=None)
    @given(
        start=st.one_of(st.sampled_from([1.0, 0.3, 1e-30, 2.0**127, LARGEST]), st.floats(2.0**-20, 2.0**100, width=32)),
        overflows=st.lists(st.booleans(), min_size=1, max_size=16),
    )
    def check(start, overflows):
        reset(cell, scale, start)
        twin = DynamicScale(float(np.float32(start)), **setting)
        for overflow in overflows:
            cell(scale, flags[0] if overflow else flags[1])
            assert float(scale.asnumpy()) == twin.step(overflow)
            counters = (cell.cur_iter, cell.last_overflow_iter, cell.consecutive_overflows, cell.total_overflows)
            assert [int(c.asnumpy()) for c in counters] == [twin.current, twin.last, twin.in_a_row, twin.total]

    check()


def test_hundred_overflows_follow_the_floor(mode):
    cell, scale = cell_and_scale(2.0**24, floor=2.0**-3)
    got = []
    for _ in range(100):
        cell(scale, Tensor(True))
        got.append(float(scale.asnumpy()))
    assert got == [max(2.0**-3, 2.0**24 / 2.0**i) for i in range(1, 101)]


def test_scale_never_reaches_inf(mode, backend):
    cell, scale = cell_and_scale(1e38, factor=16, window=1)
    for _ in range(5):
        cell(scale, Tensor(False))
    assert float(scale.asnumpy()) == float(np.float32(1e38))


@pytest.mark.parametrize("overflow", [True, False])
def test_overflow_comes_back_as_it_went_in(mode, backend, overflow):
    cell, scale = cell_and_scale(4.0)
    assert bool(cell(scale, Tensor(overflow))) is overflow
    assert bool(cell(scale, overflow)) is overflow
    assert bool(FixedLossScaleUpdateCell(4.0)(scale, Tensor(overflow))) is overflow


@pytest.mark.parametrize("overflow", [True, False])
def test_counters_stop_at_the_end_of_int32(mode, backend, overflow):
    end = 2**31 - 1
    cell, scale = cell_and_scale(8.0, window=3)
    for counter in (cell.cur_iter, cell.consecutive_overflows, cell.total_overflows):
        counter.set_data(Tensor(end, ms.int32))
    cell.last_overflow_iter.set_data(Tensor(end - 2, ms.int32))
    scales = []
    for _ in range(4):
        cell(scale, Tensor(overflow))
        scales.append(float(scale.asnumpy()))
    assert scales == ([4, 2, 1, 1] if overflow else [8, 16, 16, 16])
    counters = (cell.cur_iter, cell.consecutive_overflows, cell.total_overflows)
    assert [int(c.asnumpy()) for c in counters] == [end, end if overflow else 0, end]


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 10**30])
def test_a_huge_window_means_never(mode, backend, window):
    cell, scale = cell_and_scale(8.0, window=window)
    cell.last_overflow_iter.set_data(Tensor(-1, ms.int32))
    cell.cur_iter.set_data(Tensor(2**31 - 1, ms.int32))
    for overflow in (False, False, True, False):
        cell(scale, Tensor(overflow))
    assert float(scale.asnumpy()) == 4.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_copies_go_on_by_themselves(mode, backend, copied):
    update, scale = cell_and_scale(8.0, window=2)
    update(scale, Tensor(False))
    other, other_scale = copied(update), Parameter(Tensor(8.0), name="other")
    other(other_scale, Tensor(False))
    assert (float(other_scale.asnumpy()), float(scale.asnumpy())) == (16.0, 8.0)
    update(scale, Tensor(True))
    assert (int(update.total_overflows.asnumpy()), int(other.total_overflows.asnumpy())) == (1, 0)


@pytest.mark.parametrize("make", [FixedLossScaleUpdateCell, lambda value: DynamicLossScaleUpdateCell(value, 2, 1)])
def test_an_int_stays_an_int_until_the_scale_is_live(make):
    update = make(256)
    assert isinstance(update.get_loss_scale(), int)
    train_cell(update)
    assert isinstance(update.get_loss_scale(), float)


def test_fixed_cell_changes_nothing(mode):
    scale = Parameter(Tensor(4.0), name="scale_sense")
    for overflow in (True, False, True):
        FixedLossScaleUpdateCell(4.0)(scale, Tensor(overflow))
    assert float(scale.asnumpy()) == 4.0


def test_parameters_have_stock_names():
    cell, _ = cell_and_scale(4.0)
    values = {p.name: int(p.asnumpy()) for p in cell.get_parameters()}
    assert values == {
        "current_iterator_step": 1,
        "last_overflow_iterator_step": 0,
        "consecutive_overflows": 0,
        "total_overflows": 0,
    }
    assert not cell.trainable_params()


def train_cell(update):
    net = nn.WithLossCell(mlp(), nn.MSELoss())
    return TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.1), update)


@pytest.mark.parametrize("make", [lambda: FixedLossScaleUpdateCell(256), lambda: DynamicLossScaleUpdateCell(256, 2, 1)])
def test_get_loss_scale_is_live_once_bound(make):
    update = make()
    assert (update.is_bound, update.get_loss_scale()) == (False, 256.0)
    cell = train_cell(update)
    cell.set_sense_scale(Tensor(64.0))
    assert (update.is_bound, update.get_loss_scale()) == (True, 64.0)


def test_one_update_cell_in_two_train_cells_is_refused():
    update = DynamicLossScaleUpdateCell(256, 2, 1)
    first = train_cell(update)
    with pytest.raises(ValueError, match="already belongs to another train cell"):
        train_cell(update)
    first.set_sense_scale(Tensor(2.0))
    assert update.get_loss_scale() == 2.0


@pytest.mark.parametrize("make", [FixedLossScaleUpdateCell, lambda v: DynamicLossScaleUpdateCell(v, 2, 10)])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(value, ValueError) for value in (0, -1, float("nan"), float("inf"), 1e39, 10**400)],
        *[(value, TypeError) for value in ("8", None, True)],
    ],
)
def test_bad_scales_are_refused(make, value, error):
    with pytest.raises(error, match="loss_scale_value"):
        make(value)
