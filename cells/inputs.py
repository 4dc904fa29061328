"""What does a call of a train step bring? The network's inputs, by place or by name, and perhaps a scale."""

import inspect

from mindspore import Tensor, nn
from mindspore import dtype as mstype

_SCALE = "scale_sense"


def scale_of_call(scale: Tensor) -> Tensor:
    """Return a scale given as the last input of a call as float32 in its shape."""
    if not isinstance(scale, Tensor) or (scale.shape != () and scale.shape != (1,)):
        raise ValueError(
            "The last input of this train cell is its loss scale and must be a Tensor of shape () or (1,), "
            "for example Tensor([1024.0])."
        )
    return scale.astype(mstype.float32)


def fixed_input_count(network: nn.Cell) -> int:
    """Return how many inputs `network` takes, or -2 where that is not fixed."""
    parameters = list(_signature(network).parameters.values())
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    is_fixed = all(p.kind in plain and p.default is p.empty for p in parameters)
    return len(parameters) if is_fixed else -2


def placed_inputs(network: nn.Cell, inputs: tuple, named: dict, owner: str) -> tuple:
    """Return the inputs of a call with those that came by name in their places, since a graph has no names.

    A name "scale_sense" that the network does not have is the scale of this call, which comes last.

    Raises:
        TypeError: if they don't fit `network.construct`.
    """
    signature = _signature(network)
    scale = (named[_SCALE],) if _SCALE in named and _SCALE not in signature.parameters else ()
    of_network = {name: value for name, value in named.items() if not scale or name != _SCALE}
    try:
        bound = signature.bind(*inputs, **of_network)
        places = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
        if not set(of_network) <= set(places):
            raise TypeError(f"got {sorted(set(of_network) - set(places))}, which have no place")
    except TypeError as error:
        raise TypeError(f"For '{owner}', the inputs don't fit the network's construct{signature}: {error}.") from None
    count = max(len(inputs), *(places.index(name) + 1 for name in of_network), 0)
    bound.apply_defaults()
    return (*bound.args[:count], *scale)


def _signature(network: nn.Cell) -> inspect.Signature:
    signature = inspect.signature(network.construct)
    takes_any = any(parameter.kind == parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    wrapped = getattr(network, "_backbone", None)
    if takes_any and isinstance(wrapped, nn.Cell):  # MindSpore's casting wrappers pass everything on
        return _signature(wrapped)
    return signature
