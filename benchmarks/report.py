"""The tables of RESULTS.md, made from the measured numbers alone."""

from typing import Optional

from benchmarks import workloads

FRAMEWORKS = ["MindSpore GRAPH", "MindSpore PYNATIVE", "PyTorch", "Flax"]

METHOD = """\
Every number is the time of a training step divided by that of the same framework's own plain step, without loss
scaling, in the same round: all variants of one framework take turns in one process, after {warm_up} warm-up steps,
{rounds} rounds, and each step ends by reading its loss. In PYNATIVE_MODE, where a loss is there before its backward
pass has run, a round is {pynative_steps} steps in a row and ends by reading a weight. Median [quartiles]. *plain
again* is the plain step measured a second time: what it differs from 1 is noise. float32 with Momentum unless the
name says otherwise; O2 is MindSpore's mixed precision and is compared with a plain O2 step. To keep the whole within
half an hour, O2 and PYNATIVE have fewer variants. *stock* is MindSpore's `nn.TrainOneStepWithLossScaleCell` with an
`isfinite` check, without which it does not run on CPU; *stock functional* is `amp.DynamicLossScaler` with
`amp.all_finite` in `ms.jit`; *plain ops* is this library without its native kernel; *fused* is `FusedMomentum` or
`FusedAdamWeightDecay`, and *fused plain* the same optimizer in a step that neither scales nor looks. PyTorch:
`GradScaler("cpu")`. Flax: `DynamicScale` in `jit`, donated, skipping by `where`.
"""

FULL_STEP = """\
One update: {accumulate_steps} micro-steps whose gradients are accumulated in float32, their mean clipped by the global
norm, the optimizer, and an exponential average of the weights, with dynamic loss scaling; divided by the same
arithmetic without scaling or check. Each round is one such window and ends by reading the last loss. MindSpore's plain
step is written by hand with its ops, mean and clip in one multiply; *ops.clip_by_global_norm* is the same with
MindSpore's own clip. PyTorch: `GradScaler`, `clip_grad_norm_` and `torch._foreach_lerp_`, over the same without
`GradScaler`. Goal for *ours*: at most 1.15.
"""

ANATOMY = """\
GRAPH_MODE, two workloads of many small tensors, where a scaled step costs most beside a plain one; PYNATIVE_MODE, the
two that miss the goal most often. First what no step can avoid that the last gradient may stop, by MindSpore's own ops
alone: in *order* the optimizer of a plain step waits for all gradients, where in GRAPH_MODE it otherwise runs beside
the backward pass; *order and branch* also has it in an `if`, which in GRAPH_MODE carries every tensor of the optimizer
through a switch, and in PYNATIVE_MODE makes Python wait for the backward pass. Then our step with one part after
another left out: *no update of the scale* has a scale in a Tensor, *no branch* runs the optimizer whatever the check
says. What lies between *order* and *neither* is the kernel, its second copy of the gradients, and the scale's way
through the step. A fused optimizer needs no branch and is one op where MindSpore's are a chain of one after another.
"""

SCALE_SERIES = """\
{count} random series of {length} iterations, random factors and overflows: in {different} of them does
`lossscale.GradScaler` give another scale than PyTorch's `GradScaler`, compared to the bit.
"""


def markdown(results: dict) -> str:
    """Return the whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        "# What loss scaling costs\n",
        f"Measured {results['date']} by `make bench` on {results['machine']}; load before the run "
        f"{results['load before']:.2f}; {versions}.\n",
        METHOD.format(warm_up=5, rounds=results["rounds"], pynative_steps=workloads.PYNATIVE_STEPS),
    ]
    parts += ["## Goals\n", _goals(results)]
    for framework in FRAMEWORKS:
        if framework in results:
            parts += [f"## {framework}\n", _ratios(results[framework])]
    if "Full step" in results:
        parts += ["## Full step\n", FULL_STEP.format(accumulate_steps=workloads.ACCUMULATE_STEPS)]
        for framework, rows in results["Full step"].items():
            parts += [f"### {framework}\n", _ratios(rows)]
    if "Anatomy" in results:
        parts += ["## Where the time goes\n", ANATOMY, _ratios(results["Anatomy"])]
    parts += [
        "## One call of the kernel\n",
        "Rows are tensors x float32 values in each. Ratio to a `memcpy` of the same gradients in the same round; the "
        "check only reads. With few values this is the cost of a call from Python.\n",
        _ratios(results["Kernel"], plain="copy"),
    ]
    if "Cold" in results:
        parts += ["## First call and memory\n", _cold(results["Cold"])]
    if "Scale series" in results:
        parts += ["## The same scales as PyTorch\n", SCALE_SERIES.format(**results["Scale series"])]
    return "\n".join(parts)


def _goals(results: dict) -> str:
    """Return a table of the goals and of the rows that miss them."""
    graph = {name: row for name, row in results["MindSpore GRAPH"].items() if " " not in name}
    checks = [
        ("GRAPH, any optimizer", graph, "ours", 1.05),
        ("GRAPH, fused optimizer", graph, "ours, fused", 1.0),
        ("PYNATIVE, any optimizer", results.get("MindSpore PYNATIVE", {}), "ours", 1.15),
        ("PYNATIVE, fused optimizer", results.get("MindSpore PYNATIVE", {}), "ours, fused", 1.15),
        ("GRAPH, full step", results.get("Full step", {}).get("MindSpore GRAPH", {}), "ours", 1.15),
        ("Kernel, of a copy, from 1 M values", _large(results["Kernel"]), "unscale", 1.3),
        ("First call", _first_calls(results.get("Cold", {})), "ours", 1.15),
    ]
    lines = ["| | goal, at most | met by | missed by |", "| --- | --- | --- | --- |"]
    for title, rows, variant, goal in checks:
        ratios = {name: row[variant]["ratio"] for name, row in rows.items() if "ratio" in row.get(variant, {})}
        missed = [f"{name} ({ratio:.2f})" for name, ratio in ratios.items() if round(ratio, 2) > goal]
        met = f"{len(ratios) - len(missed)} of {len(ratios)}"
        lines.append(f"| {title} | {goal:.2f} | {met} | {', '.join(missed)} |")
    return "\n".join(lines) + "\n"


def _first_calls(rows: dict) -> dict:
    """Return the ratios of the first calls, which compile."""
    return {
        name.split(", ")[1]: {"ours": {"ratio": row["ours"]["first_call_s"] / row["plain"]["first_call_s"]}}
        for name, row in rows.items()
    }


def _large(rows: dict) -> dict:
    """Return the rows of the kernel with a million values or more."""
    sizes = {name: [int(part.replace(",", "")) for part in name.split(" x ")] for name in rows}
    return {name: rows[name] for name, (tensors, values) in sizes.items() if tensors * values >= 1_000_000}


def _ratios(rows: dict, plain: str = "plain") -> str:
    variants = list(dict.fromkeys(variant for row in rows.values() for variant in row if variant != "plain"))
    lines = [f"| | {plain}, ms | " + " | ".join(variants) + " |", "| --- " * (len(variants) + 2) + "|"]
    for name, row in rows.items():
        cells = [_milliseconds(row["plain"]["ms"]), *(_cell(row.get(variant)) for variant in variants)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _milliseconds(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _cell(result: Optional[dict]) -> str:
    if result is None:
        return ""
    if "error" in result:
        return "does not run"
    return f"{result['ratio']:.2f} [{result['low']:.2f} {result['high']:.2f}]"


def _cold(results: dict) -> str:
    lines = ["| | variant | first call, s | ratio | peak memory, MiB | ratio |", "| --- " * 6 + "|"]
    for name, rows in results.items():
        plain = rows["plain"]
        for variant, row in rows.items():
            first, peak = row["first_call_s"], row["peak_mib"]
            ratios = first / plain["first_call_s"], peak / plain["peak_mib"]
            lines.append(f"| {name} | {variant} | {first:.2f} | {ratios[0]:.2f} | {peak:.0f} | {ratios[1]:.2f} |")
    return "\n".join(lines) + "\n"
