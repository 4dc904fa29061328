"""The public cells, after a check that the `cells` package that Python finds is ours: the name is a common one."""

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
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    FusedAdamWeightDecay,
    FusedMomentum,
    LossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
    backend,
)

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
