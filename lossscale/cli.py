"""The command line: `lossscale doctor` looks at the installation, `lossscale report` at the history of a run."""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

import lossscale
from lossscale.doctor import doctor
from lossscale.figures import checked_picture
from lossscale.monitor import plot_history, read_history, summarize
from lossscale.run import add_run_parser, run_script


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
