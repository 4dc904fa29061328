"""Each example runs in a process of its own, in short form, and ends in what it promises."""

import gzip
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, nn

from examples.custom_train_step import CentralizedStep
from lossscale import ClipByGlobalNorm, DynamicLossScaleUpdateCell
from tests.nets import GradientsAsGiven

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.processes


def run(*arguments, code=0):
    """Run Python in the project's folder; return what it printed (stderr, where the exit code is not 0)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stderr if code else done.stdout


def last_line(output):
    """Return the values of a last line `name=value name=value`."""
    return {
        name: float(value)
        for name, value in re.findall(r"(\w+)=([\d.]+)", output.split("pictures:")[0].splitlines()[-1])
    }


def test_lenet_reaches_the_accuracy_and_its_scale_settles():
    output = run("-m", "examples.lenet")
    scales = [float(scale) for scale in re.findall(r"^epoch.*loss_scale=(\d+)", output, re.M)]
    result = last_line(output)
    assert result["accuracy"] >= 0.97
    assert result["steps"] == 15 * 44
    assert result["overflows"] >= 3
    assert result["loss_scale"] == 2**24 / 2 ** result["overflows"]  # no growth in fewer than 2000 steps
    assert len(scales) == 15
    assert scales[-1] == scales[-5] == result["loss_scale"]
    pictures = output.splitlines()[-1].removeprefix("pictures: ").split(", ")
    assert pictures == ["out/lenet_history.png", "out/lenet_gradients.png"]
    assert all((ROOT / picture).stat().st_size > 10_000 for picture in pictures)


@pytest.mark.parametrize(
    ("options", "loss_scale"),
    [
        pytest.param(["--manager", "fixed", "--amp-level", "O3"], 1024, marks=pytest.mark.slow),
        (["--manager", "fixed-keep"], 1024),
        pytest.param(["--manager", "none", "--amp-level", "O0", "--batch-size", "64"], 1, marks=pytest.mark.slow),
    ],
)
def test_lenet_options(options, loss_scale):
    result = last_line(run("examples/lenet.py", "--epochs", "2", "--seed", "2", *options))
    assert result["loss_scale"] == loss_scale
    assert result["overflows"] == 0
    assert result["accuracy"] > 0.4


@pytest.mark.slow
def test_lenet_in_pynative_mode():
    result = last_line(run("examples/lenet.py", "--epochs", "1", "--mode", "PYNATIVE", "--batch-size", "128"))
    assert result["steps"] == 11
    assert 0 < result["loss_scale"] < 2**24


def idx(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def mnist_folder(tmp_path):
    for name, count in (("train", 128), ("t10k", 64)):
        images = np.random.randint(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = np.random.randint(0, 10, count).astype(np.uint8)
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    return tmp_path


def test_lenet_reads_a_folder_of_mnist_files(mnist_folder):
    assert last_line(run("examples/lenet.py", "--data-dir", mnist_folder, "--epochs", "1"))["steps"] == 4


def test_lenet_names_a_missing_file(mnist_folder):
    (mnist_folder / "t10k-images-idx3-ubyte").unlink()
    message = run("examples/lenet.py", "--data-dir", mnist_folder, code=1)
    assert f"{mnist_folder}/t10k-images-idx3-ubyte is missing" in message
    assert "Traceback" not in message


BROKEN = [b"", b"not an idx file", idx(np.zeros((3, 28, 28), np.uint8))[:-1]]


@pytest.mark.parametrize("content", [*[pytest.param(each, marks=pytest.mark.slow) for each in BROKEN[:2]], BROKEN[2]])
def test_lenet_names_a_broken_file(mnist_folder, content):
    broken = mnist_folder / "train-images-idx3-ubyte"
    broken.write_bytes(content)
    message = run("examples/lenet.py", "--data-dir", mnist_folder, code=1)
    assert f"{broken} is not a whole MNIST idx file" in message
    assert "Traceback" not in message


def test_custom_train_step():
    output = run("examples/custom_train_step.py", "--epochs", "3")
    assert "largest difference of the weights, loop against Model: 0.0\n" in output
    assert last_line(output)["accuracy"] > 0.85
    assert float(re.search(r"with centralized gradients: accuracy=([\d.]+)", output).group(1)) > 0.85


def test_the_stage_of_ones_own_gets_clipped_gradients_of_clean_steps(mode):
    net = GradientsAsGiven([np.zeros((2, 3), np.float32), np.zeros(3, np.float32)])
    update = DynamicLossScaleUpdateCell(64.0, 2, 100)
    step = CentralizedStep(net, nn.SGD(list(net.w), 1.0), update, clip_grad=ClipByGlobalNorm(1.0))
    grads = [np.float32([[3, 0, 0], [0, 2, 4]]), np.float32([1, 1, 2])]
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    for poison, moved in ((np.inf, 0.0), (0.0, 1.0)):
        step(Tensor(grads[0] + np.float32(poison)), Tensor(grads[1]))
        for got, want in zip(net.w, (grads[0] - grads[0].mean(axis=1, keepdims=True), grads[1])):
            np.testing.assert_allclose(got.asnumpy(), -moved * want / norm, rtol=1e-5, atol=1e-6)
    assert update.get_loss_scale() == 32.0


def test_mixed_precision():
    output = run("examples/mixed_precision.py", "--epochs", "3")
    assert len(re.findall("at a scale of 2\\*\\*40: overflow=True, weights unchanged=True", output)) == 2
    assert all(float(accuracy) > 0.6 for accuracy in re.findall(r"accuracy=([\d.]+)", output))


def test_resume():
    output = run("examples/resume.py", "--steps", "40")
    assert "not in the checkpoint: []; not in the train cell: []" in output
    assert output.endswith("outputs identical=True parameters identical=True\n")
