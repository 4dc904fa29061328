"""Native and plain gradient arithmetic through MindSpore: the same results, and the choice between them."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import lossscale
from cells.backends import gradient_arithmetic
from cells.gradient_ops import PlainArithmetic
from cells.native import NativeArithmetic, library_path

needs_native = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")


class Calls(nn.Cell):
    """One method of the gradient arithmetic as a network."""

    def __init__(self, method, arithmetic=None):
        super().__init__()
        self.arithmetic = arithmetic or gradient_arithmetic()
        self.method = method

    def construct(self, grads, factor):
        if self.method == "divide":
            return self.arithmetic.divide_and_look(factor, grads)
        if self.method == "multiply":
            return self.arithmetic.multiply(factor, grads)
        return self.arithmetic.look(factor, grads)


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "plain"])
def backend(request, monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", request.param)
    return request.param


def gradients():
    rng = np.random.default_rng(0)
    shapes = [((4, 5), ms.float16), ((7,), ms.bfloat16), ((), ms.float32), ((3, 1, 2), ms.float32), ((6,), ms.float64)]
    return tuple(Tensor(rng.standard_normal(shape)).astype(dtype) for shape, dtype in shapes)


def wide(grads):
    return [grad.astype(ms.float64).asnumpy() for grad in grads]


def test_methods_agree_with_numpy(mode, backend):
    grads = gradients()
    products, flags, norms = Calls("divide")(ms.mutable(grads), Tensor(8.0))
    assert flags.shape == (5,) and not flags.any()
    assert [product.dtype for product in products] == [ms.float32] * 4 + [ms.float64]
    for product, grad, given in zip(wide(products), wide(grads), grads):
        np.testing.assert_array_equal(product, grad / 8)
        assert product.shape == given.shape
    wanted = [np.sqrt(np.square(grad).sum()) for grad in wide(grads)]
    np.testing.assert_allclose(norms.asnumpy(), np.array(wanted) / 8, rtol=1e-12)
    flags, norms = Calls("look")(ms.mutable(grads), Tensor(2.0))
    assert norms.dtype == ms.float64 and not flags.any()
    np.testing.assert_allclose(norms.asnumpy(), np.array(wanted) / 2, rtol=1e-12)


def test_one_factor_or_one_for_each(mode, backend):
    grads = gradients()
    multiply = Calls("multiply")
    for factor in (np.float64(0.25), np.array([1, 2, 0, 0.5, 4.0])):
        products = multiply(ms.mutable(grads), Tensor(factor))
        for product, grad, own in zip(wide(products), wide(grads), np.broadcast_to(factor, 5)):
            np.testing.assert_array_equal(product, grad * own)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_flags_name_the_gradient(mode, backend, value):
    grads = gradients()
    divide, look = Calls("divide"), Calls("look")
    for index, grad in enumerate(grads):
        array = grad.astype(ms.float32).asnumpy().copy()
        array.reshape(-1)[-1] = value
        dirty = (*grads[:index], Tensor(array).astype(grad.dtype), *grads[index + 1 :])
        wanted = [i == index for i in range(5)]
        assert divide(ms.mutable(dirty), Tensor(8.0))[1].asnumpy().tolist() == wanted
        assert look(ms.mutable(dirty), Tensor(1.0))[0].asnumpy().tolist() == wanted


def test_finite_values_whose_sum_is_infinite_are_no_overflow(mode, backend):
    grads = ms.mutable((Tensor(np.full(8, 3e38, np.float32)), Tensor(np.ones(2, np.float32))))
    assert not Calls("divide")(grads, Tensor(1.0))[1].any()


def test_norms_whose_square_float32_cannot_hold(mode, backend):
    grads = ms.mutable((Tensor(np.float32([3e30, 0])), Tensor(np.float32([4e30]))))
    for divisor in (1.0, 2.0):
        flags, norms = Calls("look")(grads, Tensor(divisor))
        _, other_flags, other_norms = Calls("divide")(grads, Tensor(divisor))
        assert not flags.any() and not other_flags.any()
        assert norms.asnumpy().tolist() == pytest.approx([3e30 / divisor, 4e30 / divisor])
        np.testing.assert_array_equal(norms.asnumpy(), other_norms.asnumpy())


@needs_native
def test_native_and_plain_agree_to_the_bit(mode):
    rng = np.random.default_rng(1)
    values = rng.standard_normal(4096).astype(np.float32) * 2.0 ** rng.integers(-60, 60, 4096).astype(np.float32)
    grads = ms.mutable((Tensor(values), Tensor(values.astype(np.float64))))
    for scale in (3.0, 1000.0, 2.0**24, 1e30):
        native = Calls("divide", NativeArithmetic())(grads, Tensor(scale, ms.float32))[0]
        plain = Calls("divide", PlainArithmetic())(grads, Tensor(scale, ms.float32))[0]
        for one, other in zip(native, plain):
            # MindSpore's own ops flush subnormal results to zero, the kernel keeps them.
            normal = np.abs(one.asnumpy()) >= np.finfo(np.float32).tiny
            assert normal.mean() > 0.5
            np.testing.assert_array_equal(one.asnumpy()[normal], other.asnumpy()[normal])


@needs_native
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_gradients(mode, shape):
    grads = ms.mutable((Tensor(np.zeros(shape, np.float32)), Tensor(np.ones(2, np.float32))))
    products, flags, _ = Calls("divide", NativeArithmetic())(grads, Tensor(2.0))
    assert products[0].shape == shape and not flags.any()


@needs_native
def test_native_keeps_subnormals(mode):
    grads = ms.mutable((Tensor(np.full(3, 2.0**-120, np.float32)), Tensor(np.full(3, 2.0**120, np.float32))))
    (small, _), _, _ = Calls("divide", NativeArithmetic())(grads, Tensor(2.0**20))
    assert small.asnumpy().tolist() == [2.0**-140] * 3
    products, _, _ = Calls("divide", NativeArithmetic())(grads, Tensor(2.0**127))
    assert products[1].asnumpy().tolist() == [2.0**-7] * 3


def training_run(steps=12):
    ms.set_seed(3)
    np.random.seed(3)
    net = nn.SequentialCell(nn.Dense(5, 9), nn.ReLU(), nn.Dense(9, 2))
    optimizer = nn.Adam(net.trainable_params(), 0.05)
    update = lossscale.DynamicLossScaleUpdateCell(2.0**126, 8, 2)
    step = lossscale.TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update)
    inputs = 20 * np.random.default_rng(0).standard_normal((steps, 4, 5)).astype(np.float32)
    results = [[float(value) for value in step(Tensor(x), Tensor(x[:, :2]))] for x in inputs]
    return results, [parameter.asnumpy() for parameter in net.trainable_params()]


@needs_native
def test_training_runs_are_equal(mode, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    plain, plain_weights = training_run()
    monkeypatch.setenv("LOSSSCALE_BACKEND", "native")
    native, native_weights = training_run()
    assert native == plain and {overflow for _, overflow, _ in native} == {0.0, 1.0}
    for one, other in zip(native_weights, plain_weights):
        np.testing.assert_array_equal(one, other)
    assert list(tmp_path.iterdir()) == []  # the op leaves nothing in the working folder


def test_nonfinite_parameters_names_those_of_the_last_overflow(mode, backend):
    net = nn.SequentialCell(nn.Dense(3, 3), nn.Dense(3, 1))
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    step = lossscale.TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, Tensor(2.0))
    y = Tensor(np.zeros((2, 1), np.float32))
    step(Tensor(np.ones((2, 3), np.float32)), y)
    assert step.nonfinite_parameters() == []
    net[1].weight.set_data(Tensor(np.full((1, 3), 1e38, np.float32)))
    net[0].weight.set_data(Tensor(np.zeros((3, 3), np.float32)))
    _, overflow, _ = step(Tensor(np.full((2, 3), 1e3, np.float32)), y + 100.0)
    assert overflow and step.nonfinite_parameters() == ["0.weight", "0.bias"]
    assert "overflow_flags" not in step.parameters_dict()


class _Narrow(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(2), ms.float16), name="narrow")

    def construct(self, x):
        return (self.weight.astype(ms.float32) * x).sum()


def test_a_gradient_that_overflows_its_parameters_dtype_is_an_overflow(mode, backend):
    net = _Narrow()
    optimizer = nn.SGD(net.trainable_params(), 1.0)
    step = lossscale.TrainOneStepWithLossScaleCell(net, optimizer, Tensor(2.0**-4))
    _, overflow, _ = step(Tensor(np.float32([1, 2])))
    assert not overflow
    _, overflow, _ = step(Tensor(np.float32([1, 1e5])))
    assert overflow and step.nonfinite_parameters() == ["narrow"]


def test_the_environment_variable_forces_the_plain_ops(monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    assert lossscale.backend() == "plain"
    assert isinstance(gradient_arithmetic(), PlainArithmetic)
    monkeypatch.setenv("LOSSSCALE_BACKEND", "gpu")
    with pytest.raises(ValueError, match="must be 'native' or 'plain', but got 'gpu'"):
        lossscale.backend()


def test_a_missing_kernel_means_plain_and_can_not_be_forced(monkeypatch):
    monkeypatch.setattr("cells.backends.library_path", lambda: None)
    monkeypatch.delenv("LOSSSCALE_BACKEND", raising=False)
    assert lossscale.backend() == "plain"
    monkeypatch.setenv("LOSSSCALE_BACKEND", "native")
    with pytest.raises(RuntimeError, match="was not built"):
        lossscale.backend()


@needs_native
def test_the_kernel_is_used_where_it_is_built(monkeypatch):
    monkeypatch.delenv("LOSSSCALE_BACKEND", raising=False)
    assert lossscale.backend() == "native"
    assert isinstance(gradient_arithmetic(), NativeArithmetic)
