"""Graph cells of loss scaling: what is compiled into a training graph. Import them from `lossscale`."""

from cells.backends import backend
from cells.clip import ClipByGlobalNorm, ClipByNorm, ClipByValue
from cells.custom_train_step import CustomTrainOneStepCell
from cells.ema import EMA
from cells.fused import FusedAdamWeightDecay, FusedMomentum
from cells.scale_update import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell, LossScaleUpdateCell
from cells.train_step import TrainOneStepWithLossScaleCell

__all__ = [
    "EMA",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "CustomTrainOneStepCell",
    "DynamicLossScaleUpdateCell",
    "FixedLossScaleUpdateCell",
    "FusedAdamWeightDecay",
    "FusedMomentum",
    "LossScaleUpdateCell",
    "TrainOneStepWithLossScaleCell",
    "backend",
]
