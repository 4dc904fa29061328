"""Loss scaling and mixed-precision train steps for MindSpore, on Ascend, GPU and CPU."""

from cells.scalers import DynamicLossScaler, LossScaler, NoOpLossScaler, StaticLossScaler
from lossscale._cells import (
    EMA,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    CustomTrainOneStepCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    FusedAdamWeightDecay,
    FusedMomentum,
    LossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    backend,
)
from lossscale.checkpoint import load_train_state, save_train_state
from lossscale.convolutions import FastConvolutions, fast_convolutions
from lossscale.find_loss_scale import LossScaleReport, find_loss_scale
from lossscale.finite import NonfiniteGradient, all_finite, find_nonfinite
from lossscale.grad_scaler import GradScaler
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
    "DynamicLossScaler",
    "FastConvolutions",
    "FixedLossScaleManager",
    "FixedLossScaleUpdateCell",
    "FusedAdamWeightDecay",
    "FusedMomentum",
    "GradScaler",
    "LossScaleManager",
    "LossScaleMonitor",
    "LossScaleReport",
    "LossScaleUpdateCell",
    "LossScaler",
    "Model",
    "NoOpLossScaler",
    "NonfiniteGradient",
    "StaticLossScaler",
    "TrainOneStepWithLossScaleCell",
    "all_finite",
    "backend",
    "build_train_network",
    "fast_convolutions",
    "find_loss_scale",
    "find_nonfinite",
    "load_train_state",
    "plot_history",
    "read_history",
    "save_train_state",
]
