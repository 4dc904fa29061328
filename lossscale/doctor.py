"""`lossscale doctor`: versions, device, which finite check runs, and a self-test."""

import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import lossscale
from lossscale.convolutions import compare_convolutions

_KINDS = {
    "native": "native kernel, all gradients in one op and one pass",
    "plain": "plain MindSpore ops (sum, and isfinite where the sum is not finite)",
}


def doctor() -> int:
    """Print what the installation is made of, and whether it works."""
    problems = []
    print(f"lossscale   {lossscale.__version__} ({Path(lossscale.__file__).parent})")
    print(f"Python      {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"MindSpore   {ms.__version__}")
    print(f"numpy       {np.__version__}")
    if int(np.__version__.split(".")[0]) >= 2:
        problems.append('numpy 2 breaks operators of MindSpore on CPU: pip install "numpy<2"')
    device = ms.get_context("device_target")
    print(f"device      {device}")
    try:
        kind = lossscale.backend()
        print(f"check       {_KINDS[kind] if device == 'CPU' else 'that of MindSpore for ' + device}")
        print(f"self-test   {_self_test_of(device)}")
        if device == "CPU":
            print(f"convolution {_convolution_advice()}")
    except Exception as error:  # whatever is broken is what the doctor was called for
        problems.append(f"{type(error).__name__}: {error}")
    for problem in problems:
        print(f"problem     {problem}")
    print("all is well" if not problems else f"{len(problems)} problem{'s' if len(problems) > 1 else ''} found")
    return 1 if problems else 0


def _self_test_of(device: str) -> str:
    """Run the self-test where it can be run. Off CPU in a process of its own, which a missing driver may end."""
    if device == "CPU":
        return self_test()
    if os.environ.get("MS_SIMULATION_LEVEL"):
        return "not run: this is MindSpore's dry run (MS_SIMULATION_LEVEL), which compiles graphs and runs none"
    done = subprocess.run([sys.executable, "-m", "lossscale.doctor"], capture_output=True, text=True, check=False)
    if "RuntimeError: The self-test" in done.stderr:
        raise RuntimeError(done.stderr.partition("RuntimeError: ")[2].strip())
    if done.returncode:
        return f"could not be run: a step on {device} ended the process with code {done.returncode}"
    return done.stdout.strip().splitlines()[-1]


def _convolution_advice() -> str:
    """Measure a small convolution as it is and limited to AVX2, and say what to do."""
    as_it_is, limited = compare_convolutions()
    times = f"{as_it_is:.0f} ms a step, {limited:.0f} ms limited to AVX2"
    if as_it_is < 2 * limited:
        return f"{times}: nothing to gain"
    return f"{times}: call lossscale.fast_convolutions() first, or set ONEDNN_MAX_CPU_ISA=AVX2"


def self_test() -> str:
    """Train two steps in each mode, one with inf; RuntimeError if the step, the scale or the culprits are wrong."""
    before = ms.get_context("mode")
    start = time.monotonic()
    try:
        for mode, name in ((ms.GRAPH_MODE, "GRAPH_MODE"), (ms.PYNATIVE_MODE, "PYNATIVE_MODE")):
            ms.set_context(mode=mode)
            _train_two_steps(name)
    finally:
        ms.set_context(mode=before)
    return f"passed in {time.monotonic() - start:.1f} s: overflow found and skipped, scale halved, culprits named"


def _train_two_steps(mode: str) -> None:
    network = nn.Dense(4, 1)
    optimizer = nn.Momentum(network.trainable_params(), learning_rate=0.1, momentum=0.9)
    update = lossscale.DynamicLossScaleUpdateCell(1024.0, 2, 100)
    train_cell = lossscale.TrainOneStepWithLossScaleCell(nn.WithLossCell(network, nn.MSELoss()), optimizer, update)
    good, target = Tensor(np.ones((2, 4), np.float32)), Tensor(np.zeros((2, 1), np.float32))
    _, overflow, scale = train_cell(good, target)
    trained = network.weight.asnumpy().copy()
    clean = (bool(overflow), float(scale), train_cell.nonfinite_parameters())
    _, overflow, scale = train_cell(good * np.inf, target)
    bad = (bool(overflow), float(scale), train_cell.nonfinite_parameters())
    names = [weight.name for weight in train_cell.weights]
    if clean != (False, 1024.0, []) or bad != (True, 512.0, names):
        raise RuntimeError(f"The self-test in {mode} went wrong: a clean step gave {clean}, one with inf {bad}.")
    if not np.array_equal(trained, network.weight.asnumpy()):
        raise RuntimeError(f"The self-test in {mode} went wrong: a step with inf moved the weights.")


if __name__ == "__main__":
    print(self_test())
