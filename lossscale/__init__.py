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
from lossscale.checkpoint import load_train_state, save_train_state
from lossscale.managers import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from lossscale.model import Model
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
    "LossScaleUpdateCell",
    "Model",
    "TrainOneStepWithLossScaleCell",
    "backend",
    "build_train_network",
    "load_train_state",
    "save_train_state",
]
