"""`find_nonfinite` against values counted by hand."""

import mindspore as ms
import pytest
from mindspore import Tensor, nn

from lossscale import find_nonfinite


def test_find_nonfinite_counts():
    grads = (
        Tensor([1.0, float("inf"), float("-inf"), float("nan"), -7.0]),
        Tensor([[1.0, 2.0]]),
        Tensor([float("nan")], ms.bfloat16),
    )
    found = find_nonfinite(grads, ("a", "b", "c"))
    assert [tuple(each) for each in found] == [("a", 2, 1, 7.0), ("c", 0, 1, 0.0)]


def test_find_nonfinite_takes_parameters_as_names_or_none():
    optimizer = nn.SGD(nn.Dense(2, 1).trainable_params(), learning_rate=0.1)
    grads = (Tensor([[1.0, float("nan")]]), Tensor([1.0]))
    assert find_nonfinite(grads, optimizer.parameters)[0].name == "weight"
    assert find_nonfinite(grads)[0].name == "0"
    assert find_nonfinite((Tensor([1.0]),)) == []


def test_find_nonfinite_refuses():
    with pytest.raises(ValueError, match="one name for each gradient, but got 1 for 2"):
        find_nonfinite((Tensor([1.0]), Tensor([1.0])), ("a",))
    with pytest.raises(TypeError, match="tuple or list"):
        find_nonfinite(Tensor([1.0]))
    with pytest.raises(TypeError, match="must hold Tensors"):
        find_nonfinite((None,))
