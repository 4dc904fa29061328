"""Parameters stay where compiled graphs write them, also after a checkpoint was loaded into them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, ops


class ParameterStorage:
    """The memory of Parameters, which MindSpore exchanges in `set_data` and so in `load_param_into_net`.

    A compiled graph's branch, and a compiled optimizer in PYNATIVE_MODE, go on writing to the memory that they were
    compiled with: without this the run after such a load trains on with the old states, or not at all.

    Args:
        parameters: all Parameters of a train cell.
    """

    def __init__(self, parameters: Sequence):
        self._parameters: list[Parameter] = list(parameters)
        self._kept = [_same_memory(parameter) for parameter in self._parameters]
        self._places = self._places_now()

    def _places_now(self) -> list:
        return [parameter.data_ptr() for parameter in self._parameters]

    def restore(self) -> bool:
        """Put values that were set into other memory back where graphs look for them; return whether there were any."""
        places = self._places_now()
        if places == self._places:
            return False
        for parameter, kept, old, new in zip(self._parameters, self._kept, self._places, places):
            if old != new:
                value = Tensor(parameter.asnumpy().copy(), parameter.dtype)
                parameter.set_data(kept)
                ops.assign(parameter, value)
        return True

    def __deepcopy__(self, memo: dict) -> None:
        return None  # a copy of the train cell has Parameters of its own

    def __reduce__(self) -> Any:
        return type(None), ()


def _same_memory(parameter: Parameter) -> Tensor:
    tensor = Tensor(np.zeros(parameter.shape), parameter.dtype)
    tensor.assign_value(parameter)
    return tensor
