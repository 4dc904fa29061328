"""`all_finite`: is there no inf and no nan in any of these Tensors? Eager and in compiled graphs."""

from functools import cache
from typing import Any

from mindspore import Tensor, amp, context, ops
from mindspore import dtype as mstype
from mindspore.ops.primitive import PrimitiveWithInfer, constexpr

from cells.backends import backend
from cells.gradient_ops import has_nonfinite
from cells.native import NativeArithmetic
from cells.trees import check_tree, flatten

# Bound here: patch_mindspore() puts ours under MindSpore's name, and a look-up at the call would find that.
_stock_all_finite = amp.all_finite

_FLOATS = (mstype.float32, mstype.float16, mstype.bfloat16, mstype.float64)
_map = ops.Map()


def all_finite(inputs: Any) -> Tensor:
    """Return whether no value of any Tensor is inf or nan.

    Works eagerly and inside `@ms.jit` and `construct`, without reading the device. On CPU it is exact for every
    floating dtype; on Ascend and GPU it is `mindspore.amp.all_finite`, whose result depends on the device there.

    Args:
        inputs: a Tensor, or Tensors in nested tuples, lists and dicts.

    Returns:
        Tensor, bool, shape (). True where `inputs` holds no Tensor at all.

    Raises:
        TypeError: if something else than Tensors, tuples, lists and dicts is in `inputs`.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import all_finite
        >>> from mindspore import Tensor
        >>> print(all_finite((Tensor([1.0, 2.0]), [Tensor(float("inf"))])))
        False
    """
    check_tree(inputs)
    return ops.logical_not(any_nonfinite(inputs))


class _Way(PrimitiveWithInfer):
    """How a tuple or list is looked at, a str known when a graph is built: "empty", "nested", or by whom."""

    def __init__(self):
        super().__init__("way_to_look")
        self.set_const_prim(True)
        self.add_prim_attr("constexpr_prim", True)
        self.add_prim_attr("forbid_reuse_result", True)  # the backend may have been changed

    def __infer__(self, tensors: dict) -> dict:
        dtypes = [getattr(kind, "element_type", lambda kind=kind: kind)() for kind in tensors["dtype"]]
        return {"dtype": None, "shape": None, "value": _way(dtypes)}

    def __call__(self, tensors: tuple) -> str:
        return _way([tensor.dtype if isinstance(tensor, Tensor) else None for tensor in tensors])


def _way(dtypes: list) -> str:
    if not dtypes:
        return "empty"
    if any(isinstance(dtype, (tuple, list, dict)) for dtype in dtypes):
        return "nested"
    if context.get_context("device_target") != "CPU":
        return "device"
    return "native" if backend() == "native" and all(dtype in _FLOATS for dtype in dtypes) else "plain"


way_to_look = _Way()


@cache
def native_arithmetic() -> NativeArithmetic:
    """Return the native kernel's arithmetic, built at the first use: on other devices there is none."""
    return NativeArithmetic(norms=False)


@constexpr
def _native_look() -> ops.Custom:
    return native_arithmetic().look_op


class _AnyNonfinite(ops.MultitypeFuncGraph):
    """Whether any value of a tree is inf or nan: in a graph one function for each type of node, eager a flat tuple."""

    def __call__(self, tree: Any) -> Tensor:
        return _look(flatten(tree))


any_nonfinite = _AnyNonfinite("any_nonfinite")


@any_nonfinite.register("Tuple")
@any_nonfinite.register("List")
def _in_sequence(tree):
    return _look(tree)


@any_nonfinite.register("Dictionary")
def _in_dict(tree):
    return _look(tuple(tree.values()))


@any_nonfinite.register("Tensor")
@any_nonfinite.register("RowTensor")
def _in_tensor(tensor):
    return _look((tensor,))


def _look(tensors: Any) -> Tensor:
    way = way_to_look(tensors)
    if way == "empty":
        return Tensor(False, mstype.bool_)
    if way == "nested":
        return ops.stack(_map(any_nonfinite, tensors)).any()
    if way == "native":
        # The kernel can't be differentiated, and an `if` on its answer in a forward function would ask for that.
        look = _native_look()
        return ops.stop_gradient(look(Tensor(1.0, mstype.float32), *ops.stop_gradient(tensors))[0]).reshape(())
    if way == "plain":
        return has_nonfinite(tensors)
    return ops.logical_not(_stock_all_finite(tensors))
