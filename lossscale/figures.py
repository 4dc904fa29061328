"""Figures of matplotlib: empty, tidied and saved, with nothing left in pyplot."""

from pathlib import Path
from typing import Any, Optional

from lossscale.files import checked_path
from lossscale.optional import require

_ENDINGS = (".png", ".svg", ".svgz", ".pdf", ".ps", ".eps", ".pgf", ".jpg", ".jpeg", ".tif", ".tiff", ".webp", ".gif")

# Okabe and Ito's colours, which the colour-blind tell apart; markers and hatches differ too, for grey print.
BLUE, ORANGE, RED, GREY = "#0072B2", "#E69F00", "#D55E00", "#666666"


def figure_of(width: float, height: float) -> Any:
    """Return an empty figure that needs no display and leaves pyplot's state alone."""
    figure = require("matplotlib.figure", "plot", "A picture").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg", "plot", "A picture").FigureCanvasAgg(figure)
    return figure


def tidy(*panels: Any) -> None:
    """Take away what a plot does not need."""
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=9)


def checked_picture(path: Any, owner: str, source: Optional[Path] = None) -> Path:
    """Return where a picture is written, not over its `source`: as PNG where `path` has no ending of a picture."""
    path = checked_path("path", path, owner)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: name a picture in it, such as {path / 'run.png'}.")
    if path.suffix.lower() not in _ENDINGS:
        path = path.with_name(f"{path.name}.png")
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise ValueError(f"The picture {path} would replace the history that it shows: name another one.")
    return path


def save(figure: Any, path: Path) -> Path:
    """Write a figure, making folders as needed; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
