"""Graph cells of loss scaling: what is compiled into a training graph. Import them from `lossscale`."""

from cells.backends import backend
from cells.clip import ClipByGlobalNorm, ClipByNorm, ClipByValue
from cells.custom_train_step import CustomTrainOneStepCell
from cells.ema import EMA
from cells.finite import all_finite
from cells.fused import FusedAdamWeightDecay, FusedMomentum
from cells.scale_update import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell, LossScaleUpdateCell
from cells.scalers import DynamicLossScaler, LossScaler, NoOpLossScaler, StaticLossScaler
from cells.train_step import TrainOneStepWithLossScaleCell

__all__ = [
    "EMA",
    "ClipByGlobalNorm",
    "ClipByNorm",
    "ClipByValue",
    "CustomTrainOneStepCell",
    "DynamicLossScaleUpdateCell",
    "DynamicLossScaler",
    "FixedLossScaleUpdateCell",
    "FusedAdamWeightDecay",
    "FusedMomentum",
    "LossScaleUpdateCell",
    "LossScaler",
    "NoOpLossScaler",
    "StaticLossScaler",
    "TrainOneStepWithLossScaleCell",
    "all_finite",
    "backend",
]
