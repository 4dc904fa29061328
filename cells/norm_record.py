"""What is the norm of each gradient? Kept on the device for the output "grad_norms", outside checkpoints."""

import itertools
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

_numbers = itertools.count(1)


class NormRecord(nn.Cell):
    """The norms of `count` gradients, float32: those of the last update, 0 where a micro-step ends no window."""

    def __init__(self, count: int):
        super().__init__(auto_prefix=False)
        # In a list, so that MindSpore does not save it in checkpoints. Its name is unique because two train cells may
        # be compiled into one graph.
        zeros = Tensor(np.zeros(count, np.float32))
        self.kept = [Parameter(zeros, name=f"grad_norms.{next(_numbers)}", requires_grad=False)]

    def construct(self, norms: Tensor) -> Any:
        """Keep the norms."""
        return ops.assign(self.kept[0], norms.astype(mstype.float32))

    def clear(self) -> Any:
        """Set the norms to 0."""
        return ops.assign(self.kept[0], ops.zeros_like(self.kept[0]))

    def values(self, after: Any) -> Tensor:
        """Return the norms as they are once `after` has been computed."""
        return ops.depend(self.kept[0], after) * 1.0
