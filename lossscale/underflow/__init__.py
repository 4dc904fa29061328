"""`find_loss_scale`: which gradients does float16 lose, and at which loss scale does it keep them?"""

from lossscale.underflow.find import find_loss_scale
from lossscale.underflow.report import LossScaleReport
from lossscale.underflow.statistics import GradientStatistics

__all__ = ["GradientStatistics", "LossScaleReport", "find_loss_scale"]
