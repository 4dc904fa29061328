"""`all_finite` in every dtype, place and nest, eager and compiled."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import all_finite

BAD = (float("inf"), float("-inf"), float("nan"))
DTYPES = (ms.float16, ms.bfloat16, ms.float32, ms.float64)


@pytest.fixture(params=("native", "plain"))
def each_backend(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")


def compiled(inputs):
    """`all_finite` inside a compiled function, of what was computed there."""

    @ms.jit
    def check(*tensors):
        return all_finite([tensor * 1 for tensor in tensors])

    return check(*inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", (all_finite, compiled))
def test_all_finite_finds_every_value_in_every_dtype(mode, each_backend, check, dtype):
    assert bool(check((Tensor([1.0, 60000.0], dtype), Tensor(-2.0, dtype))))
    for bad in BAD:
        assert not bool(check((Tensor([1.0, 2.0], dtype), Tensor(bad, dtype)))), bad


def test_all_finite_finds_inf_and_nan_in_each_position(each_backend):
    for size in (1, 7, 64, 1000):
        for place in {0, size // 2, size - 1}:
            for bad in BAD:
                values = np.ones(size, np.float32)
                values[place] = bad
                assert not bool(all_finite((Tensor(np.ones(3, np.float32)), Tensor(values))))


def test_all_finite_when_sums_overflow(each_backend):
    assert bool(all_finite((Tensor([3e38, 3e38, 3e38], ms.float32), Tensor([60000.0] * 9, ms.float16))))


@pytest.mark.parametrize("empty", ((), [], {}, ((), [])))
def test_all_finite_of_nothing_is_true(mode, empty):
    assert bool(all_finite(empty))


def test_all_finite_of_nested_and_bare_inputs(mode, each_backend):
    good, bad = Tensor([1.0, 2.0]), Tensor([float("nan")])
    assert bool(all_finite(good))
    assert bool(all_finite({"a": good, "b": (good, [good])}))
    assert not bool(all_finite(bad))
    assert not bool(all_finite((good, {"b": (good, [bad])})))


def test_all_finite_of_transposed_and_sliced_tensors(each_backend):
    values = np.ones((4, 6), np.float32)
    values[3, 1] = np.inf
    tensor = Tensor(values)
    assert not bool(all_finite(ms.mint.transpose(tensor, 0, 1)))
    assert not bool(all_finite(tensor[:, 1:2]))
    assert bool(all_finite(tensor[:, 2:]))


def test_all_finite_of_integers(mode):
    assert bool(all_finite((Tensor([1, 2], ms.int32), Tensor([1.0]))))


def test_all_finite_in_a_cell(mode, each_backend):
    class Net(nn.Cell):
        def construct(self, x, y):
            return all_finite((x, {"y": y}))

    net = Net()
    assert bool(net(Tensor([1.0]), Tensor([2.0])))
    assert not bool(net(Tensor([1.0]), Tensor([float("inf")])))


def test_all_finite_decides_inside_a_differentiated_function(mode):
    def loss(x):
        y = x * x
        result = y.sum()
        if all_finite(y):
            result = result * 2
        return result

    grad = ms.jit(ms.grad(loss))(Tensor([1.0, 3.0]))
    np.testing.assert_array_equal(grad.asnumpy(), [4.0, 12.0])


@pytest.mark.parametrize("inputs", (None, 1.0, (Tensor([1.0]), None)))
def test_all_finite_refuses_what_is_no_tensor(inputs):
    with pytest.raises(TypeError, match="Expected a Tensor"):
        all_finite(inputs)
