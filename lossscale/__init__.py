"""Loss scaling and mixed-precision train steps for MindSpore, on Ascend, GPU and CPU."""

import cells

if not hasattr(cells, "TrainOneStepWithLossScaleCell"):
    raise ImportError(
        f"lossscale needs its own package 'cells', but Python found another one: {getattr(cells, '__file__', cells)}. "
        "Rename that one, or move it behind site-packages on sys.path (a folder 'cells' beside the script comes first)."
    )

from cells import (
    EMA,
    ClipByGlobalNorm,
    ClipByNorm,
    ClipByValue,
    CustomTrainOneStepCell,
    DynamicLossScaler,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    FusedAdam,
    FusedAdamW,
    FusedAdamWeightDecay,
    FusedMomentum,
    FusedSGD,
    LossScaler,
    LossScaleUpdateCell,
    NoOpLossScaler,
    StaticLossScaler,
    TrainOneStepWithLossScaleCell,
    all_finite,
    backend,
    fuse,
)
from lossscale.checkpoint import load_train_state, save_train_state
from lossscale.convolutions import FastConvolutions, fast_convolutions
from lossscale.finite import NonfiniteGradient, find_nonfinite
from lossscale.grad_scaler import GradScaler
from lossscale.managers import DynamicLossScaleManager, FixedLossScaleManager, LossScaleManager
from lossscale.model import Model
from lossscale.monitor import LossScaleMonitor, plot_history, read_history
from lossscale.patch import patch_mindspore, unpatch_mindspore
from lossscale.train_network import build_train_network
from lossscale.underflow import LossScaleReport, find_loss_scale

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
    "FusedAdam",
    "FusedAdamW",
    "FusedAdamWeightDecay",
    "FusedMomentum",
    "FusedSGD",
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
    "fuse",
    "load_train_state",
    "patch_mindspore",
    "plot_history",
    "read_history",
    "save_train_state",
    "unpatch_mindspore",
]
