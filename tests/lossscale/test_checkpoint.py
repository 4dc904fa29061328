"""`save_train_state` and `load_train_state`: whole or not at all, and errors that name file and key."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import lossscale.checkpoint
from lossscale import DynamicLossScaleManager, build_train_network, load_train_state, save_train_state
from tests.nets import batch, mlp
from tests.oracles import parameters, same_bits


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


@pytest.mark.parametrize(("step", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)])
def test_a_wrong_step_is_refused(tmp_path, step, error):
    with pytest.raises(error, match="'step'"):
        save_train_state(tmp_path, train_cell(), step)


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
