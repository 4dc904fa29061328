"""Interleaved timing. No imports of any framework: each is measured in its own process by this module."""

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Callable

WARM_UP = 5


def interleave(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run every step once a round, in turn, and return the seconds of each. A step ends by reading its loss."""
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    gc.collect()
    gc.disable()
    for round_ in range(rounds):
        names = list(steps)
        for name in names if round_ % 2 else reversed(names):
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
    gc.enable()
    return seconds


def summary(seconds: dict[str, list[float]], plain: str = "plain") -> dict[str, dict[str, float]]:
    """Return for each step its median in ms, and median and quartiles of its ratio to the plain step of the round."""
    results = {}
    for name, times in seconds.items():
        ratios = [time_ / base for time_, base in zip(times, seconds[plain])]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        results[name] = {"ms": statistics.median(times) * 1e3, "ratio": middle, "low": low, "high": high}
    return results


def measure(workloads: dict[str, Callable[[], dict[str, Callable[[], float]]]], rounds: int) -> dict:
    """Return a summary for each workload, given by a function that builds its steps."""
    results = {}
    for name, build in workloads.items():
        steps = build()
        failed = {}
        for variant in list(steps):
            try:
                steps[variant]()
            except Exception as error:  # a variant that a framework can't run is a result, too
                failed[variant] = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:160]}
                del steps[variant]
        results[name] = {**summary(interleave(steps, rounds)), **failed}
        ratios = ", ".join(f"{key} {value['ratio']:.3f}" for key, value in results[name].items() if "ratio" in value)
        print(f"{name}: {ratios}", file=sys.stderr, flush=True)
    return results


def write(path: str, results: dict) -> None:
    """Write results as JSON."""
    Path(path).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
