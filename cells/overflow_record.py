"""Which gradients held inf or nan at the last overflow? Kept on the device, outside checkpoints."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from cells.gradient_ops import flags_of

_numbers = itertools.count(1)


class OverflowRecord(nn.Cell):
    """One bool for each gradient, and a last one: whether there has been an overflow at all.

    Args:
        weights: the trained Parameters, whose names are told.
        sparse: whether gradients may be RowTensors.
    """

    def __init__(self, weights: Sequence, sparse: bool):
        super().__init__(auto_prefix=False)
        self.sparse = sparse
        self.weight_names = [weight.name for weight in weights]
        # In a list, so that MindSpore does not save it in checkpoints. Its name is unique because two train cells may
        # be compiled into one graph.
        flags = Tensor(np.zeros(len(weights) + 1, np.bool_))
        self.kept = [Parameter(flags, name=f"overflow_flags.{next(_numbers)}", requires_grad=False)]

    def construct(self, overflow: Tensor, flags: Tensor) -> Any:
        """Keep the flags if there was an overflow."""
        kept = self.kept[0]
        seen = ops.cat((flags, Tensor([True], mstype.bool_)))
        return ops.assign(kept, ops.select(overflow, seen, kept))

    def look(self, grads: tuple) -> Any:
        """Keep which gradients hold inf or nan, after an overflow that another check has found."""
        flags = flags_of(grads, self.sparse)
        return ops.assign(self.kept[0], ops.cat((flags, Tensor([True], mstype.bool_))))

    def names(self) -> list:
        """Return the names of the parameters, ["unknown"] if an overflow left no inf or nan. Reads the device."""
        *flags, seen = self.kept[0].asnumpy().tolist()
        names = [name for name, flag in zip(self.weight_names, flags) if flag]
        return names or (["unknown"] if seen else [])
