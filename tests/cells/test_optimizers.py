"""Several optimizers in one step, and learning rates of every family."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.experimental import optim

from lossscale import (
    EMA,
    ClipByGlobalNorm,
    CustomTrainOneStepCell,
    DynamicLossScaleUpdateCell,
    FusedAdam,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import GradientsAsGiven, Poisoned, batch, copy_parameters, mlp
from tests.oracles import parameters, same_bits

NONE = Tensor(np.zeros(4, np.float32))
BAD = Tensor(np.float32([0, 0, 0, np.inf]))


def two_optimizers(net, second=nn.Adam):
    first, last = net.trainable_params()[:2], net.trainable_params()[2:]
    return nn.Momentum(first, 0.1, 0.9), second(last, 0.01)


def train_cell(optimizers=two_optimizers, **options):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    update = DynamicLossScaleUpdateCell(2.0**10, 2, 3)
    return TrainOneStepWithLossScaleCell(net, optimizers(net), update, **options)


class Split(nn.Cell):
    """The oracle: each optimizer called with its own gradients, without a scale."""

    def __init__(self, net, optimizers):
        super().__init__()
        self.optimizers = optimizers
        self.gradients = ms.value_and_grad(net, None, [w for o in optimizers for w in o.parameters])

    def __call__(self, *inputs):
        loss, grads = self.gradients(*inputs)
        self.optimizers[0](grads[:2])
        self.optimizers[1](grads[2:])
        return loss


@pytest.mark.parametrize(
    "second", [nn.Adam, nn.FTRL, optim.Adam, FusedAdam], ids=lambda kind: kind.__module__ + kind.__name__
)
def test_two_optimizers_equal_each_by_itself(mode, second):
    step = train_cell(lambda net: two_optimizers(net, second))
    plain = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    copy_parameters(step.network, plain)
    oracle = Split(plain, two_optimizers(plain, second))
    for seed in range(6):
        np.testing.assert_allclose(
            float(step(*batch(seed=seed), NONE)[0]), float(oracle(*batch(seed=seed), NONE)), 1e-5
        )
    for ours, theirs in zip(step.network.get_parameters(), plain.get_parameters()):
        np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-4, atol=1e-6)


# What a skipped step may move: the state of the dynamic scale.
SCALES = {
    "scale_sense",
    "consecutive_overflows",
    "last_overflow_iterator_step",
    "total_overflows",
    "current_iterator_step",
}
OPTIONS = {
    "plain": {},
    "all": {
        "accumulate_steps": 2,
        "clip_grad": ClipByGlobalNorm(1.0),
        "outputs": ("loss", "overflow", "loss_scale", "grad_norms"),
    },
}


@pytest.mark.parametrize("options", OPTIONS)
def test_all_step_or_none(mode, options):
    step = train_cell(**OPTIONS[options], ema=EMA(0.9))
    micro = OPTIONS[options].get("accumulate_steps", 1)
    for seed in range(micro):
        step(*batch(seed=seed), NONE)
    before = parameters(step)
    outputs = [step(*batch(seed=seed), BAD) for seed in range(micro)]
    assert bool(outputs[-1][1])
    moved = {name for name, value in parameters(step).items() if not same_bits(before[name], value)}
    assert moved == SCALES
    for seed in range(micro):
        step(*batch(seed=seed), NONE)
    after = parameters(step)
    assert all(not same_bits(before[w.name], after[w.name]) for w in step.weights)
    assert [int(o.global_step.asnumpy().item()) for o in step.optimizer.optimizers] == [2, 2]


def test_its_states_have_names_of_their_own_and_a_checkpoint_resumes(mode, tmp_path):
    step = train_cell()
    names = [parameter.name for parameter in step.get_parameters()]
    assert len(set(names)) == len(names) and {"global_step", "optimizer1.global_step"} <= set(names)
    step(*batch(seed=0), NONE)
    ms.save_checkpoint(step, str(tmp_path / "a.ckpt"))
    losses = [float(step(*batch(seed=seed), NONE)[0]) for seed in (1, 2)]
    resumed = train_cell()
    assert ms.load_param_into_net(resumed, ms.load_checkpoint(str(tmp_path / "a.ckpt"))) == ([], [])
    assert [float(resumed(*batch(seed=seed), NONE)[0]) for seed in (1, 2)] == losses
    assert all(same_bits(a, b) for a, b in zip(parameters(step).values(), parameters(resumed).values()))


def test_a_fixed_scale_takes_several_too(mode):
    net = GradientsAsGiven([np.float32([1, 2]), np.float32([3])])
    step = CustomTrainOneStepCell(net, (nn.SGD([net.w[0]], 1.0), nn.SGD([net.w[1]], 0.5)), 8.0)
    step(Tensor(np.float32([1, 1])), Tensor(np.float32([1])))
    assert [w.asnumpy().tolist() for w in net.w] == [[0, 1], [2.5]]


def test_one_in_a_tuple_is_that_one():
    net = GradientsAsGiven([np.float32([1, 2])])
    optimizer = nn.SGD(list(net.w), 1.0)
    assert TrainOneStepWithLossScaleCell(net, [optimizer], Tensor(8.0)).optimizer is optimizer


def test_shared_parameters_and_what_is_no_optimizer_are_refused():
    net = GradientsAsGiven([np.float32([1, 2]), np.float32([3])])
    shared = nn.SGD([net.w[0]], 1.0), nn.SGD(list(net.w), 0.5)
    with pytest.raises(ValueError, match=r"several have \['w0'\]"):
        TrainOneStepWithLossScaleCell(net, shared, Tensor(8.0))
    with pytest.raises(ValueError, match="must not be empty"):
        TrainOneStepWithLossScaleCell(net, (), Tensor(8.0))
    with pytest.raises(TypeError, match="or a tuple of them, but got 3"):
        TrainOneStepWithLossScaleCell(net, (shared[0], 3), Tensor(8.0))
    assert [o.global_step.name for o in shared] == ["global_step"] * 2  # nothing was renamed


def test_an_optimizer_that_divides_is_warned_of_among_several():
    net = GradientsAsGiven([np.float32([1, 2]), np.float32([3])])
    optimizers = nn.SGD([net.w[0]], 1.0), nn.SGD([net.w[1]], 1.0, loss_scale=4.0)
    with pytest.warns(UserWarning, match="loss_scale=4"):
        TrainOneStepWithLossScaleCell(net, optimizers, Tensor(8.0))


SCHEDULE = [0.5, 0.25, 0.125, 0.0625]


def groups(net, **own):
    return [{"params": [net.w[0]], **own}, {"params": [net.w[1]]}, {"params": [net.w[2]], "lr": 0.25}]


RATES = {
    "one": (lambda net: nn.SGD(list(net.w), 0.5), [0.5, 0.5]),
    "schedule": (lambda net: nn.SGD(list(net.w), SCHEDULE), [0.5, 0.25]),
    "groups": (lambda net: nn.SGD(groups(net, lr=0.125), 0.5), [(0.125, 0.5, 0.25)] * 2),
    "groups that share": (lambda net: nn.SGD(groups(net), 0.5), [(0.5, 0.25)] * 2),
    "scheduled groups": (
        lambda net: nn.SGD(
            [{"params": [net.w[0]], "lr": SCHEDULE}, {"params": [net.w[1], net.w[2]], "lr": SCHEDULE[::-1]}], SCHEDULE
        ),
        [(0.5, 0.0625), (0.25, 0.125)],
    ),
    "experimental": (lambda net: optim.SGD(list(net.w), 0.5), [0.5, 0.5]),
    "experimental groups": (lambda net: optim.SGD(groups(net), 0.5), [(0.5, 0.5, 0.25)] * 2),
    "several": (
        lambda net: (nn.SGD([net.w[0]], SCHEDULE), optim.SGD([net.w[1], net.w[2]], 0.125)),
        [(0.5, 0.125), (0.25, 0.125)],
    ),
}


@pytest.mark.parametrize("kind", RATES)
def test_learning_rates_of_the_update(mode, kind):
    make, wanted = RATES[kind]
    net = GradientsAsGiven([np.zeros(2, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, make(net), Tensor(8.0), outputs="learning_rate")
    grads = [Tensor(np.ones(w.shape, np.float32)) for w in net.w]
    for expected in wanted:
        got = step(*grads)
        values = tuple(float(rate) for rate in got) if isinstance(got, tuple) else float(got)
        assert values == expected


def test_an_experimental_rate_that_a_scheduler_sets_is_reported(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    optimizer = optim.SGD(list(net.w), 0.5)
    step = TrainOneStepWithLossScaleCell(net, optimizer, Tensor(8.0), outputs="learning_rate")
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    rates = []
    for _ in range(3):
        rates.append(float(step(Tensor(np.ones(2, np.float32)))))
        scheduler.step()
    assert rates == [0.5, 0.25, 0.125]


def test_an_optimizer_without_a_rate_is_refused():
    class Bare(nn.Cell):
        def __init__(self, weights):
            super().__init__()
            self.parameters = ms.ParameterTuple(weights)

    net = GradientsAsGiven([np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="needs an optimizer with get_lr"):
        TrainOneStepWithLossScaleCell(net, Bare(list(net.w)), Tensor(8.0), outputs="learning_rate")
