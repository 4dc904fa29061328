"""`fast_convolutions`: it limits oneDNN where that helps, leaves everything else alone, and says why."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lossscale import convolutions
from lossscale.convolutions import fast_convolutions

ROOT = Path(__file__).parents[2]
HAS_AVX512 = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
needs_avx512 = pytest.mark.skipif(not HAS_AVX512, reason="nothing to gain on this processor")

GRADIENTS = """
import os, sys
import mindspore as ms, numpy as np
from mindspore import Tensor, nn
import lossscale
assert "ONEDNN_MAX_CPU_ISA" not in os.environ
if sys.argv[2] == "early":
    print(lossscale.fast_convolutions().on, os.environ.get("ONEDNN_MAX_CPU_ISA"))
rng = np.random.default_rng(0)
ms.set_seed(1)
net = nn.Conv2d(8, 8, 3, weight_init=Tensor(rng.standard_normal((8, 8, 3, 3)).astype(np.float32)))
x = Tensor(rng.standard_normal((2, 8, 14, 14)).astype(np.float32))
grads = ms.grad(lambda x: (net(x) ** 2).mean(), 0, net.trainable_params())(x)
np.savez(sys.argv[1], grads[0].asnumpy(), grads[1][0].asnumpy())
if sys.argv[2] == "late":
    print(lossscale.fast_convolutions().reason, os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


def gradients(folder, when):
    script, result = folder / "script.py", folder / f"{when}.npz"
    script.write_text(GRADIENTS, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, str(script), str(result), when]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip().splitlines()[-1], list(np.load(result).values())


@needs_avx512
@pytest.mark.processes
def test_gradients_are_the_same_and_an_operator_that_has_run_is_too_late(tmp_path):
    said_early, early = gradients(tmp_path, "early")
    said_late, late = gradients(tmp_path, "late")
    assert said_early == "True AVX2"
    assert "has run already" in said_late
    assert said_late.endswith("None")
    for a, b in zip(early, late):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize(("value", "on"), [("avx2", True), ("AVX512_CORE", False)])
def test_what_the_user_set_stays(monkeypatch, value, on):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
    assert fast_convolutions() == (on, f"The environment sets ONEDNN_MAX_CPU_ISA={value}.")
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == value


class Library:
    """Stands for oneDNN; it answers with `status`."""

    def __init__(self, status):
        self.status, self.asked = status, []

    def dnnl_set_max_cpu_isa(self, isa):
        self.asked.append(isa.value)
        return self.status


@pytest.mark.parametrize(("status", "on"), [(0, True), (2, False)])
def test_it_says_whether_onednn_took_it(monkeypatch, status, on):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    library = Library(status)
    monkeypatch.setattr(convolutions, "_why_not", lambda: "")
    monkeypatch.setattr(convolutions, "_onednn", lambda: library)
    assert fast_convolutions().on is on
    assert library.asked == [0x7]
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == ("AVX2" if on else "")


@pytest.mark.parametrize(
    ("device", "system", "machine", "words"),
    [
        ("Ascend", "Linux", "x86_64", "The device is Ascend."),
        ("CPU", "Linux", "aarch64", "Linux aarch64"),
        ("CPU", "Darwin", "x86_64", "Darwin"),
    ],
)
def test_where_there_is_nothing_to_gain_it_does_nothing(monkeypatch, device, system, machine, words):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setattr(convolutions.ms, "get_context", lambda name: device)
    monkeypatch.setattr(convolutions.platform, "system", lambda: system)
    monkeypatch.setattr(convolutions.platform, "machine", lambda: machine)
    monkeypatch.setattr(convolutions, "_onednn", lambda: pytest.fail("asked oneDNN"))
    on, reason = fast_convolutions()
    assert (on, os.environ["ONEDNN_MAX_CPU_ISA"]) == (False, "")
    assert words in reason


def test_a_mindspore_without_the_library_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    monkeypatch.setattr(convolutions, "_why_not", lambda: "")
    monkeypatch.setattr(convolutions.ms, "__file__", str(tmp_path / "__init__.py"))
    assert fast_convolutions() == (False, "This MindSpore brings no oneDNN library that can be limited.")
