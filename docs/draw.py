"""Draw the pictures of the site and the READMEs, light and dark: `make docs-pictures` (a minute; it trains LeNet).

The curves come from the example that `make train` runs, the costs from benchmarks/results.json. The diagram of the data
flow is written here.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))

# What a colour of the light picture is in the dark one: ink and paper change places, strong blues and reds get lighter.
DARK = {
    "#000000": "#e2e4e9",
    "#ffffff": "#1e2129",
    "#333333": "#d0d3da",
    "#666666": "#9aa0ab",
    "#0072b2": "#56b4e9",
    "#d55e00": "#ff9a4d",
    "#262626": "#d0d3da",
    "#cccccc": "#5a606b",
    "#b0b0b0": "#5a606b",
    "white": "#1e2129",
    "black": "#e2e4e9",
    "#eef3fa": "#263245",
    "#fdf0e3": "#43311f",
    "#f1f1f1": "#2a2e37",
}

# One step, from top to bottom: (kind, text, detail). Kinds: data, stage, choice.
FLOW = [
    ("data", "batch", "inputs and labels"),
    ("stage", "network, float16", "forward pass: one loss, float32"),
    ("stage", "loss × scale", "2^16, say: small gradients move up"),
    ("stage", "backward pass", "gradients, all scale times too large"),
    ("stage", "mean over devices and micro-steps", "only with several of them"),
    ("stage", "÷ scale, and look for inf and nan", "in float32, one pass"),
    ("choice", "overflow?", ""),
]
WIDTH, BOX, HIGH, GAP = 560, 330, 54, 26


def data_flow():
    """Return the diagram of one step as SVG, in the light colours."""
    left = 24
    parts = []
    y = 16
    centre = left + BOX // 2
    for number, (kind, text, detail) in enumerate(FLOW):
        if number:
            parts.append(arrow([(centre, y - GAP), (centre, y)]))
        if kind == "choice":
            corners = [(centre, y), (left + BOX - 40, y + 36), (centre, y + 72), (left + 40, y + 36)]
            points = " ".join(f"{a},{b}" for a, b in corners)
            parts.append(f'<polygon points="{points}" fill="#fdf0e3" stroke="#d55e00" stroke-width="1.5"/>')
            parts.append(label(centre, y + 42, text, bold=True))
            choice = y + 36
            y += 72 + GAP
        else:
            parts.append(box(left, y, BOX, text, detail, "#f1f1f1" if kind == "data" else "#eef3fa"))
            y += HIGH + GAP
    bottom = y
    parts.append(arrow([(centre, bottom - GAP), (centre, bottom)]))
    parts.append(label(centre + 10, bottom - 8, "no", anchor="start"))
    parts.append(box(left, bottom, BOX, "clip, then the optimizer", "true gradients; then the average of the weights"))
    parts.append(arrow([(centre, bottom + HIGH), (centre, bottom + HIGH + GAP)]))
    parts.append(box(left, bottom + HIGH + GAP, BOX, "loss, overflow, loss_scale", "what a step returns", "#f1f1f1"))
    # The scale, beside the flow: what the check says moves it, and the next step multiplies by it.
    side, wide = left + BOX + 36, WIDTH - (left + BOX + 36) - 12
    times = 16 + 2 * (HIGH + GAP) + HIGH // 2
    middle = (times + choice) // 2
    parts.append(arrow([(left + BOX - 40, choice), (side + wide // 2, choice), (side + wide // 2, middle + 48)]))
    parts.append(label(left + BOX - 34, choice - 8, "yes: skip", anchor="start"))
    parts.append(
        f'<rect x="{side}" y="{middle - 48}" width="{wide}" height="96" rx="8" fill="#ffffff" stroke="#0072b2" '
        'stroke-width="2"/>'
    )
    for line, (text, bold) in enumerate(
        [("loss scale", True), ("overflow: half", False), ("2000 clean", False), ("steps: double", False)]
    ):
        parts.append(label(side + wide // 2, middle - 24 + 20 * line, text, bold=bold, size=15 if bold else 14))
    parts.append(arrow([(side + wide // 2, middle - 48), (side + wide // 2, times), (left + BOX, times)]))
    high = bottom + 2 * HIGH + GAP + 16
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {high}" width="{WIDTH}" height="{high}" '
        'font-family="system-ui, -apple-system, Segoe UI, Noto Sans, sans-serif">\n'
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0 L10,5 L0,10 z" fill="#666666"/></marker></defs>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def box(x, y, width, text, detail, fill="#eef3fa"):
    """Return a stage of the flow: a name, and a line that says more."""
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="8" fill="{fill}" stroke="#666666"/>'
        + label(x + width // 2, y + 23, text, bold=True)
        + label(x + width // 2, y + 43, detail, size=13, colour="#333333")
    )


def label(x, y, text, bold=False, size=15, anchor="middle", colour="#000000"):
    """Return a text."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(text)}</text>'
    )


def arrow(points):
    """Return an arrow along corners."""
    path = " ".join(f"{a},{b}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="#666666" stroke-width="1.6" marker-end="url(#tip)"/>'


def dark(svg):
    """Return an SVG in the colours of dark mode."""
    for light, night in DARK.items():
        for quote in (f": {light};", f'"{light}"', f":{light};", f': {light}"'):
            svg = svg.replace(quote, quote.replace(light, night))
    return svg


def save(name, svg):
    """Write a picture and its dark twin."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / f"{name}.svg").write_text(svg, encoding="utf-8")
    (IMAGES / f"{name}-dark.svg").write_text(dark(svg), encoding="utf-8")


def plain(path):
    """Return what matplotlib drew, with no date in it and with colours in lower case."""
    svg = path.read_text(encoding="utf-8")
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.S)
    svg = svg.replace("<svg ", '<svg fill="#000000" ', 1)  # black is left out as the default; named, it can change
    return re.sub(r"#[0-9A-Fa-f]{6}", lambda match: match.group(0).lower(), svg)


def main():
    """Draw everything."""
    save("data-flow", data_flow())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        # The same curves are to give the same file, so the ids in it may not be random.
        (out / "matplotlibrc").write_text("backend: agg\nsvg.hashsalt: lossscale\n", encoding="utf-8")
        os.environ["MATPLOTLIBRC"] = folder
        from benchmarks import chart

        chart.draw(json.loads((ROOT / "benchmarks" / "results.json").read_text()), out / "cost.svg")
        save("cost", plain(out / "cost.svg").replace("#0072b2", "#2a7ab8"))  # beside another blue, in dark mode too
        command = [sys.executable, "-m", "examples.lenet", "--pictures", "svg", "--out-dir", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        save("history", plain(out / "lenet_history.svg"))
        save("gradients", plain(out / "lenet_gradients.svg"))


if __name__ == "__main__":
    main()
