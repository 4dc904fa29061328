"""The fused twin of a stock optimizer shares all it has; what has no twin stays what it was."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

import cells.fused
import lossscale
from cells.native import library_path
from tests.cells.test_fused_options import OPTIONS, given, take
from tests.nets import batch, copy_parameters, mlp
from tests.oracles import parameters

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")

TWINS = {
    lossscale.FusedSGD: lambda params: nn.SGD(params, 0.1, 0.9),
    lossscale.FusedMomentum: lambda params: nn.Momentum(params, 0.1, 0.9),
    lossscale.FusedAdam: lambda params: nn.Adam(params, 0.01),
    lossscale.FusedAdamWeightDecay: lambda params: nn.AdamWeightDecay(params, 0.01),
    lossscale.FusedAdamW: lambda params: optim.AdamW(params, 0.01),
}


@pytest.fixture(autouse=True)
def no_warning_was_given(monkeypatch):
    monkeypatch.setattr(cells.fused, "_warned", set())


def train_cell(optimizer_of, net=None, **options):
    net = net or mlp()
    update = lossscale.DynamicLossScaleUpdateCell(1024.0, 2, 100)
    network = nn.WithLossCell(net, nn.MSELoss())
    return lossscale.TrainOneStepWithLossScaleCell(network, optimizer_of(net), update, **options)


def assert_train_alike(stock, fused, steps=5, between=None):
    """Train both from the first one's state and compare all values; two steps overflow."""
    copy_parameters(stock, fused)
    x, y = batch()
    for i in range(steps):
        for step in (stock, fused):
            step(x * np.inf if i in (1, 4) else x * (i + 1.0), y)
            if between is not None:
                between(step, i)
    after = parameters(fused)
    for name, value in parameters(stock).items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind", TWINS)
def test_a_twin_shares_parameters_and_goes_on_where_the_other_stopped(mode, kind):
    net = mlp()
    optimizer = TWINS[kind](net.trainable_params())
    twin = lossscale.fuse(optimizer)
    assert type(twin) is kind and lossscale.fuse(twin) is twin
    assert [id(p) for p in twin.get_parameters()] == [id(p) for p in optimizer.get_parameters()]
    alone = train_cell(lambda other: TWINS[kind](other.trainable_params()))
    copy_parameters(net, alone.network)
    x, y = batch()
    for i, each in enumerate((optimizer, twin, twin, optimizer)):
        # One step each, on the same weights: plain, fused, fused, plain.
        network = nn.WithLossCell(net, nn.MSELoss())
        lossscale.TrainOneStepWithLossScaleCell(network, each, Tensor(8.0))(x * (i + 1.0), y)
        alone(x * (i + 1.0), y)
    for parameter, value in zip(net.trainable_params(), alone.weights):
        np.testing.assert_allclose(parameter.asnumpy(), value.asnumpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", TWINS)
def test_accumulating_clipping_and_averaging_equals_the_generic_path(mode, kind):
    def full(finish):
        return train_cell(
            lambda net: finish(TWINS[kind](net.trainable_params())),
            accumulate_steps=2,
            clip_grad=lossscale.ClipByGlobalNorm(0.5),
            ema=lossscale.EMA(0.9),
            outputs=("overflow", "grad_norm", "updated"),
        )

    stock, fused = full(lambda optimizer: optimizer), full(lossscale.fuse)
    assert (stock._stage_fusion, fused._stage_fusion) == (None, "factor")
    before = parameters(fused)
    assert_train_alike(stock, fused, steps=8)
    still = [name for name in before if (parameters(fused)[name] == before[name]).all()]
    assert not {*(p.name for p in fused.weights), *(p.name for p in fused.ema.shadows)} & set(still)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "learning rate"])
def test_every_option_is_obeyed_with_adamw(name):
    ms.set_context(mode=ms.GRAPH_MODE)

    def build(finish):
        def optimizer(params, *_):
            return finish(optim.AdamW(params, 0.1))

        return given(optimizer, lossscale.DynamicLossScaleUpdateCell(8.0, 2, 2), **OPTIONS[name]())

    stock, fused = build(lambda optimizer: optimizer), build(lossscale.fuse)
    assert fused._stage_fusion == "factor"
    for grad in ((3, 4), (1, 2), (30, 40), (np.inf, 1), (3, 4)):
        np.testing.assert_array_equal(*[[value.asnumpy() for value in take(step, grad)] for step in (stock, fused)])
    for key, value in parameters(stock).items():
        np.testing.assert_allclose(parameters(fused)[key], value, rtol=1e-6, err_msg=key)


class Normed(nn.Cell):
    """Dense layers with a BatchNorm, whose gamma and beta MindSpore's optimizers don't decay."""

    def __init__(self):
        super().__init__()
        self.dense1, self.norm, self.dense2 = nn.Dense(8, 6), nn.BatchNorm1d(6), nn.Dense(6, 4)
        self.norm.gamma.set_data(Tensor(np.linspace(1, 3, 6, dtype=np.float32)))

    def construct(self, x):
        return self.dense2(self.norm(self.dense1(x)))


@pytest.mark.parametrize(
    "make", [lambda p: nn.Momentum(p, 0.1, 0.9, weight_decay=0.5), lambda p: nn.SGD(p, 0.1, weight_decay=0.5)]
)
def test_gamma_and_beta_do_not_decay(mode, make):
    def build(finish):
        return train_cell(lambda net: finish(make(net.trainable_params())), Normed())

    assert_train_alike(build(lambda optimizer: optimizer), build(lossscale.fuse))


class Decay(nn.Cell):
    """A weight-decay schedule."""

    def construct(self, step):
        return 0.1 / (step.astype(ms.float32).reshape(()) + 1)


def grouped(**options):
    """An optimizer whose first group has options of its own."""

    def make(net):
        first, *others = net.trainable_params()
        return nn.Momentum([{"params": [first], **options}, {"params": others}], 0.1, 0.9)

    return make


@pytest.mark.parametrize(
    "make, reason",
    [
        (grouped(grad_centralization=True), "gradients are centralized"),
        (grouped(weight_decay=Decay()), "a group has a weight-decay schedule"),
        (lambda net: nn.Momentum(net.trainable_params(), 0.1, 0.9, loss_scale=2.0), "loss_scale of its own"),
        (lambda net: nn.Adam(net.trainable_params(), use_amsgrad=True), "use_amsgrad is not covered"),
        (lambda net: nn.Adam(net.trainable_params(), use_lazy=True), "use_lazy is not covered"),
        (lambda net: optim.AdamW(net.trainable_params(), amsgrad=True), "amsgrad is not covered"),
        (lambda net: optim.AdamW(net.trainable_params(), maximize=True), "maximize is not covered"),
        (
            lambda net: optim.AdamW(
                [{"params": net.trainable_params()[:1], "eps": 0.1}, {"params": net.trainable_params()[1:]}]
            ),
            "betas or eps of its own",
        ),
        (lambda net: nn.RMSProp(net.trainable_params()), "RMSProp.*only SGD, Momentum, Adam, AdamWeightDecay, AdamW"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_has_no_twin_stays_and_says_why_once(make, reason):
    optimizer = make(mlp())
    with pytest.warns(UserWarning, match=reason) as seen:
        assert lossscale.fuse(optimizer) is optimizer
        assert lossscale.fuse(optimizer) is optimizer
    assert len(seen) == 1


@pytest.mark.parametrize("options", [{"grad_centralization": True}, {"weight_decay": Decay()}], ids=str)
def test_groups_that_are_not_covered_train_like_stock(mode, options):
    def fused_groups(net):
        first, *others = net.trainable_params()
        groups = [{"params": [first], **options}, {"params": others}]
        with pytest.warns(UserWarning, match="runs like MindSpore's own optimizer"):
            return lossscale.FusedMomentum(groups, 0.1, 0.9)

    assert_train_alike(train_cell(grouped(**options)), train_cell(fused_groups))


class OwnMomentum(nn.Momentum):
    """An optimizer of one's own; nobody knows what it overrides."""


def test_a_derived_optimizer_stays_and_rubbish_is_refused():
    optimizer = OwnMomentum(mlp().trainable_params(), 0.1, 0.9)
    with pytest.warns(UserWarning, match="OwnMomentum"):
        assert lossscale.fuse(optimizer) is optimizer
    with pytest.raises(TypeError, match=r"must be an optimizer .* but got Dense"):
        lossscale.fuse(nn.Dense(1, 1))


def test_without_the_native_kernel_it_stays(monkeypatch):
    monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    optimizer = nn.SGD(mlp().trainable_params(), 0.1)
    with pytest.warns(UserWarning, match="native kernel does not run here"):
        assert lossscale.fuse(optimizer) is optimizer


@pytest.mark.parametrize("make", [lambda p: nn.Momentum(p, 0.1, 0.9), lambda p: nn.SGD(p, 0.1, 0.9)])
def test_the_momentum_that_a_checkpoint_brings_counts(mode, make):
    def change(step, i):
        if i == 1:
            ops.assign(step.optimizer.momentum, Tensor(0.25))

    def build(finish):
        return train_cell(lambda net: finish(make(net.trainable_params())))

    assert_train_alike(build(lambda optimizer: optimizer), build(lossscale.fuse), between=change)


def test_a_scheduler_of_adamw_moves_the_rate_of_its_groups(mode):
    schedulers = {}

    def build(finish):
        def optimizer_of(net):
            first, *others = net.trainable_params()
            stock = optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], 0.01)
            optimizer = finish(stock)
            schedulers[optimizer] = optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
            return optimizer

        return train_cell(optimizer_of)

    stock, fused = build(lambda optimizer: optimizer), build(lossscale.fuse)
    assert_train_alike(stock, fused, between=lambda step, _: schedulers[step.optimizer].step())
    np.testing.assert_allclose(fused.optimizer.lrs[0].asnumpy(), 0.001, rtol=1e-5)


def test_a_number_put_into_a_group_of_adamw_is_its_rate(mode):
    def build(finish):
        def optimizer_of(net):
            optimizer = finish(optim.AdamW(net.trainable_params(), 0.01))
            optimizer.param_groups[0]["lr"] = 0.3
            return optimizer

        return train_cell(optimizer_of)

    assert_train_alike(build(lambda optimizer: optimizer), build(lossscale.fuse))


def test_what_a_twin_gets_later_its_optimizer_does_not_have():
    optimizer = nn.SGD(mlp().trainable_params(), 0.1)
    names = [parameter.name for parameter in optimizer.get_parameters()]
    lossscale.fuse(optimizer).extra = ms.Parameter(Tensor(1.0), name="extra")
    assert [parameter.name for parameter in optimizer.get_parameters()] == names


def test_skip_and_factor_are_obeyed(mode):
    net = mlp()
    optimizer = lossscale.fuse(nn.SGD(net.trainable_params(), 1.0))
    before = [p.asnumpy().copy() for p in optimizer.parameters]
    grads = tuple(ops.ones_like(p) for p in optimizer.parameters)
    scale = Tensor(64.0)
    skipped, flags = optimizer.apply_scaled_gradients(grads, scale, Tensor(0.25), Tensor(True))
    assert skipped and not flags.asnumpy().any() and optimizer.global_step.asnumpy() == 0
    skipped, _ = optimizer.apply_scaled_gradients(grads, scale, Tensor(0.25, ms.float64), Tensor(False))
    assert not skipped and optimizer.global_step.asnumpy() == 1
    for parameter, old in zip(optimizer.parameters, before):
        np.testing.assert_array_equal(parameter.asnumpy(), old - np.float32(0.25))
    overflow, _ = optimizer.apply_scaled_gradients(grads, scale)
    assert not overflow
    for parameter, old in zip(optimizer.parameters, before):
        np.testing.assert_allclose(parameter.asnumpy(), old - 0.25 - 1 / 64, rtol=1e-6, atol=1e-7)
