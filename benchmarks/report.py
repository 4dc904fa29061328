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
name says otherwise; O2 is MindSpore's mixed precision. A plain O2 step trains on gradients that flush to zero, and is
faster for it; so O2 is also compared with *fixed*: `nn.TrainOneStepCell(..., sens)` with a fixed scale that the
optimizer divides out, without any check. *order and branch* is a plain step whose optimizer waits for all gradients and
stands in an `if`, by MindSpore's own ops: the least that a step costs which may be skipped. *stock* is MindSpore's
`nn.TrainOneStepWithLossScaleCell` with an `isfinite` check, without which it does not run on CPU; *stock functional* is
`amp.DynamicLossScaler` with `amp.all_finite` in `ms.jit`; *plain ops* is this library without its native kernel;
*fused* is the optimizer that `lossscale.fuse` gives, and *fused plain* the same in a step that neither scales nor
looks. PyTorch: `GradScaler("cpu")`. Flax: `DynamicScale` in `jit`, donated, skipping by `where`. MindSpore runs after
`lossscale.fast_convolutions()`.
"""

FULL_STEP = """\
One update: {accumulate_steps} micro-steps whose gradients are accumulated in float32, their mean clipped by the global
norm, the optimizer, and an exponential average of the weights, with dynamic loss scaling; divided by the same
arithmetic without scaling or check. Each round is one such window and ends by reading the last loss. MindSpore's plain
step is written by hand with its ops, mean and clip in one multiply; *ops.clip_by_global_norm* is the same with
MindSpore's own clip. PyTorch: `GradScaler`, `clip_grad_norm_` and `torch._foreach_lerp_`, over the same without
`GradScaler`. Goal for *ours, fused* with AdamW: at most 0.85; for *ours*: at most 1.15.
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


COMPILE_TIMES = """\
Seconds to compile `unscale`, and `all_finite`, of so many gradients in `ms.jit`, by `mindspore.amp` and here.
"""

IMPORTS = """\
`import mindspore` takes {mindspore:.2f} s, and with `lossscale` {lossscale:.2f} s: the best of five fresh processes.
"""

CONVOLUTIONS = """\
A training step of one small convolution (3 x 3, 16 to 16 channels, 28 x 28, batch 8): {as_it_is:.1f} ms as MindSpore
comes, {limited:.1f} ms with oneDNN limited to AVX2.
"""


def markdown(results: dict) -> str:
    """Return the whole report."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        "# What loss scaling costs\n",
        f"Measured {results['date']} by `make bench` on {results['machine']}; load before the run "
        f"{results['load before']:.2f}{_others(results)}; {versions}.\n",
        METHOD.format(warm_up=5, rounds=results["rounds"], pynative_steps=workloads.PYNATIVE_STEPS),
    ]
    parts += ["## Goals\n", _goals(results)]
    for framework in FRAMEWORKS:
        if framework in results:
            parts += [f"## {framework}\n", _ratios(results[framework])]
    if "Optimizers" in results:
        parts += ["## Each optimizer and its fused twin\n", _ratios(results["Optimizers"])]
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
    if "Compile times" in results:
        parts += ["## Compiling the functional scalers\n", COMPILE_TIMES, _compile_times(results["Compile times"])]
    if "Imports" in results:
        parts += ["## Import\n", IMPORTS.format(**results["Imports"])]
    if "Convolutions" in results:
        as_it_is, limited = results["Convolutions"]
        parts += ["## Convolutions\n", CONVOLUTIONS.format(as_it_is=as_it_is, limited=limited)]
    if "Scale series" in results:
        parts += ["## The same scales as PyTorch\n", SCALE_SERIES.format(**results["Scale series"])]
    return "\n".join(parts)


def _goals(results: dict) -> str:
    """Return a table of the goals and of the rows that miss them."""
    graph = {name: row for name, row in results["MindSpore GRAPH"].items() if " " not in name}
    o2 = {name: row for name, row in results["MindSpore GRAPH"].items() if name.endswith(" O2")}
    optimizers = results.get("Optimizers", {})
    adam = {name: row for name, row in optimizers.items() if "Adam" in name}
    others = {name: row for name, row in optimizers.items() if "Adam" not in name}
    full = results.get("Full step", {}).get("MindSpore GRAPH", {})
    checks = [
        ("float32, of order and branch", _over(graph, "ours", "order and branch"), "ours", 1.05),
        ("O2, of a fixed scale", _over(o2, "ours", "fixed"), "ours", 1.05),
        ("Adam kinds, fused, of stock's plain step", adam, "ours, fused", 0.80),
        ("SGD and Momentum, fused, of the larger plain step", _over_larger(others), "ours, fused", 1.0),
        ("PYNATIVE, any optimizer", results.get("MindSpore PYNATIVE", {}), "ours", 1.15),
        ("PYNATIVE, fused optimizer", results.get("MindSpore PYNATIVE", {}), "ours, fused", 1.15),
        ("Full step", {name: row for name, row in full.items() if name.endswith("Momentum")}, "ours", 1.15),
        ("Full step, AdamW, fused", {n: row for n, row in full.items() if n.endswith("AdamW")}, "ours, fused", 0.85),
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


def _over(rows: dict, variant: str, base: str) -> dict:
    """Return the ratios of one variant to another one than the plain step."""
    return {
        name: {variant: {"ratio": row[variant]["ratio"] / row[base]["ratio"]}}
        for name, row in rows.items()
        if all("ratio" in row.get(one, {}) for one in (variant, base))
    }


def _over_larger(rows: dict) -> dict:
    """Return the ratios of the fused step to the larger of stock's plain step and the fused plain step."""
    result = {}
    for name, row in rows.items():
        if "ratio" in row.get("ours, fused", {}):
            larger = max(1.0, row.get("fused plain", {}).get("ratio", 1.0))
            result[name] = {"ours, fused": {"ratio": row["ours, fused"]["ratio"] / larger}}
    return result


def _others(results: dict) -> str:
    """Return what other programs took of the machine meanwhile, where it was measured."""
    return f", other programs took {results['others']:.0%} of it meanwhile" if "others" in results else ""


def _first_calls(rows: dict) -> dict:
    """Return the ratios of the first calls, which compile."""
    return {
        name.split(", ")[1]: {"ours": {"ratio": row["ours"]["first_call_s"] / row["plain"]["first_call_s"]}}
        for name, row in rows.items()
        if name.startswith("first call")
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


def _compile_times(results: dict) -> str:
    names = list(next(iter(results.values())))
    lines = ["| gradients | " + " | ".join(names) + " |", "| --- " * (len(names) + 1) + "|"]
    for count, row in results.items():
        lines.append(f"| {count} | " + " | ".join(f"{row[name]:.2f}" for name in names) + " |")
    return "\n".join(lines) + "\n"
