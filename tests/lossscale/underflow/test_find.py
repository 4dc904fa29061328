"""The finder against numpy on known gradients; what it leaves untouched; what it refuses."""

import importlib
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from lossscale import find_loss_scale
from tests.nets import batch, mlp
from tests.oracles import parameters, same_bits


class Float16Gradients(nn.Cell):
    """Its gradient is its input, times the scale, rounded to float16."""

    def __init__(self, size=6):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.zeros(size, np.float32)), name="w")
        self.b = ms.Parameter(Tensor(np.zeros(size, np.float32)), name="b")

    def construct(self, x, y):
        product = self.w.astype(ms.float16) * x.astype(ms.float16) + self.b.astype(ms.float16) * y.astype(ms.float16)
        return product.astype(ms.float32).sum()


# As float16, times a scale that float16 holds: normal, subnormal and zero values.
X = np.float32([1.0, -3.0e-5, 6.0e-8, 0.0, 0.5, 2.0**-24])
Y = np.float32([2.0**-20, 2.0**-22, 0.0, 0.0, 2.0**-23, -(2.0**-24)])


def oracle(values, exponent):
    """The gradient in numpy: the seed reaches the product as float16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.float16(np.float32(2.0**exponent)) * values.astype(np.float16)).astype(np.float16)


def test_shares_and_overflows_against_numpy(mode):
    report = find_loss_scale(Float16Gradients(), None, Tensor(X), Tensor(Y), progress=False)
    assert report.largest == 2.0**15  # the seed 2**16 is inf in float16
    assert report.recommended == 2.0**13
    for statistics, values in zip(report.parameters, (X, Y)):
        truth = oracle(values, 15) != 0
        assert statistics.values == truth.sum()
        for exponent in range(33):
            found = statistics.flushed(2.0**exponent)
            gradient = oracle(values, exponent)
            if np.isfinite(gradient).all():
                assert found == np.count_nonzero(truth & (gradient == 0)) / truth.sum()
            else:
                assert math.isnan(found)


class Halved(nn.Cell):
    """Its gradient passes through float16 before it gets small or large: 2**-k of the seed."""

    def __init__(self, exponents):
        super().__init__()
        self.w = ms.Parameter(Tensor(np.zeros(len(exponents), np.float32)), name="w")
        self.factor = Tensor(np.float32(2.0) ** np.float32(exponents))

    def construct(self, x):
        return ((self.w * x).astype(ms.float16).astype(ms.float32) * self.factor).sum()


def test_flushed_share_range_and_recommendation_exact(mode):
    exponents = [-40, -30, -27, -26, -25, -20, -10, -4]
    report = find_loss_scale(Halved(exponents), None, Tensor(np.ones(8, np.float32)), progress=False)
    for exponent in range(33):
        with np.errstate(over="ignore"):
            scaled = (np.float32(2.0) ** np.float32(exponents) * np.float32(2.0**exponent)).astype(np.float16)
        found = report.total.flushed(2.0**exponent)
        if exponent < 20:  # 2**-4 * 2**20 is inf in float16
            kept = np.count_nonzero((np.float32(2.0) ** np.float32(exponents) * 2.0**19).astype(np.float16))
            assert found == 1 - np.count_nonzero(scaled) / kept
        else:
            assert math.isnan(found)
    assert report.total.exponents == {e: 1 for e in exponents if e >= -43}
    assert (report.largest, report.needs_scaling) == (2.0**19, True)
    assert report.smallest == 2.0**16  # 2**-40 * 2**16 = 2**-24
    assert report.recommended == 2.0**17
    assert report.parameters[0].first_overflow() == 2.0**20


class Product(Halved):
    """Its gradient is its input times the seed, both in float16."""

    def construct(self, x):
        return ((self.w * self.factor).astype(ms.float16) * x.astype(ms.float16)).astype(ms.float32).sum()


def test_several_batches_add_up(mode):
    """Batches that overflow first at 2**16 and at 2**8: the smaller counts, whichever comes first."""
    batches = [(Tensor(np.full(8, value, np.float32)),) for value in (1.0, 2.0**8)]
    for order in (batches, batches[::-1]):
        report = find_loss_scale(Product([-4] * 8), None, order, progress=False)
        assert report.total.first_overflow() == 2.0**8
        assert (report.largest, report.recommended) == (2.0**7, 2.0**5)
        assert report.total.values == 16
        assert report.total.exponents == {-4: 8, 4: 8}


def test_the_tolerance_moves_the_smallest_scale():
    net, x = Halved([-40, -30, -27, -26, -25, -20, -10, -4]), Tensor(np.ones(8, np.float32))
    smallest = [find_loss_scale(net, None, x, tolerance=t, progress=False).smallest for t in (0.0, 1 / 8, 1 / 4)]
    assert smallest == [2.0**16, 2.0**6, 2.0**3]  # all kept; all but 2**-40; all but that and 2**-30


def test_the_recommended_scale_is_a_usable_one():
    """Two usable powers: at a quarter of the larger one, values would flush."""
    report = find_loss_scale(Halved([-42, -4]), None, Tensor(np.ones(2, np.float32)), progress=False)
    assert (report.smallest, report.largest, report.recommended) == (2.0**18, 2.0**19, 2.0**18)


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("fails", [False, True])
def test_random_state_stays_as_it_was(seed, fails):
    net, inputs = mlp(), batch()  # these take random numbers
    module = importlib.import_module("mindspore.common.seed")
    module._GLOBAL_SEED = seed
    ms.dataset.config.set_seed(77)
    before, state = np.random.get_state()[1].copy(), ms.get_rng_state().asnumpy()
    if fails:
        with pytest.raises(ValueError, match="Nothing of this backward pass is in float16"):
            find_loss_scale(net, nn.MSELoss(), *inputs, progress=False)
    else:
        find_loss_scale(Halved([-10, -4]), None, Tensor(np.ones(2, np.float32)), progress=False)
    assert (ms.get_seed(), ms.dataset.config.get_seed()) == (seed, 77)
    assert same_bits(np.random.get_state()[1], before)
    assert same_bits(ms.get_rng_state().asnumpy(), state)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
def test_levels_are_tried_on_a_copy_and_nothing_is_touched(mode, level):
    net = nn.SequentialCell(nn.Dense(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dense(16, 4))
    net.set_train(False)
    ms.set_seed(5)
    before, numpy_state, state = parameters(net), np.random.get_state()[1].copy(), ms.get_rng_state().asnumpy()
    report = find_loss_scale(net, nn.MSELoss(), *batch(), amp_level=level, progress=False)
    assert 2.0**8 < report.recommended < 2.0**32
    assert all(same_bits(value, before[name]) for name, value in parameters(net).items())
    assert (ms.get_seed(), net.training) == (5, False)
    assert same_bits(np.random.get_state()[1], numpy_state)
    assert same_bits(ms.get_rng_state().asnumpy(), state)
    assert net[0](batch()[0]).dtype == ms.float32


class WithDropout(nn.Cell):
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.dropout = nn.Dropout(p=0.5)

    def construct(self, x):
        return self.net(self.dropout(x))


@pytest.mark.slow
def test_zeros_of_dropout_do_not_count(mode):
    report = find_loss_scale(WithDropout(), nn.MSELoss(), *batch(), amp_level="O3", progress=False)
    assert report.total.flushed(2.0**8) == 0.0


def test_markdown_holds_the_numbers():
    report = find_loss_scale(Halved([-40, -30, -4, -4]), None, Tensor(np.ones(4, np.float32)), progress=False)
    lines = report.to_markdown().splitlines()
    assert lines[0] == (
        "This network needs loss scaling: at scale 1, 50.00% of its 4 gradient values flush to zero in float16."
    )
    assert lines[2:4] == [
        "- usable scales: 2^16 to 2^19 (no overflow; at the smallest 0.00% flushed)",
        "- recommended initial scale: 2^17 = 131072",
    ]
    table = [f"| 2^{e} | {50 if e < 6 else 25 if e < 16 else 0}.00% |  |" for e in range(20)]
    assert lines[7:28] == [*table, "| 2^20 | - | w |"]
    assert lines[-1] == "| w | 4 | 2^-40 to 2^-4 | 50.00% | 0.00% | 2^20 |"


def test_a_network_without_float16_is_refused(mode):
    with pytest.raises(ValueError, match=r"Nothing of this backward pass is in float16.*amp_level='O2'"):
        find_loss_scale(mlp(), nn.MSELoss(), *batch(), progress=False)


def test_bad_arguments():
    x, y = batch()
    with pytest.raises(ValueError, match="loss of the first batch is nan"):
        find_loss_scale(mlp(), nn.MSELoss(), x, y * math.nan, amp_level="O3", progress=False)
    with pytest.raises(ValueError, match="'amp_level' must be 'O1'"):
        find_loss_scale(mlp(), nn.MSELoss(), x, y, amp_level="fp16", progress=False)
    with pytest.raises(TypeError, match=r"needs the Tensors of one batch.*\['ndarray'\]"):
        find_loss_scale(mlp(), nn.MSELoss(), x.asnumpy(), amp_level="O3", progress=False)
    with pytest.raises(ValueError, match="'tolerance' must be >= 0 and < 1, but got 1"):
        find_loss_scale(mlp(), nn.MSELoss(), x, y, tolerance=1, progress=False)
    with pytest.raises(TypeError, match="'network' must be a Cell"):
        find_loss_scale(ops.relu, None, x)
