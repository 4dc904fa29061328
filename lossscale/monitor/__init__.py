"""`LossScaleMonitor`: what the scale did in a run, shown, recorded, summed up and drawn."""

from lossscale.monitor.callback import LossScaleMonitor
from lossscale.monitor.history import read_history
from lossscale.monitor.picture import plot_history
from lossscale.monitor.texts import summarize

__all__ = ["LossScaleMonitor", "plot_history", "read_history", "summarize"]
