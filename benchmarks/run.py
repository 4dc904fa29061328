"""Measure everything, each framework in a process of its own, and write RESULTS.md, results.json and results.png."""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import report, workloads
from benchmarks.scale_series import LENGTH, count_differences
from lossscale.convolutions import compare_convolutions

HERE = Path(__file__).parent
PEERS = HERE.parent / ".venv-bench/bin/python"
SERIES = 200
COLD_VARIANTS = ["plain", "stock", "ours", "ours, plain ops", "ours, fused"]
COLD_WORKLOADS = {"first call": [*workloads.FIRST_CALL], "peak memory": ["mlp_b16_h2048_l6"]}
IMPORTS = {"mindspore": "import mindspore", "lossscale": "import mindspore, lossscale"}


def run(python: str, module: str, *arguments: str) -> dict:
    """Run a benchmark module in a new process and return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [python, "-m", f"benchmarks.{module}", "--out", str(out), *arguments]
        print("*", module, *arguments, file=sys.stderr, flush=True)
        subprocess.run(command, check=True, cwd=HERE.parent, env={**os.environ, "GLOG_v": "3"})
        return json.loads(out.read_text(encoding="utf-8"))


def versions(python: str, names: list[str]) -> dict[str, str]:
    """Return the installed versions in an environment."""
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    return json.loads(subprocess.run([python, "-c", code, *names], check=True, capture_output=True, text=True).stdout)


def processor() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cold_runs(repeats: int) -> dict:
    """Return the best first-call time and the peak memory of each variant, from fresh processes."""
    results: dict = {}
    for title, names in COLD_WORKLOADS.items():
        for name in names:
            results[f"{title}, {name}"] = rows = {}
            for variant in COLD_VARIANTS:
                arguments = ["--cold", variant, "--workloads", name]
                runs = [run(sys.executable, "mindspore_steps", *arguments) for _ in range(repeats)]
                rows[variant] = {key: min(one[key] for one in runs) for key in runs[0]}
    return results


def import_times(repeats: int) -> dict:
    """Return the best seconds of each import in a fresh process, in turn."""
    code = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
    best = dict.fromkeys(IMPORTS, float("inf"))
    for _ in range(repeats):
        for name, statement in IMPORTS.items():
            command = [sys.executable, "-c", code.format(statement)]
            done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE.parent)
            best[name] = min(best[name], float(done.stdout.split()[-1]))
    return best


class Quietness:
    """How much of the processors other programs took while the benchmark ran, from Linux's counters."""

    def __init__(self) -> None:
        self.start = self._now()

    def _now(self) -> tuple[float, float, float]:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, idle, wait, irq, soft, steal = map(int, file.readline().split()[1:9])
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = os.sysconf("SC_CLK_TCK")
        busy = (user + nice + system + irq + soft + steal) / ticks
        return busy, busy + (idle + wait) / ticks, own.ru_utime + own.ru_stime

    def others(self) -> float:
        """Return the share of all processors that was not ours."""
        busy, total, own = (after - before for after, before in zip(self._now(), self.start))
        return max(0.0, busy - own) / total


def scale_series() -> dict:
    """Return how many series of scales were compared with PyTorch's, each made where its framework is installed."""
    ours = run(sys.executable, "scale_series", "--count", str(SERIES))
    with tempfile.TemporaryDirectory() as folder:
        cases = Path(folder) / "ours.json"
        cases.write_text(json.dumps(ours), encoding="utf-8")
        theirs = run(str(PEERS), "scale_series", "--cases", str(cases))
    different = count_differences(ours["series"], theirs["series"])
    return {"count": SERIES, "length": LENGTH, "different": different}


def main() -> None:
    """Measure and write the results; with --quick a small part of it, to the terminal only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less than a minute, and nothing is written")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--workloads", nargs="+", default=None)
    options = parser.parse_args()
    rounds = options.rounds or (workloads.QUICK_ROUNDS if options.quick else workloads.ROUNDS)
    names = options.workloads or (workloads.QUICK if options.quick else workloads.WORKLOADS)
    common = ["--rounds", str(rounds), "--workloads", *names]
    quick = ["--quick"] if options.quick else []
    quietness = Quietness()
    results: dict = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} cores, {platform.system()}",
        "load before": os.getloadavg()[0],
        "rounds": rounds,
        "versions": versions(sys.executable, ["mindspore", "numpy"]),
        "MindSpore GRAPH": run(sys.executable, "mindspore_steps", *common, *quick),
    }
    full_names = [name for name in workloads.FULL if name in names and not options.quick]
    full = ["--full", "--rounds", str(rounds), "--workloads", *full_names]
    if full_names:
        results["Full step"] = {"MindSpore GRAPH": run(sys.executable, "mindspore_steps", *full)}
    if not options.quick and not options.workloads:
        family = ["--family", "--rounds", str(rounds), "--workloads", *workloads.FAMILY]
        results["Optimizers"] = run(sys.executable, "mindspore_steps", *family)
    if not options.quick:
        results["MindSpore PYNATIVE"] = run(sys.executable, "mindspore_steps", "--mode", "PYNATIVE", *common)
    if PEERS.exists():
        results["versions"].update(versions(str(PEERS), ["torch", "jax", "flax", "optax"]))
        results["PyTorch"] = run(str(PEERS), "torch_steps", *common)
        results["Flax"] = run(str(PEERS), "flax_steps", *common)
        if full_names:
            results["Full step"]["PyTorch"] = run(str(PEERS), "torch_steps", *full)
        if not options.quick:
            results["Scale series"] = scale_series()
    if not options.quick:
        results["Anatomy"] = {}
        for mode in ("GRAPH", "PYNATIVE"):
            results["Anatomy"] |= run(sys.executable, "anatomy", "--mode", mode, "--rounds", str(rounds))
    results["Kernel"] = run(sys.executable, "kernel", *quick)
    if options.quick:
        print(report.markdown(results))
        return
    results["Cold"] = cold_runs(2)
    results["Imports"] = import_times(5)
    results["Convolutions"] = compare_convolutions()
    results["Compile times"] = run(sys.executable, "compile_times")
    results["others"] = quietness.others()
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (HERE / "RESULTS.md").write_text(report.markdown(results), encoding="utf-8")
    chart = ["-m", "benchmarks.chart", str(HERE / "results.json"), str(HERE / "results.png")]
    subprocess.run([str(PEERS), *chart], check=True, cwd=HERE.parent)
    print(f"Wrote {HERE / 'RESULTS.md'}, results.json and results.png.")


if __name__ == "__main__":
    main()
