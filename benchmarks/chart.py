"""The picture of the results: ratio of a scaled to a plain step, by framework and workload."""

import json
import sys
from pathlib import Path

from matplotlib import pyplot as plt

# label: (framework, variant, colour-blind-safe colour, hatch)
BARS = {
    "MindSpore, stock": ("MindSpore GRAPH", "stock", "#999999", "//"),
    "MindSpore, lossscale": ("MindSpore GRAPH", "ours", "#0072B2", ""),
    "MindSpore, lossscale fused": ("MindSpore GRAPH", "ours, fused", "#009E73", ""),
    "PyTorch GradScaler": ("PyTorch", "GradScaler", "#E69F00", ".."),
    "Flax DynamicScale": ("Flax", "DynamicScale", "#CC79A7", "xx"),
}


def draw(results: dict, path: Path) -> None:
    """Draw grouped bars with quartiles as error bars."""
    workloads = [name for name in results["PyTorch"] if name in results["MindSpore GRAPH"]]
    figure, axes = plt.subplots(figsize=(10, 4.5), dpi=150)
    width = 0.8 / len(BARS)
    for i, (label, (framework, variant, colour, hatch)) in enumerate(BARS.items()):
        rows = [results[framework][name][variant] for name in workloads]
        places = [place + (i - (len(BARS) - 1) / 2) * width for place in range(len(workloads))]
        heights = [row["ratio"] for row in rows]
        spread = [[r["ratio"] - r["low"] for r in rows], [r["high"] - r["ratio"] for r in rows]]
        axes.bar(places, heights, width, label=label, color=colour, hatch=hatch, edgecolor="white")
        axes.errorbar(places, heights, spread, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(workloads)), workloads)
    axes.set_ylabel("time of a scaled step / plain step")
    axes.set_title(f"Cost of dynamic loss scaling on CPU ({results['machine']})")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
