"""The picture of the results: ratio of a scaled to a plain step, by framework and workload."""

import json
import sys
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, NullLocator

# label: (framework, variant, colour-blind-safe colour, hatch)
BARS = {
    "MindSpore, stock": ("MindSpore GRAPH", "stock", "#999999", "//"),
    "MindSpore, lossscale": ("MindSpore GRAPH", "ours", "#0072B2", ""),
    "MindSpore, lossscale, fused optimizer": ("MindSpore GRAPH", "ours, fused", "#56B4E9", "\\\\"),
    "PyTorch, GradScaler": ("PyTorch", "GradScaler", "#E69F00", ".."),
    "Flax, DynamicScale": ("Flax", "DynamicScale", "#CC79A7", "xx"),
}
GOAL = 1.05
TICKS = [0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 7, 10]


def draw(results: dict, path: Path) -> None:
    """Draw grouped bars that start at 1, the plain step, with quartiles as error bars."""
    workloads = [name for name in results["PyTorch"] if name in results["MindSpore GRAPH"]]
    figure, axes = plt.subplots(figsize=(11, 5.5), dpi=150)
    width = 0.85 / len(BARS)
    lowest, highest = 0.9, 1.25
    for i, (label, (framework, variant, colour, hatch)) in enumerate(BARS.items()):
        found = {place: results[framework][name].get(variant, {}) for place, name in enumerate(workloads)}
        rows = {place + (i - (len(BARS) - 1) / 2) * width: row for place, row in found.items() if "ratio" in row}
        heights = [row["ratio"] - 1 for row in rows.values()]
        spread = [[r["ratio"] - r["low"] for r in rows.values()], [r["high"] - r["ratio"] for r in rows.values()]]
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        axes.bar(list(rows), heights, width, bottom=1, label=label, **style)
        whiskers = {"fmt": "none", "ecolor": "black", "elinewidth": 0.8, "capsize": 2}
        axes.errorbar(list(rows), [row["ratio"] for row in rows.values()], spread, **whiskers)
        for place, row in rows.items():
            above = row["ratio"] >= 1
            end, offset = (max(row["high"], 1), 3) if above else (row["low"], -3)
            text = {"textcoords": "offset points", "ha": "center", "va": "bottom" if above else "top", "fontsize": 7}
            axes.annotate(f"{row['ratio']:.2f}", (place, end), (0, offset), **text)
            lowest, highest = min(lowest, row["low"]), max(highest, row["high"])
    axes.axhline(1, color="black", linewidth=1)
    axes.axhline(GOAL, color="#D55E00", linewidth=1.2, linestyle="--", label=f"goal for lossscale: at most {GOAL}")
    axes.set_yscale("log")
    axes.set_ylim(lowest / 1.07, highest * 1.12)
    axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", linewidth=0.4, alpha=0.5)
    axes.set_axisbelow(True)
    axes.set_xlim(-0.5, len(workloads) - 0.5)
    axes.set_xticks(range(len(workloads)), [name.replace("_", "\n", 1).replace("_", " ") for name in workloads])
    axes.set_xlabel("workload (b: batch, h: width, l: layers), float32")
    axes.set_ylabel("time with loss scaling / plain step's time\n(same framework; log scale; 1 = free)")
    figure.suptitle("What dynamic loss scaling costs a training step on CPU", fontsize=13)
    axes.set_title(
        f"median and quartiles of {results['rounds']} rounds, {results['date']}, {results['machine']}", fontsize=8
    )
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
