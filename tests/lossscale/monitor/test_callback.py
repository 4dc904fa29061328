"""The monitor: exact histories of runs with known overflows, culprits, lines, stops, and where it gets its values."""

import math
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from lossscale import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    LossScaleMonitor,
    Model,
    TrainOneStepWithLossScaleCell,
    read_history,
)
from tests.nets import GradientsAsGiven, Poisoned, batch, mlp
from tests.oracles import DynamicScale, parameters, same_bits

FLAGS = [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 1]
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class PlainDescent(nn.Optimizer):
    """For every dtype, which MindSpore's optimizers are not."""

    def __init__(self, weights):
        super().__init__(0.1, weights)

    def construct(self, grads):
        done = True
        for i in range(len(self.parameters)):
            done = ops.depend(done, ops.assign(self.parameters[i], self.parameters[i] - grads[i]))
        return done


def given_cell(count=1, dtypes=None, scale=1024.0, window=2, **options):
    net = GradientsAsGiven([np.zeros(3, np.float32)] * count, dtypes)
    update = DynamicLossScaleUpdateCell(scale, 2, window)
    return TrainOneStepWithLossScaleCell(net, PlainDescent(list(net.w)), update, **options)


def gradient(bad=False, dtype=ms.float32):
    return Tensor(np.full(3, np.inf if bad else 1.0, np.float32)).astype(dtype)


def poisoned_cell(**options):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    update = DynamicLossScaleUpdateCell(1024.0, 2, 2)
    return TrainOneStepWithLossScaleCell(net, nn.Momentum(net.trainable_params(), 0.01, 0.9), update, **options)


def poisoned_data(flags, value=np.inf, place=2):
    x, y = (t.asnumpy() for t in batch())
    poison = np.zeros((len(flags), 4), np.float32)
    poison[np.flatnonzero(flags), place] = value
    return ds.GeneratorDataset([(x, y, p) for p in poison], ["x", "y", "poison"], shuffle=False)


def columns(history, *names):
    return [tuple(record[name] for name in names) for record in history]


def expected_columns(flags):
    """(step, overflow, loss_scale, next_loss_scale, in_a_row, overflows) by the rule in plain Python."""
    rule = DynamicScale(1024.0, window=2)
    rows = []
    for step, flag in enumerate(flags, 1):
        before = rule.scale
        rows.append((step, bool(flag), before, rule.step(flag), rule.in_a_row, rule.total))
    return rows


EXACT = ("step", "overflow", "loss_scale", "next_loss_scale", "in_a_row", "overflows")


@pytest.mark.parametrize("model_class", [Model, ms.Model])
def test_history_of_a_run_is_exact(mode, tmp_path, model_class, capsys):
    monitor = LossScaleMonitor(tmp_path / "new" / "run.jsonl", progress=False)
    model_class(poisoned_cell()).train(1, poisoned_data(FLAGS), callbacks=[monitor])
    assert columns(monitor.history, *EXACT) == expected_columns(FLAGS)
    assert [r["parameters"] for r in monitor.history] == [["2.weight"] if flag else [] for flag in FLAGS]
    assert [r["skipped"] for r in monitor.history] == [bool(flag) for flag in FLAGS]
    assert capsys.readouterr().out.splitlines() == [
        "step 3: overflow in 2.weight, scale 2048 -> 1024",
        "step 4: overflow in 2.weight, scale 1024 -> 512, 2nd in a row",
        "step 8: overflow in 2.weight, scale 1024 -> 512",
        "step 11: overflow in 2.weight, scale 1024 -> 512",
    ]
    np.testing.assert_equal(read_history(tmp_path / "new" / "run.jsonl"), monitor.history)


def test_history_of_a_hand_written_loop(mode):
    cell = given_cell(2)
    with LossScaleMonitor(progress=False, verbose=False).start(cell) as monitor:
        for flag in FLAGS:
            record = monitor.step(cell(gradient(), gradient(flag)))
            assert record is monitor.history[-1]
    assert columns(monitor.history, *EXACT) == expected_columns(FLAGS)


@pytest.mark.parametrize("dtype", [ms.float16, ms.float32, ms.float64])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_culprits_of_each_parameter_and_dtype(mode, place, dtype):
    cell = given_cell(3, [dtype, ms.float32, dtype], scale=1.0)
    assert cell.nonfinite_parameters() == []
    inputs = [gradient(i == place, d) for i, d in enumerate([dtype, ms.float32, dtype])]
    cell(*inputs)
    assert cell.nonfinite_parameters() == [f"w{place}"]
    cell(gradient(dtype=dtype), gradient(True), gradient(True, dtype))
    assert cell.nonfinite_parameters() == ["w1", "w2"]


class Saturating(TrainOneStepWithLossScaleCell):
    """Reports overflow by a status of the device while all gradients are finite, as Ascend's saturation mode."""

    def get_overflow_status(self, status, compute_output):
        return compute_output[0].max() > 10


def test_a_culprit_that_the_device_does_not_tell_is_unknown(mode, capsys):
    net = GradientsAsGiven([np.zeros(3, np.float32)])
    cell = Saturating(net, nn.SGD(list(net.w), 0.1), DynamicLossScaleUpdateCell(8.0, 2, 9))
    with LossScaleMonitor(progress=False).start(cell) as monitor:
        monitor.step(cell(gradient()))
        assert cell.nonfinite_parameters() == []
        record = monitor.step(cell(gradient() * 100))
    assert record["parameters"] == cell.nonfinite_parameters() == ["unknown"]
    assert capsys.readouterr().out == "step 2: overflow in an unknown parameter, scale 8 -> 4\n"


ORDERS = [
    ("updated", "loss_scale", "loss", "grad_norm", "overflow"),
    ("learning_rate", "loss", "updated"),
    "loss",
    ("overflow", "loss_scale"),
]


@pytest.mark.parametrize("outputs", ORDERS)
def test_values_are_found_in_any_outputs(mode, outputs):
    cell = given_cell(outputs=outputs)
    with LossScaleMonitor(progress=False, verbose=False).start(cell) as monitor:
        for flag in FLAGS:
            monitor.step(cell(gradient(flag)))
    assert columns(monitor.history, *EXACT) == expected_columns(FLAGS)
    first = monitor.history[0]
    assert (first["grad_norm"] is None) == ("grad_norm" not in outputs)
    assert first["learning_rate"] == (pytest.approx(0.1) if "learning_rate" in outputs else None)
    if "grad_norm" in outputs:
        assert first["grad_norm"] == pytest.approx(3**0.5)


def test_micro_steps_of_a_window_belong_together(mode):
    cell = given_cell(accumulate_steps=2, outputs=("loss", "overflow", "loss_scale", "updated"))
    with LossScaleMonitor(progress=False, verbose=False).start(cell) as monitor:
        for bad in (0, 1, 1, 0, 0, 0):
            monitor.step(cell(gradient(bad)))
    assert columns(monitor.history, "in_a_row", "overflows", "skipped") == [
        (0, 0, False),
        (1, 1, True),
        (1, 1, False),
        (2, 2, True),
        (2, 2, False),
        (0, 2, False),
    ]


def test_sink_mode_is_summed_up_by_the_counters(mode, capsys):
    class Wrapper(nn.Cell):  # as MindSpore's _DataWrapper
        def __init__(self, network):
            super().__init__(auto_prefix=False)
            self.network = network

    cell = given_cell()
    with LossScaleMonitor(progress=False).start(Wrapper(cell)) as monitor:
        for epoch in (FLAGS[:4], FLAGS[4:7], FLAGS[7:]):
            for flag in epoch:
                outputs = cell(gradient(flag))
            monitor.step(outputs, int(cell.loss_scaling_manager.cur_iter.asnumpy()) - 1)
    assert columns(monitor.history, "step", "steps", "new_overflows", "loss_scale", "next_loss_scale", "in_a_row") == [
        (4, 4, 2, 1024.0, 512.0, 2),
        (7, 3, 0, 512.0, 1024.0, 0),
        (11, 4, 2, 1024.0, 512.0, 1),
    ]
    assert "steps 1 to 4: 2 overflows, the last in w0, scale 1024 -> 512, 2nd in a row\n" in capsys.readouterr().out


def test_a_nan_loss_stops_the_run_unless_its_step_was_skipped(mode):
    monitor = LossScaleMonitor(progress=False, verbose=False)
    x, y = batch()
    cell = poisoned_cell()
    cell(x, y, Tensor(np.zeros(4, np.float32)))
    monitor.start(cell)
    record = monitor.step(cell(x, y * math.nan, Tensor(np.zeros(4, np.float32))))
    assert math.isnan(record["loss"])
    assert record["skipped"]
    keeps = poisoned_cell(drop_overflow_update=False)
    monitor.start(keeps)
    with pytest.raises(ValueError, match=r"loss of step 1 is nan and the step was not skipped .the overflow was not"):
        monitor.step(keeps(x, y * math.nan, Tensor(np.zeros(4, np.float32))))


@pytest.mark.parametrize("loss", [math.nan, -math.inf])
def test_a_bare_loss_stops_as_lossmonitor_does(loss):
    monitor = LossScaleMonitor(progress=False).start(nn.TrainOneStepCell(mlp(), nn.SGD(mlp().trainable_params())))
    assert monitor.step(Tensor(1.5, ms.float32))["loss_scale"] == 1.0
    with pytest.raises(ValueError, match=r"loss of step 2 is .*no gradient overflowed"):
        monitor.step(Tensor(loss, ms.float32))


def test_stop_after_overflows_in_a_row_explains(mode, tmp_path):
    cell = given_cell(2, window=100)
    # Finite, but 1e38 * 1024 and 1e38 * 256 are not in float32; the loss is 0.
    data = ds.GeneratorDataset([(np.ones(3, np.float32), np.full(3, 1e38, np.float32))] * 4, ["a", "b"], shuffle=False)
    monitor = LossScaleMonitor(tmp_path / "run.jsonl", stop_after=3, progress=False, verbose=False)
    before = parameters(cell.network)
    with pytest.raises(RuntimeError) as caught:
        Model(cell).train(1, data, callbacks=[monitor])
    text = str(caught.value)
    assert text.startswith("3 overflows in a row, up to step 3;")
    for part in (
        "1024 -> 512 -> 256 -> 128",
        "w1 (3x)",
        "finite every time",
        "find_loss_scale",
        "save_checkpoint",
    ):
        assert part in text
    assert len(read_history(tmp_path / "run.jsonl")) == 3
    ms.save_checkpoint(cell, str(tmp_path / "stopped.ckpt"))
    saved = ms.load_checkpoint(str(tmp_path / "stopped.ckpt"))
    assert float(saved["scale_sense"].asnumpy()) == 128.0
    assert all(same_bits(value, saved[name].asnumpy()) for name, value in before.items())


def test_overflows_before_a_resume_count_for_stop_after():
    cell = given_cell(scale=2.0**20)
    for _ in range(2):
        cell(gradient(True))
    monitor = LossScaleMonitor(stop_after=3, progress=False, verbose=False).start(cell, first_step=2)
    with pytest.raises(RuntimeError, match="3 overflows in a row, up to step 3"):
        monitor.step(cell(gradient(True)))


def test_a_bad_loss_inside_a_window_stops_the_run_at_its_end(mode):
    cell = given_cell(accumulate_steps=2)
    monitor = LossScaleMonitor(progress=False, verbose=False).start(cell)
    _, overflow, scale = cell(gradient())
    monitor.step((math.nan, overflow, scale))
    outputs = cell(gradient())
    with pytest.raises(ValueError, match=r"loss of step 2 .*no gradient overflowed"):
        monitor.step(outputs)


def test_the_record_of_a_bad_loss_is_in_the_file_at_once(tmp_path):
    monitor = LossScaleMonitor(tmp_path / "run.jsonl", every=100, progress=False).start()
    monitor.step((0.5, False, 8.0))
    with pytest.raises(ValueError, match="loss of step 2 is nan"):
        monitor.step((math.nan, False, 8.0))
    assert [r["step"] for r in read_history(tmp_path / "run.jsonl")] == [2]
    monitor.close()


def test_a_resumed_loop_counts_on():
    with LossScaleMonitor(progress=False).start(first_step=5) as monitor:
        assert monitor.step((0.5, False, 8.0))["step"] == 6


def test_the_last_record_of_a_run_is_written_when_the_next_begins(tmp_path):
    monitor = LossScaleMonitor(tmp_path / "run.jsonl", every=10, append=True, progress=False)
    for first in (0, 3):
        monitor.start(first_step=first)
        for _ in range(3):
            monitor.step((0.5, False, 8.0))
    monitor.close()
    assert [r["step"] for r in read_history(tmp_path / "run.jsonl")] == [3, 6]


H = Tensor(np.ones((2, 2), np.float32))


@pytest.mark.parametrize("extra", [{"h": H}, None, 3, H])
@pytest.mark.parametrize("scales", [True, False])
def test_what_a_network_returns_beside_its_loss_is_left_alone(scales, extra):
    loss = Tensor(0.5)
    cell = given_cell() if scales else nn.TrainOneStepCell(mlp(), nn.SGD(mlp().trainable_params()))
    outputs = [(loss, False, 512.0, extra)] if scales else [(loss, extra), [loss, extra], {"loss": loss, "h": extra}]
    with LossScaleMonitor(progress=False).start(cell) as monitor:
        for each in outputs:
            record = monitor.step(each)
            assert (record["loss"], record["next_loss_scale"]) == (0.5, 512.0 if scales else 1.0)


def test_stop_after_tells_a_bad_forward_pass(mode):
    cell = poisoned_cell()
    monitor = LossScaleMonitor(stop_after=2, progress=False, verbose=False).start(cell)
    x, y = batch()
    monitor.step(cell(x, y * math.inf, Tensor(np.zeros(4, np.float32))))
    with pytest.raises(RuntimeError, match="inf or nan in 2 of 2: no loss scale can help"):
        monitor.step(cell(x, y * math.inf, Tensor(np.zeros(4, np.float32))))


def test_every_keeps_events_and_the_last_step(mode):
    cell = given_cell(window=100)
    with LossScaleMonitor(every=4, progress=False, verbose=False).start(cell) as monitor:
        for flag in (0, 1, 0, 0, 0, 0):
            monitor.step(cell(gradient(flag)))
    assert [r["step"] for r in monitor.history] == [2, 4, 6]


def test_fit_evaluates_without_closing_the_file(tmp_path):
    x, y = (t.asnumpy() for t in batch())
    data = ds.GeneratorDataset([(x, y)] * 3, ["x", "y"], shuffle=False)
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
    manager = DynamicLossScaleManager()
    model = Model(net, nn.MSELoss(), optimizer, metrics={"loss"}, loss_scale_manager=manager)
    monitor = LossScaleMonitor(tmp_path / "run.jsonl", progress=False)
    model.fit(2, data, data, callbacks=[monitor])
    assert [r["step"] for r in read_history(tmp_path / "run.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_the_bar_shows_loss_scale_and_overflows(capsys):
    cell = given_cell()
    with LossScaleMonitor().start(cell, total_steps=2) as monitor:
        monitor.step(cell(gradient()))
        monitor.step(cell(gradient(True)))
        monitor.write("a line")
    output = capsys.readouterr()
    assert "2/2" in output.err
    assert "scale=512, overflows=1" in output.err
    assert output.out == "step 2: overflow in w0, scale 1024 -> 512\na line\n"


def test_without_tqdm_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(
        ImportError, match=r'pip install "lossscale\[progress\]", or LossScaleMonitor\(progress=False\)'
    ):
        LossScaleMonitor().start()
    LossScaleMonitor(progress=False).start()


@pytest.mark.parametrize(("argument", "error"), [({"stop_after": 0}, ValueError), ({"every": 1.5}, TypeError)])
def test_bad_arguments(argument, error):
    with pytest.raises(error, match=f"'{next(iter(argument))}'"):
        LossScaleMonitor(**argument)


KILLED = """
import os, signal, sys
from lossscale import LossScaleMonitor
monitor = LossScaleMonitor(sys.argv[1], progress=False).start()
for step in range(50):
    monitor.step((1.0 / (step + 1), False, 1024.0))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_killed_process_leaves_a_readable_history(tmp_path):
    path = tmp_path / "run.jsonl"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", KILLED, path], cwd=root, capture_output=True, timeout=120)
    assert done.returncode == -9
    assert [r["loss"] for r in read_history(path)] == [1.0 / (step + 1) for step in range(50)]
