"""A loss as numerator and denominator: summed over the window, divided once. Over ranks in tests/distributed."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from lossscale import (
    EMA,
    ClipByGlobalNorm,
    DynamicLossScaleUpdateCell,
    FusedMomentum,
    TrainOneStepWithLossScaleCell,
)
from tests.oracles import parameters, same_bits

OUTPUTS = ("loss", "overflow", "loss_scale", "grad_norm", "updated")


class MaskedLoss(nn.Cell):
    """Squared errors of a linear model, summed where the mask says so, and how many those are."""

    def __init__(self, denominator=ms.float32):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(3, np.float32)), name="w")
        self.dtype = denominator

    def construct(self, x, y, mask):
        errors = (x * self.w).sum(axis=1) - y
        return (errors * errors * mask).sum(), mask.sum().astype(self.dtype), errors


def micro_batches(count, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        mask = (rng.random(16) < rng.choice([0.1, 0.5, 1.0])).astype(np.float32)
        mask[0] = 1
        yield rng.standard_normal((16, 3)).astype(np.float32), rng.standard_normal(16).astype(np.float32), mask


def oracle(weights, batches):
    """The gradient of the mean over all unmasked rows of all batches, in float64."""
    x, y, mask = (np.concatenate(parts).astype(np.float64) for parts in zip(*batches))
    return (2 * (x @ weights - y) * mask) @ x / mask.sum()


CASES = {
    "generic": (nn.Momentum, {}),
    "fused": (FusedMomentum, {}),
    "norm": (FusedMomentum, {"outputs": OUTPUTS}),
    "all": (nn.Momentum, {"outputs": OUTPUTS, "clip_grad": ClipByGlobalNorm(1e9), "ema": 0.9}),
}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_divided_once_by_all_tokens(mode, case, steps):
    make, options = CASES[case]
    options = {name: EMA(value) if name == "ema" else value for name, value in options.items()}
    net = MaskedLoss(ms.int32 if case == "norm" else ms.float32)
    optimizer, update = make([net.w], 0.1, 0.0), DynamicLossScaleUpdateCell(2.0**10, 2, 1000)
    step = TrainOneStepWithLossScaleCell(
        net, optimizer, update, accumulate_steps=steps, calculate_per_token_loss=True, **options
    )
    expected = np.zeros(3)
    for window in range(3):
        batches = list(micro_batches(steps, window))
        grad = oracle(expected, batches)
        for x, y, mask in batches:
            loss, _, _, *others = step(Tensor(x), Tensor(y), Tensor(mask))
            errors = x @ expected - y
            np.testing.assert_allclose(float(loss), (errors**2 * mask).sum() / mask.sum(), rtol=1e-4)
            assert others[-1].shape == (16,)  # what the network returns beside the two
        if "outputs" in options:
            np.testing.assert_allclose(float(others[0]), np.linalg.norm(grad), rtol=1e-5)
        expected -= 0.1 * grad
        np.testing.assert_allclose(net.w.asnumpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("steps", [1, 2])
def test_an_overflow_drops_the_window_and_its_tokens(mode, steps):
    net = MaskedLoss()
    step = TrainOneStepWithLossScaleCell(
        net,
        nn.SGD([net.w], 0.1),
        DynamicLossScaleUpdateCell(2.0**10, 2, 1000),
        accumulate_steps=steps,
        calculate_per_token_loss=True,
    )
    batches = list(micro_batches(2 * steps))
    for i, (x, y, mask) in enumerate(batches):
        y = y * (np.inf if i == 0 else 1)
        _, overflow, *_ = step(Tensor(x), Tensor(y), Tensor(mask))
        if i == steps - 1:
            assert bool(overflow) and net.w.asnumpy().tolist() == [0, 0, 0]
    np.testing.assert_allclose(net.w.asnumpy(), -0.1 * oracle(np.zeros(3), batches[steps:]), rtol=1e-5)


@pytest.mark.parametrize("steps", [1, 2])
def test_no_token_at_all_is_a_gradient_of_zero(mode, steps):
    net = MaskedLoss()
    step = TrainOneStepWithLossScaleCell(
        net, nn.SGD([net.w], 0.1), Tensor(8.0), accumulate_steps=steps, calculate_per_token_loss=True
    )
    for x, y, mask in micro_batches(steps):
        loss, overflow, *_ = step(Tensor(x), Tensor(y), Tensor(mask * 0))
        assert (float(loss), bool(overflow)) == (0, False)
    assert net.w.asnumpy().tolist() == [0, 0, 0]


def test_the_largest_scale_divides_by_many_tokens(mode):
    class Many(MaskedLoss):
        def construct(self, x):
            return (self.w * x).sum() * 2.0**20, x.sum() * 0 + 2.0**20

    net = Many()
    step = TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 1.0), Tensor(2.0**126), calculate_per_token_loss=True)
    step(Tensor(np.float32([2.0**-20, 0, 0])))
    assert net.w.asnumpy().tolist() == [-(2.0**-20), 0, 0]


def test_a_checkpoint_holds_the_tokens_of_an_unfinished_window(mode, tmp_path):
    def cell():
        net = MaskedLoss()
        optimizer = nn.Momentum([net.w], 0.1, 0.9)
        return TrainOneStepWithLossScaleCell(
            net, optimizer, Tensor(8.0), accumulate_steps=3, calculate_per_token_loss=True
        )

    whole, resumed = cell(), cell()
    batches = [tuple(map(Tensor, each)) for each in micro_batches(6)]
    for each in batches[:4]:
        whole(*each)
    ms.save_checkpoint(whole, str(tmp_path / "a.ckpt"))
    assert ms.load_param_into_net(resumed, ms.load_checkpoint(str(tmp_path / "a.ckpt"))) == ([], [])
    for each in batches[4:]:
        whole(*each)
        resumed(*each)
    assert all(same_bits(a, b) for a, b in zip(parameters(whole).values(), parameters(resumed).values()))


@pytest.mark.parametrize("other", ["one", "vector", "number"])
def test_another_output_of_the_network_is_refused(mode, other):
    class Other(MaskedLoss):
        def construct(self, x):
            loss = (self.w * x).sum()
            if other == "one":
                return loss
            return (loss, x) if other == "vector" else (loss, 3)

    net = Other()
    step = TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 1.0), Tensor(8.0), calculate_per_token_loss=True)
    with pytest.raises((TypeError, ValueError), match="calculate_per_token_loss"):
        step(Tensor(np.float32([1, 1, 1])))


def test_the_argument_is_a_bool():
    net = MaskedLoss()
    with pytest.raises(TypeError, match="calculate_per_token_loss"):
        TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 1.0), Tensor(8.0), calculate_per_token_loss=1)
