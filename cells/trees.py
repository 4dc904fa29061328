"""Nested tuples, lists and dicts of Tensors, the same in Python and in compiled graphs."""

from typing import Any, Callable

from mindspore import Tensor
from mindspore.common.sparse_tensor import RowTensorInner


def map_tensors(function: Callable, tree: Any) -> Any:
    """Return `tree` with `function` applied to each Tensor in it.

    Raises:
        TypeError: if something else than a Tensor, tuple, list or dict is in it.
    """
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple([map_tensors(function, value) for value in tree])
    if isinstance(tree, list):
        return [map_tensors(function, value) for value in tree]
    _check_tensor(tree)
    return function(tree)


def flatten(tree: Any) -> tuple:
    """Return the Tensors in `tree` as one flat tuple, in order.

    Raises:
        TypeError: if something else than a Tensor, tuple, list or dict is in it.
    """
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        tensors: tuple = ()
        for value in tree:
            tensors = tensors + flatten(value)
        return tensors
    _check_tensor(tree)
    return (tree,)


def _check_tensor(value: Any) -> None:
    if not isinstance(value, (Tensor, RowTensorInner)):
        raise TypeError(
            f"Expected a Tensor, or Tensors in tuples, lists or dicts, but got {value}. Write Tensor(1.5) for a "
            "number; leave out what has no gradient."
        )
