"""Nested tuples, lists and dicts of Tensors: one function for each Tensor, eager and in compiled graphs."""

from typing import Any, Callable

from mindspore import Tensor, ops
from mindspore.common import dtype as mstype
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.ops.primitive import PrimitiveWithInfer

# Not "whatever is no TensorType": MindSpore learns the type of a sparse gradient late.
_NO_TENSORS = (type(None), *(type(kind) for kind in (mstype.number, mstype.bool_, mstype.string, mstype.type_type)))


class TreeMap(ops.HyperMap):
    """`function` applied to each Tensor of a tree, which keeps its structure.

    In a compiled graph this is MindSpore's HyperMap, which goes through tuples, lists and dicts by itself: a loop in
    Python would be unrolled there and take seconds to compile. Eager, HyperMap leaves dicts alone and makes tuples of
    lists, so `__call__`, which compiled code does not use, goes through them here.

    Inputs:
        - **function** (Callable) - takes one Tensor.
        - **tree** - a Tensor, or Tensors in nested tuples, lists and dicts.

    Raises:
        TypeError: if something else is in the tree.
    """

    def __call__(self, function: Callable, tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: self(function, value) for key, value in tree.items()}
        if isinstance(tree, (tuple, list)):
            return type(tree)([self(function, value) for value in tree])
        _check_tensor(tree)
        return function(tree)


class _CheckTree(PrimitiveWithInfer):
    """Raise TypeError where a tree holds something else than Tensors: while a graph is built, and eager never."""

    def __init__(self):
        super().__init__("check_tree")
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)

    def __infer__(self, tree: dict) -> dict:
        _check_types(tree["dtype"])
        return {"dtype": None, "shape": None, "value": True}

    def __call__(self, tree: Any) -> bool:
        return True  # TreeMap and flatten look at each value themselves


def flatten(tree: Any) -> tuple:
    """Return the Tensors in `tree` as one flat tuple, in order. Not for compiled code.

    Raises:
        TypeError: if something else than a Tensor, tuple, list or dict is in it.
    """
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    if isinstance(tree, (tuple, list)):
        return tuple([tensor for value in tree for tensor in flatten(value)])
    _check_tensor(tree)
    return (tree,)


def _check_tensor(value: Any) -> None:
    if not isinstance(value, (Tensor, RowTensorInner)):
        _refuse(value)


def _check_types(types: Any) -> None:
    if isinstance(types, dict):
        types = tuple(types.values())
    if isinstance(types, (tuple, list)):
        for each in types:
            _check_types(each)
    elif isinstance(types, _NO_TENSORS):
        _refuse(types)


def _refuse(value: Any) -> None:
    raise TypeError(
        f"Expected a Tensor, or Tensors in tuples, lists or dicts, but got {value}. Write Tensor(1.5) for a number; "
        "leave out what has no gradient."
    )


tree_map = TreeMap()
check_tree = _CheckTree()
