"""Loss scaling and mixed-precision train steps for MindSpore, on Ascend, GPU and CPU."""

from lossscale._cells import (
    EMA,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    CustomTrainOneStepCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    backend,
)
from lossscale.find_loss_scale import LossScaleReport, find_loss_scale
from lossscale.history import read_history
from lossscale.managers import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from lossscale.model import Model
from lossscale.monitor import LossScaleMonitor
from lossscale.plot import plot_history
from lossscale.train_network import build_train_network

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "CustomTrainOneStepCell",
    "DynamicLossScaleManager",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleManager",
    "FixedLossScaleUpdateCell",
    "LossScaleManager",
    "LossScaleMonitor",
    "LossScaleReport",
    "LossScaleUpdateCell",
    "Model",
    "TrainOneStepWithLossScaleCell",
    "backend",
    "build_train_network",
    "find_loss_scale",
    "plot_history",
    "read_history",
]
