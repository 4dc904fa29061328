"""How are gradients unscaled? The stage of a train step, one cell for each variant, and `unscaling`, which chooses.

Each maps (scaled gradients, divisor) to (gradients, status, flags, norms)::

    gradients   in the dtypes of the parameters, as a clip gets them; ClippedUnscale has clipped them already
    status      bool: whether the gradients, unclipped, hold inf or nan; int32[8], as MindSpore's: nobody has looked
    flags       bool, shape (n,): which of them do; () where nobody has looked
    norms       shape (n,): those of the unclipped gradients; () where they are not asked for
"""

from collections.abc import Sequence
from typing import Any

from mindspore import ParameterTuple, Tensor, nn
from mindspore import dtype as mstype

from cells.backends import gradient_arithmetic
from cells.clip import ClipByGlobalNorm, ClipByNorm, ClipByNormBase
from cells.gradient_ops import cast_like, cast_up, norms_of, on_cpu, unscale
from cells.ranks import has_shards

_NARROW = (mstype.float16, mstype.bfloat16)


def unscaling(weights: Sequence, clip_grad: Any, sparse: bool, norm: bool, folds: bool, in_branch: bool) -> tuple:
    """Return the cell that unscales, and the cell that clips after it or None.

    Args:
        weights: the trained Parameters.
        clip_grad: the clip that was asked for, or None.
        sparse: whether gradients may be RowTensors.
        norm: whether the step needs norms.
        folds: whether a clip by norm may be one multiply with the unscaling, which saves a pass over the gradients.
        in_branch: whether the stage runs inside an `if`.
    """
    if norm and has_shards() and isinstance(clip_grad, ClipByNormBase):
        return ShardedUnscale(weights, clip_grad), None
    if sparse or not on_cpu():
        return Unscale(weights, norm), clip_grad
    clips = folds and type(clip_grad) in (ClipByGlobalNorm, ClipByNorm)
    scalars = any(not weight.shape for weight in weights)
    arithmetic = gradient_arithmetic(norm or clips, scalars, in_branch)
    if any(weight.dtype in _NARROW for weight in weights):
        return NarrowUnscale(weights, arithmetic), clip_grad
    if clips and arithmetic.looks_in_passing:
        return ClippedUnscale(clip_grad, arithmetic), None
    return LookingUnscale(arithmetic), clip_grad


class Unscale(nn.Cell):
    """Divide, on any device and with sparse gradients; the check is left to `get_overflow_status`."""

    def __init__(self, weights: Sequence, norm: bool):
        super().__init__(auto_prefix=False)
        self.norm = norm
        self.weights = ParameterTuple(weights)

    def construct(self, scaled, divisor):
        grads = cast_like(self.weights, unscale(cast_up(scaled), divisor))
        return grads, Tensor([0] * 8, mstype.int32), (), norms_of(grads) if self.norm else ()


class ShardedUnscale(Unscale):
    """Divide and clip by one set of norms: MindSpore completes one for each gradient where weights are sharded."""

    def __init__(self, weights: Sequence, clip_grad: nn.Cell):
        super().__init__(weights, True)
        self.clip_grad = clip_grad

    def construct(self, scaled, divisor):
        grads = unscale(cast_up(scaled), divisor)
        norms = norms_of(grads)
        clipped = self.clip_grad.arithmetic.multiply(self.clip_grad.factor(norms), grads)
        return cast_like(self.weights, clipped), Tensor([0] * 8, mstype.int32), (), norms


class LookingUnscale(nn.Cell):
    """Divide and look in one pass, on CPU."""

    def __init__(self, arithmetic: nn.Cell):
        super().__init__(auto_prefix=False)
        self.arithmetic = arithmetic

    def construct(self, scaled, divisor):
        grads, flags, norms = self.arithmetic.divide_and_look(divisor, scaled)
        return grads, flags.any(), flags, norms


class NarrowUnscale(nn.Cell):
    """Divide in float32, cast to the parameters' float16 or bfloat16, then look: a float32 may become inf there."""

    def __init__(self, weights: Sequence, arithmetic: nn.Cell):
        super().__init__(auto_prefix=False)
        self.weights = ParameterTuple(weights)
        self.arithmetic = arithmetic

    def construct(self, scaled, divisor):
        quotients, _, _ = self.arithmetic.divide_and_look(divisor, scaled)
        grads = cast_like(self.weights, quotients)
        flags, norms = self.arithmetic.look(Tensor(1.0, mstype.float32), grads)
        return grads, flags.any(), flags, norms


class ClippedUnscale(nn.Cell):
    """Look at the quotients without keeping them, then divide and clip in one multiply."""

    def __init__(self, clip_grad: nn.Cell, arithmetic: nn.Cell):
        super().__init__(auto_prefix=False)
        self.clip_grad = clip_grad
        self.arithmetic = arithmetic

    def construct(self, scaled, divisor):
        flags, norms = self.arithmetic.look(divisor, scaled)
        factor = self.clip_grad.factor(norms) / divisor.astype(norms.dtype)
        return self.arithmetic.multiply(factor, scaled), flags.any(), flags, norms
