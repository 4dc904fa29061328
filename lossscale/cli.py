"""The command line: `lossscale doctor` looks at the installation, `lossscale report` at the history of a run."""

import argparse
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

import lossscale
from lossscale.figures import checked_picture
from lossscale.monitor import plot_history, read_history, summarize
from lossscale.run import add_run_parser, run_script

_KINDS = {
    "native": "native kernel, all gradients in one op and one pass",
    "plain": "plain MindSpore ops (sum, and isfinite where the sum is not finite)",
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command line; return its exit code: 0, 1 for a problem found. Wrong usage exits with 2."""
    parser = argparse.ArgumentParser(prog="lossscale", description="Loss scaling for MindSpore: look at it.")
    parser.add_argument("--version", action="version", version=f"lossscale {lossscale.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "doctor",
        help="versions, device, which finite check runs, and a self-test",
        description="Print versions, device and which finite check runs, and train for a second. Exit code 1 if "
        "something is wrong.",
    )
    report = commands.add_parser(
        "report",
        help="summary and picture of a run",
        description="Summarize a history that LossScaleMonitor(history_file=...) wrote, and draw it.",
    )
    report.add_argument("history", type=Path, help="the JSON Lines file")
    report.add_argument("--output", "-o", type=Path, help="the picture; default: the file's name with .png")
    report.add_argument("--no-plot", action="store_true", help="only the summary")
    add_run_parser(commands)
    options = parser.parse_args(arguments)
    if options.command == "run":
        return run_script(options)
    if options.command == "doctor":
        return doctor()
    try:
        return run_report(
            options.history, None if options.no_plot else options.output or options.history.with_suffix(".png")
        )
    except (OSError, ValueError, ImportError) as error:
        print(f"lossscale report: error: {error}", file=sys.stderr)
        return 1


def run_report(history: Path, picture: Optional[Path]) -> int:
    """Print the summary of a history, and draw it if a path is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        records = read_history(history)
    for warning in caught:
        print(f"lossscale report: warning: {warning.message}", file=sys.stderr)
    print(summarize(records))
    if picture is not None:
        picture = checked_picture(picture, "lossscale report", history)
        print(f"picture     {plot_history(records, picture)}")
    return 0


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
        print(f"self-test   {self_test()}")
    except Exception as error:  # whatever is broken is what the doctor was called for
        problems.append(f"{type(error).__name__}: {error}")
    for problem in problems:
        print(f"problem     {problem}")
    print("all is well" if not problems else f"{len(problems)} problem{'s' if len(problems) > 1 else ''} found")
    return 1 if problems else 0


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
