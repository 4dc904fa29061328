import os
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import (
    EMA,
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    build_train_network,
)
from tests import resume_run
from tests.nets import batch, mlp
from tests.oracles import parameters, same_bits

SCALER = {
    "scale_sense",
    "current_iterator_step",
    "last_overflow_iterator_step",
    "consecutive_overflows",
    "total_overflows",
}
OF_STOCK = {"scale_sense", "current_iterator_step", "last_overflow_iterator_step"}


def train_cell(scaled):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    manager = DynamicLossScaleManager(2**10, 2, 100) if scaled else None
    return build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=manager)


def trained(scaled, steps=3):
    """A train cell after some steps; the first one and the last one overflow where the loss is scaled."""
    cell = train_cell(scaled)
    for step in range(steps):
        x, y = batch(seed=step)
        cell(x, y * np.inf if scaled and step in (0, steps - 1) else y)
    return cell


def loaded(cell, path):
    """Load a checkpoint; return the names of the cell's parameters that it lacks, and of its own left over."""
    return tuple(set(names) for names in ms.load_param_into_net(cell, ms.load_checkpoint(str(path))))


def assert_same(a, b, names):
    assert all(same_bits(a[name], b[name]) for name in names)


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("restored", [True, False])
def test_with_and_without_scaling_on_either_side(mode, tmp_path, saved, restored):
    source, target = trained(saved), train_cell(restored)
    fresh = parameters(target)
    ms.save_checkpoint(source, str(tmp_path / "a.ckpt"))
    lacking, unused = loaded(target, tmp_path / "a.ckpt")
    assert lacking == (SCALER if restored and not saved else set())
    before, after = parameters(source), parameters(target)
    assert_same(before, after, set(before) & set(after))
    assert not same_bits(fresh["0.weight"], after["0.weight"])
    assert_same(fresh, after, lacking)
    outputs = target(*batch())
    assert np.isfinite((outputs[0] if restored else outputs).asnumpy())
    assert unused == (SCALER if saved and not restored else set())


def test_a_checkpoint_holds_scale_and_counters(mode, tmp_path):
    ms.save_checkpoint(trained(True, steps=4), str(tmp_path / "a.ckpt"))
    saved = ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    assert {name: float(saved[name].asnumpy()) for name in SCALER} == {
        "scale_sense": 256,
        "current_iterator_step": 5,
        "last_overflow_iterator_step": 4,
        "consecutive_overflows": 1,
        "total_overflows": 2,
    }


def test_a_manager_counts_on_after_a_restore(tmp_path):
    cell = train_cell(True)
    cell.loss_scaling_manager.consecutive_overflows.set_data(Tensor(999, ms.int32))
    ms.save_checkpoint(cell, str(tmp_path / "a.ckpt"))
    net, manager = mlp(), DynamicLossScaleManager()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    restored = build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=manager)
    loaded(restored, tmp_path / "a.ckpt")
    x, y = batch()
    manager.update_loss_scale(bool(restored(x, y * np.inf)[1]))
    assert manager.bad_step == 1000
    assert manager.get_loss_scale() == 512
    restored(x, y * np.inf)
    with pytest.raises(RuntimeError, match="1001 overflows in a row"):
        manager.update_loss_scale(True)


@pytest.mark.parametrize("step_before_load", [False, True])
def test_loading_takes_effect_in_a_compiled_graph(mode, tmp_path, step_before_load):
    ms.save_checkpoint(trained(True), str(tmp_path / "a.ckpt"))
    cell = train_cell(True)
    if step_before_load:
        cell(*batch())
    loaded(cell, tmp_path / "a.ckpt")
    assert float(cell(*batch())[2]) == 256


@pytest.mark.processes
@pytest.mark.parametrize("mode_name", list(resume_run.MODES))
def test_a_run_stopped_anywhere_and_resumed_elsewhere_is_the_unbroken_one(tmp_path, mode_name):
    before = ms.get_context("mode")
    ms.set_context(mode=resume_run.MODES[mode_name])
    try:
        cell = resume_run.new_train_cell()
        ms.save_checkpoint(cell, str(tmp_path / "0.ckpt"))
        outputs = resume_run.train(cell, 0, lambda step: ms.save_checkpoint(cell, str(tmp_path / f"{step}.ckpt")))
    finally:
        ms.set_context(mode=before)
    flags = [bool(output[1]) for output in outputs]
    assert all(flags[step] for step in resume_run.OVERFLOWS)
    assert len({float(output[2]) for output in outputs}) > 2
    root = Path(resume_run.__file__).parents[1]
    command = [sys.executable, "-m", "tests.resume_run", mode_name, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    expected = parameters(cell)
    losses = np.array([output[0] for output in outputs])
    for step in range(resume_run.STEPS):
        assert same_bits(np.load(tmp_path / f"losses_{step}.npy"), losses[step:]), step
        resumed = ms.load_checkpoint(str(tmp_path / f"resumed_{step}.ckpt"))
        assert set(resumed) == set(expected)
        assert_same({name: value.asnumpy() for name, value in resumed.items()}, expected, expected)


def stock_cell(scale_sense):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    return nn.TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, scale_sense)


def our_cell(scale_sense):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    return TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, scale_sense)


def test_a_checkpoint_of_mindspores_dynamic_cell_loads(mode, tmp_path):
    stock = stock_cell(nn.DynamicLossScaleUpdateCell(2**12, 2, 4))
    stock.loss_scaling_manager.cur_iter.set_data(Tensor(9, ms.int32))
    stock.loss_scaling_manager.last_overflow_iter.set_data(Tensor(5, ms.int32))
    ms.save_checkpoint(stock, str(tmp_path / "a.ckpt"))
    ours = our_cell(DynamicLossScaleUpdateCell(2.0, 2, 4))
    assert loaded(ours, tmp_path / "a.ckpt") == (SCALER - OF_STOCK, set())
    assert_same(parameters(stock), parameters(ours), parameters(stock))
    assert float(ours(*batch())[2]) == 2**13  # the fourth clean step since step 5
    assert int(ours.loss_scaling_manager.cur_iter) == 10


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_checkpoint_of_mindspores_tensor_cell_loads(mode, tmp_path, shape, dynamic):
    stock = stock_cell(Tensor(np.full(shape, 64.0, np.float32)))
    ms.save_checkpoint(stock, str(tmp_path / "a.ckpt"))
    ours = our_cell(DynamicLossScaleUpdateCell(2.0, 2, 1) if dynamic else Tensor(2.0))
    assert loaded(ours, tmp_path / "a.ckpt")[1] == set()
    loss, overflow, scale = ours(*batch())
    assert np.isfinite(float(loss))
    assert not bool(overflow)
    assert float(scale.asnumpy().reshape(())) == (128 if dynamic else 64)


def test_mindspores_cell_loads_ours(tmp_path):
    ms.save_checkpoint(trained(True), str(tmp_path / "a.ckpt"))
    stock = stock_cell(nn.DynamicLossScaleUpdateCell(2.0, 2, 4))
    lacking, _ = loaded(stock, tmp_path / "a.ckpt")
    assert lacking == set()
    assert float(stock.scale_sense) == 256


def resumable(accumulate_steps=1):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    return TrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nn.MSELoss()),
        optimizer,
        DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        accumulate_steps=accumulate_steps,
        ema=EMA(0.9),
    )


@pytest.mark.parametrize("accumulate_steps", [1, 3])
def test_a_cell_that_has_stepped_resumes_to_the_bit(mode, tmp_path, accumulate_steps):
    cell = resumable(accumulate_steps)
    for step in range(4):
        cell(*batch(seed=step))
    ms.save_checkpoint(cell, str(tmp_path / "a.ckpt"))
    expected = [[value.asnumpy() for value in cell(*batch(seed=step))] for step in range(4, 10)]
    end = parameters(cell)
    saved = ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    kept = {name: value.asnumpy().copy() for name, value in saved.items()}
    for _ in range(2):  # and once more
        ms.load_param_into_net(cell, saved)
        again = [[value.asnumpy() for value in cell(*batch(seed=step))] for step in range(4, 10)]
        assert all(same_bits(a, b) for x, y in zip(expected, again) for a, b in zip(x, y))
        assert_same(end, parameters(cell), end)
        assert_same(kept, {name: value.asnumpy() for name, value in saved.items()}, kept)


def test_one_weight_that_was_set_is_trained_on(mode):
    cell = resumable()
    cell(*batch())
    cell.weights[0].set_data(Tensor(np.ones(cell.weights[0].shape, np.float32)))
    cell(*batch())
    moved = cell.weights[0].asnumpy()
    assert moved.any() and not (moved == 1).all() and np.abs(moved - 1).max() < 0.5


def test_the_keys_of_a_checkpoint_stay(tmp_path):
    cell = resumable(2)
    ms.save_checkpoint(cell, str(tmp_path / "a.ckpt"))
    weights = ["0.weight", "0.bias", "2.weight", "2.bias"]
    keys = [
        *weights,
        "scale_sense",
        "global_step",
        "learning_rate",
        "momentum",
        "accu_step",
        "accu_steps",
        "ema.updates",
    ]
    keys += [f"{prefix}.{weight}" for prefix in ("moments", "accu_grads", "ema") for weight in weights]
    keys += [name for name in SCALER if name != "scale_sense"]
    assert sorted(ms.load_checkpoint(str(tmp_path / "a.ckpt"))) == sorted(keys)
