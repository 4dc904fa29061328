"""`save_train_state` and `load_train_state`: whole or not at all, and errors that name file and key."""

import os
import platform
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import lossscale.checkpoint
from lossscale import (
    DynamicLossScaleManager,
    TrainOneStepWithLossScaleCell,
    build_train_network,
    load_train_state,
    save_train_state,
)
from tests.fixtures import train_cells
from tests.nets import batch, mlp
from tests.oracles import parameters, same_bits

FIXTURES = Path(train_cells.__file__).parent


def train_cell(hidden=16, scaled=True):
    net = mlp(hidden=hidden)
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    manager = DynamicLossScaleManager(2**10, 2, 3) if scaled else None
    return build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=manager)


def take(cell, first, last):
    for step in range(first, last):
        x, y = batch(seed=step)
        cell(x, y * np.inf if step == 1 else y)


def all_same(a, b):
    return set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a)


def test_resume_is_bit_identical(mode, tmp_path):
    cell = train_cell()
    take(cell, 0, 3)
    save_train_state(tmp_path, cell, 3)
    take(cell, 3, 8)
    resumed = train_cell()
    assert load_train_state(tmp_path, resumed) == 3
    take(resumed, 3, 8)
    assert all_same(parameters(cell), parameters(resumed))


def test_a_cell_that_has_stepped_goes_back(mode, tmp_path):
    cell = train_cell()
    take(cell, 0, 3)
    save_train_state(tmp_path, cell, 3)
    take(cell, 3, 8)
    expected = parameters(cell)
    for _ in range(2):
        load_train_state(tmp_path, cell)
        take(cell, 3, 8)
        assert all_same(parameters(cell), expected)


def test_the_previous_one_is_kept_and_older_ones_go(tmp_path):
    cell = train_cell()
    for step in (1, 2, 3):
        save_train_state(tmp_path, cell, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000002.ckpt", "step_0000000003.ckpt"]
    assert load_train_state(tmp_path, cell, step=2) == 2


def test_saving_the_same_step_again_replaces_it(tmp_path):
    cell = train_cell()
    save_train_state(tmp_path, cell, 1)
    take(cell, 0, 1)
    save_train_state(tmp_path, cell, 1)
    fresh = train_cell()
    load_train_state(tmp_path, fresh)
    assert all_same(parameters(cell), parameters(fresh))


def test_nothing_saved_is_step_0(tmp_path):
    cell = train_cell()
    before = parameters(cell)
    assert load_train_state(tmp_path / "none", cell) == 0
    assert all_same(before, parameters(cell))


def refused(folder, cell, error, *words, **options):
    before = parameters(cell)
    with pytest.raises(error) as caught:
        load_train_state(folder, cell, **options)
    assert all(word in str(caught.value) for word in words), caught.value
    assert all_same(before, parameters(cell))


def test_a_missing_step_is_named(tmp_path):
    save_train_state(tmp_path, train_cell(), 1)
    refused(tmp_path, train_cell(), FileNotFoundError, "step_0000000002.ckpt", "[1]", step=2)


def test_a_file_cut_off_anywhere_is_refused(tmp_path):
    path = save_train_state(tmp_path, train_cell(), 1)
    content = path.read_bytes()
    cell = train_cell()
    path.chmod(0o600)
    for length in [*range(0, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:length])
        refused(tmp_path, cell, ValueError, str(path), "cut off")
    path.write_bytes(content)
    assert load_train_state(tmp_path, cell) == 1


def test_the_key_at_which_a_file_is_cut_off_is_named(tmp_path):
    path = save_train_state(tmp_path, train_cell(), 1)
    content = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(content[: content.index(b"moments.2.weight") + 60])
    refused(tmp_path, train_cell(), ValueError, str(path), "'moments.2.weight'")


def test_a_changed_byte_is_refused(tmp_path):
    path = save_train_state(tmp_path, train_cell(), 1)
    content = bytearray(path.read_bytes())
    content[content.index(b"moments.2.weight") + 60] ^= 1
    path.chmod(0o600)
    path.write_bytes(content)
    refused(tmp_path, train_cell(), ValueError, str(path), "damaged")


def test_checkpoints_of_other_train_cells_are_refused(tmp_path):
    path = save_train_state(tmp_path, train_cell(hidden=32), 1)
    refused(tmp_path, train_cell(), ValueError, str(path), "0.weight", "(32, 8)", "(16, 8)")
    refused(tmp_path, train_cell(scaled=False), ValueError, str(path), "scale_sense")
    path = save_train_state(tmp_path / "unscaled", train_cell(scaled=False), 1)
    refused(tmp_path / "unscaled", train_cell(), ValueError, str(path), "scale_sense", "total_overflows")


def test_a_renamed_and_a_plain_checkpoint_are_refused(tmp_path):
    path = save_train_state(tmp_path, train_cell(), 1)
    path.rename(tmp_path / "step_0000000007.ckpt")
    refused(tmp_path, train_cell(), ValueError, "step_0000000007.ckpt", "train_state_step", "1")
    plain = tmp_path / "step_0000000009.ckpt"
    ms.save_checkpoint(train_cell(), str(plain), crc_check=True)
    refused(tmp_path, train_cell(), ValueError, str(plain), "train_state_step")


BAD_STEPS = [(0, ValueError), (-1, ValueError), (2**63, ValueError), (1.5, TypeError), ("3", TypeError)]


@pytest.mark.parametrize(("step", "error"), [*BAD_STEPS, (True, TypeError)])
def test_a_wrong_step_is_refused(tmp_path, step, error):
    cell = train_cell()
    with pytest.raises(error, match="'step'"):
        save_train_state(tmp_path, cell, step)
    refused(tmp_path, cell, error, "'step'", step=step)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("function", [save_train_state, load_train_state])
def test_wrong_arguments_are_named(tmp_path, function):
    cell, a_file = train_cell(), tmp_path / "file"
    a_file.write_text("")
    for bad in (None, nn.TrainOneStepCell, 3):
        with pytest.raises(TypeError, match="'train_cell' must be a Cell"):
            function(tmp_path, bad, step=1)
        with pytest.raises(TypeError, match="'folder' must be a path"):
            function(bad, cell, step=1)
    with pytest.raises(NotADirectoryError, match=f"'folder' must be a folder, but {a_file} is a file"):
        function(a_file, cell, step=1)
    for keep, error in ((0, ValueError), (-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="'keep'"):
            save_train_state(tmp_path, cell, 1, keep=keep)
    assert list(tmp_path.iterdir()) == [a_file]


def test_steps_of_any_length_are_found(tmp_path):
    cell = train_cell()
    steps = (9, 10**10, 2**40, 2**63 - 1)
    for step in steps:
        save_train_state(tmp_path, cell, step, keep=9)
        assert load_train_state(tmp_path, cell) == step
    assert [load_train_state(tmp_path, cell, step=step) for step in steps] == list(steps)


def test_ranks_agree_on_steps_of_any_length(tmp_path, monkeypatch):
    cell, offered = train_cell(), []
    monkeypatch.setattr(lossscale.checkpoint, "world_size", lambda: 2)
    monkeypatch.setattr(
        lossscale.checkpoint, "gather", lambda own: np.stack([*offered[:1], offered.append(own) or own])
    )
    for number, steps in enumerate([(7, 2**31 - 1, 2**31, 2**40 + 2**31 - 1), (7, 2**31, 2**40)]):
        monkeypatch.setattr(lossscale.checkpoint, "rank", lambda number=number: number)
        for step in steps:
            save_train_state(tmp_path, cell, step, keep=9)
        assert load_train_state(tmp_path, cell) == (steps[-1], 2**31)[number]  # alone, and with the first
    assert {values.dtype for values in offered} == {np.dtype(np.int32)}


def test_a_folder_named_like_a_checkpoint_is_none(tmp_path):
    cell = train_cell()
    save_train_state(tmp_path, cell, 1)
    (tmp_path / "step_0000000002.ckpt").mkdir()
    assert load_train_state(tmp_path, cell) == 1
    refused(tmp_path, cell, FileNotFoundError, "step_0000000002.ckpt", "[1]", step=2)
    with pytest.raises(OSError, match=r"step_0000000002\.ckpt could not be written"):
        save_train_state(tmp_path, cell, 2)
    save_train_state(tmp_path, cell, 3, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_0000000002.ckpt", "step_0000000003.ckpt"]


@pytest.mark.parametrize(
    "content", [b"\xff" * 600_000, b"\x0a" + b"\xff" * 600_000, bytes(20_000_000), b"\x0a\x00" * 10_000_000]
)
def test_a_large_file_of_rubbish_is_refused_at_once(tmp_path, content):
    (tmp_path / "step_0000000001.ckpt").write_bytes(content)
    cell, start = train_cell(), time.process_time()
    refused(tmp_path, cell, ValueError, "step_0000000001.ckpt", "cut off at")
    assert time.process_time() - start < 1


def test_a_dtype_is_not_cast(tmp_path):
    cell = train_cell()
    cell.optimizer.moments[0].set_dtype(ms.float64)
    path = save_train_state(tmp_path, cell, 1)
    refused(tmp_path, train_cell(), ValueError, str(path), "moments.0.weight", "Float64", "Float32")


def test_savers_in_one_folder_leave_each_other_alone(tmp_path):
    """What another process that still runs is writing stays, and its checkpoints of later steps."""
    cell = train_cell()
    names = f"step_0000000009.{platform.node()}-{os.getppid()}.partial", "step_0000000009.elsewhere-1.partial"
    others = {f"{name}.{ending}" for name in names for ending in ("tmp", "ckpt")}
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    for name in (*others, f"step_0000000009.{platform.node()}-{dead.pid}.partial.ckpt", "step_0000000009.partial.ckpt"):
        (tmp_path / name).write_text("")
    for step in (90, 100, 5):
        save_train_state(tmp_path, cell, step)
    saved = {f"step_{step:010d}.ckpt" for step in (5, 90, 100)}
    assert {path.name for path in tmp_path.iterdir()} == others | saved


def test_the_order_of_a_save(tmp_path, monkeypatch):
    """Written, on the disk, renamed, the folder on the disk, and only then the old one removed."""
    cell, order = train_cell(), []
    old = save_train_state(tmp_path, cell, 1, keep=1)
    opened = {}
    real = {"open": os.open, "fsync": os.fsync, "replace": os.replace, "unlink": Path.unlink}

    def note_open(path, *args, **options):
        handle = real["open"](path, *args, **options)
        opened[handle] = Path(path)
        return handle

    def note_fsync(handle):
        order.append(("fsync", "folder" if opened[handle] == tmp_path else opened[handle].suffixes[-2]))
        real["fsync"](handle)

    def note_replace(source, target):
        order.append(("replace", Path(target).name))
        real["replace"](source, target)

    def note_unlink(path, **options):
        order.append(("unlink", path.name))
        real["unlink"](path, **options)

    monkeypatch.setattr(os, "open", note_open)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(Path, "unlink", note_unlink)
    new = save_train_state(tmp_path, cell, 2, keep=1)
    assert order[-4:] == [("fsync", ".partial"), ("replace", new.name), ("fsync", "folder"), ("unlink", old.name)]
    assert ("unlink", old.name) not in order[:-1]


@pytest.mark.parametrize("kind", ["plain", "window", "fused"])
def test_checkpoints_of_0_1_0_load_and_train_on(mode, kind):
    folder = FIXTURES / "0.1.0" / kind
    cell = train_cells.train_cell(kind)
    assert load_train_state(folder, cell) == 3
    train_cells.take(cell, range(3, 6))
    with np.load(folder / "step_6.npz") as expected:
        after = parameters(cell)
        assert set(expected) <= set(after)
        for name in expected:
            np.testing.assert_allclose(after[name], expected[name], rtol=2e-5, atol=1e-6, err_msg=name)
        assert float(after["scale_sense"]) == float(expected["scale_sense"]) > 0


def accumulating(steps):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    loss = nn.WithLossCell(net, nn.MSELoss())
    return TrainOneStepWithLossScaleCell(loss, optimizer, ms.Tensor(2.0**10), accumulate_steps=steps)


@pytest.mark.parametrize("stepped", [False, True])
def test_another_window_is_refused_before_anything_is_loaded(mode, tmp_path, stepped):
    saved, cell = accumulating(3), accumulating(2)
    take(saved, 0, 4)
    save_train_state(tmp_path, saved, 4)
    take(cell, 0, 3 if stepped else 0)
    before = parameters(cell)
    with pytest.raises(ValueError, match="accumulate_steps=3"):
        load_train_state(tmp_path, cell)
    assert all_same(parameters(cell), before)
    take(saved, 4, 6)
    save_train_state(tmp_path, saved, 6)
    load_train_state(tmp_path, cell)
    take(cell, 6, 8)
    assert int(cell.accumulator.step) == 0 and int(cell.accumulator.steps) == 2


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
    cell = train_cell()
    path = save_train_state(tmp_path, cell, 1)
    content = path.read_bytes()
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(content) // 2, limits[1]))
    try:
        with pytest.raises(OSError, match=r"step_0000000002\.ckpt could not be written"):
            save_train_state(tmp_path, cell, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == content
    assert load_train_state(tmp_path, cell) == 1


KILLED = """
import os, signal, sys
import mindspore.train.serialization as serialization
from tests.lossscale.test_checkpoint import train_cell, take
from lossscale import save_train_state
import lossscale.checkpoint as checkpoint

folder, moment = sys.argv[1:]
cell = train_cell()
save_train_state(folder, cell, 1)
take(cell, 0, 1)

def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "write":
    write, count = serialization._write_parameter_bytes_data, [0]
    def write_three(*args, **kwargs):
        count[0] += 1
        return die() if count[0] > 3 else write(*args, **kwargs)
    serialization._write_parameter_bytes_data = write_three
elif moment == "rename":
    os.replace = die
else:
    checkpoint._remove_partial = die
save_train_state(folder, cell, 2)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("moment", "step"), [("write", 1), ("rename", 1), ("clean", 2)])
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path, moment, step):
    root = Path(lossscale.checkpoint.__file__).parents[1]
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    cell = train_cell()
    assert load_train_state(tmp_path, cell) == step
    save_train_state(tmp_path, cell, 3)
    assert not list(tmp_path.glob("*partial*"))
