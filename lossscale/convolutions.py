"""Convolutions on CPUs with AVX-512: why they are slow in MindSpore, and the one setting that mends it."""

import ctypes
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple, Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

_VARIABLE = "ONEDNN_MAX_CPU_ISA"
_AVX2 = 0x7  # dnnl_cpu_isa_avx2


class FastConvolutions(NamedTuple):
    """What `fast_convolutions` did.

    Attributes:
        on: whether convolutions run by oneDNN's AVX2 code from now on.
        reason: one sentence that says why, or why not.

    Examples:
        >>> from lossscale import fast_convolutions
        >>> isinstance(fast_convolutions().reason, str)
        True
    """

    on: bool
    reason: str


def fast_convolutions() -> FastConvolutions:
    """Make MindSpore's convolutions on CPU take fast code where they would take reference code.

    On CPUs with AVX-512, the oneDNN in MindSpore 2.10 takes reference code for the gradients of a convolution in
    MindSpore's layout, 10 to 40 times slower than the AVX2 code of the same library (``ONEDNN_VERBOSE=1`` shows
    ``jit_uni_ncsp:conv+ref:any``); 2.7 is hardly slower. This function limits oneDNN to AVX2, as the environment
    variable ``ONEDNN_MAX_CPU_ISA=AVX2`` does for a whole process and for those that it starts. Results stay within
    float32 rounding; networks without convolutions are as fast as before.

    Call it after ``import mindspore`` and before the first operator runs. It does nothing, and says why, on another
    device or processor, where the user has set the variable, and where oneDNN has already chosen.
    `import lossscale` never calls it.

    Returns:
        `FastConvolutions`, a tuple (on, reason).

    Examples:
        >>> from lossscale import fast_convolutions
        >>> on, reason = fast_convolutions()
    """
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return FastConvolutions(chosen.upper() == "AVX2", f"The environment sets {_VARIABLE}={chosen}.")
    reason = _why_not()
    if reason:
        return FastConvolutions(False, reason)
    library = _onednn()
    if library is None:
        return FastConvolutions(False, "This MindSpore brings no oneDNN library that can be limited.")
    if library.dnnl_set_max_cpu_isa(ctypes.c_int(_AVX2)) != 0:
        return FastConvolutions(
            False, f"An operator has run already. Call this earlier, or start Python with {_VARIABLE}=AVX2."
        )
    os.environ[_VARIABLE] = "AVX2"  # for processes that this one starts
    return FastConvolutions(True, "oneDNN is limited to AVX2, which has fast code for the gradients of convolutions.")


def _why_not() -> str:
    """Return why this machine has nothing to gain, or an empty text."""
    device = ms.get_context("device_target")
    if device != "CPU":
        return f"The device is {device}."
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"The platform is {platform.system()} {platform.machine()}, not Linux x86_64."
    if "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8").split():
        return "The processor has no AVX-512."
    return ""


def _onednn() -> Optional[ctypes.CDLL]:
    """Return the oneDNN library that MindSpore has loaded, or None."""
    paths = sorted((Path(ms.__file__).parent / "lib").glob("libdnnl.so*"))
    try:
        library = ctypes.CDLL(str(paths[0]))
        return library if hasattr(library, "dnnl_set_max_cpu_isa") else None
    except (IndexError, OSError):
        return None


def compare_convolutions() -> tuple[float, float]:
    """Return the milliseconds of a small convolution's training step as it is, and limited to AVX2.

    Each is measured in a process of its own, some seconds in all.

    Raises:
        RuntimeError: if a process failed.
    """
    found = []
    for isa in (None, "AVX2"):
        environment = {name: value for name, value in os.environ.items() if name != _VARIABLE}
        if isa:
            environment[_VARIABLE] = isa
        command = [sys.executable, "-m", "lossscale.convolutions"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"A convolution could not be measured: {done.stderr.strip()[-300:]}")
        found.append(float(done.stdout.split()[-1]))
    return found[0], found[1]


def _milliseconds_of_a_step() -> float:
    """Return the time of a training step of one convolution, 3 x 3, 16 to 16 channels, 28 x 28, batch 8."""
    network = nn.Conv2d(16, 16, 3)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    step = nn.TrainOneStepCell(nn.WithLossCell(network, nn.MSELoss()), optimizer).set_train()
    x = Tensor(np.ones((8, 16, 28, 28), np.float32))
    best = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        step(x, x).asnumpy()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


if __name__ == "__main__":
    print(_milliseconds_of_a_step())
