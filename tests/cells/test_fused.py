"""Fused optimizers against MindSpore's own: the same training, and nothing moved on overflow."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

import cells.fused
import lossscale
from cells.native import library_path
from tests.nets import GradientsAsGiven
from tests.oracles import parameters

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")

SGD = (nn.SGD, lossscale.FusedSGD)
MOMENTUM = (nn.Momentum, lossscale.FusedMomentum)
ADAM = (nn.Adam, lossscale.FusedAdam)
ADAM_WEIGHT_DECAY = (nn.AdamWeightDecay, lossscale.FusedAdamWeightDecay)
ADAMW = (optim.AdamW, lossscale.FusedAdamW)
# These differ from MindSpore's in the last bit of a weight here and there, and then in the gradients that follow.
ROUNDED = (ADAM,)


class _Decay(nn.Cell):
    """A weight-decay schedule."""

    def construct(self, step):
        return 0.01 / (step.astype(ms.float32).reshape(()) + 1)


def grouped(net, **options):
    """The first layer with options of its own, the second with the defaults, in reversed order."""
    return [{"params": [net[2].weight, net[2].bias]}, {"params": [net[0].weight, net[0].bias], **options}]


CONFIGURATIONS = {
    "momentum": (MOMENTUM, lambda net, make: make(net.trainable_params(), 0.1, 0.9)),
    "momentum_decay": (MOMENTUM, lambda net, make: make(net.trainable_params(), 0.1, 0.9, weight_decay=0.01)),
    "momentum_lr_list": (MOMENTUM, lambda net, make: make(net.trainable_params(), [0.1, 0.05] * 20, 0.9)),
    "momentum_groups": (
        MOMENTUM,
        lambda net, make: make(grouped(net, lr=0.01, weight_decay=0.1), 0.1, 0.9, weight_decay=0.001),
    ),
    "momentum_group_schedules": (
        MOMENTUM,
        lambda net, make: make(
            grouped(net, lr=nn.ExponentialDecayLR(0.1, 0.9, 3)), nn.CosineDecayLR(0.01, 0.1, 9), 0.9
        ),
    ),
    "momentum_decay_schedule": (
        MOMENTUM,
        lambda net, make: make(net.trainable_params(), 0.1, 0.9, weight_decay=_Decay()),
    ),
    "adam_weight_decay": (ADAM_WEIGHT_DECAY, lambda net, make: make(net.trainable_params(), 0.01)),
    "adam_weight_decay_decay": (
        ADAM_WEIGHT_DECAY,
        lambda net, make: make(net.trainable_params(), 0.01, 0.8, 0.99, 1e-8, weight_decay=0.1),
    ),
    "adam_weight_decay_groups": (
        ADAM_WEIGHT_DECAY,
        lambda net, make: make(grouped(net, lr=nn.ExponentialDecayLR(0.1, 0.9, 3), weight_decay=0.1), 0.01),
    ),
    "adam_weight_decay_schedule": (
        ADAM_WEIGHT_DECAY,
        lambda net, make: make(net.trainable_params(), 0.01, weight_decay=_Decay()),
    ),
    "sgd": (SGD, lambda net, make: make(net.trainable_params(), 0.1)),
    "sgd_nesterov": (SGD, lambda net, make: make(net.trainable_params(), 0.1, 0.9, weight_decay=0.01, nesterov=True)),
    "sgd_groups": (SGD, lambda net, make: make(grouped(net, lr=0.01, weight_decay=0.1), [0.1, 0.05] * 20, 0.9, 0.5)),
    "adam": (ADAM, lambda net, make: make(net.trainable_params(), 0.01)),
    "adam_groups": (
        ADAM,
        lambda net, make: make(
            grouped(net, lr=nn.ExponentialDecayLR(0.1, 0.9, 3), weight_decay=0.1), 0.01, 0.8, 0.99, use_nesterov=True
        ),
    ),
    "adam_decay_schedule": (ADAM, lambda net, make: make(net.trainable_params(), 0.01, weight_decay=_Decay())),
    "adamw": (ADAMW, lambda net, make: make(net.trainable_params(), 0.01, (0.8, 0.99), 1e-6, 0.1)),
    "adamw_groups": (ADAMW, lambda net, make: make(grouped(net, lr=0.1, weight_decay=0.5), 0.01)),
}
SIMPLE = {"sgd_nesterov": SGD, "momentum_decay": MOMENTUM, "adam": ADAM, "adam_weight_decay_decay": ADAM_WEIGHT_DECAY}
SIMPLE["adamw"] = ADAMW


def build(make_optimizer, make):
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(5, 70), nn.ReLU(), nn.Dense(70, 3))
    optimizer = make_optimizer(net, make)
    update = lossscale.DynamicLossScaleUpdateCell(2.0**12, 2, 4)
    return lossscale.TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, update), optimizer


def batch(step):
    """Inputs of one step; every seventh overflows."""
    x = np.random.default_rng(step).standard_normal((4, 5)).astype(np.float32)
    if step % 7 == 3:
        x[0, step % 5] = np.nan
    return Tensor(x), Tensor(np.ones((4, 3), np.float32))


def state(train_cell):
    return {name: parameter.asnumpy().copy() for name, parameter in train_cell.parameters_dict().items()}


def assert_equal_states(one, other, rounded=False):
    assert one.keys() == other.keys()
    for name in one:
        if rounded:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-4, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_trains_like_stock(mode, configuration):
    pair, make_optimizer = CONFIGURATIONS[configuration]
    (stock, fused), rounded = pair, pair in ROUNDED
    (stock_step, _), (fused_step, optimizer) = build(make_optimizer, stock), build(make_optimizer, fused)
    assert optimizer.takes_scaled_gradients and fused_step._stage_fusion == "scale"
    before = state(fused_step)
    for i in range(9):
        outputs = [[float(value) for value in step(*batch(i))] for step in (stock_step, fused_step)]
        np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-4 if rounded else 0)
        assert outputs[1][1] == (i % 7 == 3)
    assert_equal_states(state(stock_step), state(fused_step), rounded)
    assert all((state(fused_step)[name] != before[name]).any() for name in ("0.weight", "2.bias"))


SIZES = (1, 7, 2049, 100_003)
EVERY_RULE = {
    "sgd": lambda params: nn.SGD(params, 0.05),
    "sgd_momentum": lambda params: nn.SGD(params, 0.05, 0.9, weight_decay=0.01),
    "sgd_dampening": lambda params: nn.SGD(params, 0.05, 0.9, 0.3),
    "sgd_nesterov": lambda params: nn.SGD(params, 0.05, 0.9, nesterov=True),
    "momentum": lambda params: nn.Momentum(params, 0.05, 0.9, weight_decay=0.01),
    "adam": lambda params: nn.Adam(params, 0.01, 0.8, 0.99, 1e-6, weight_decay=0.1),
    "adam_nesterov": lambda params: nn.Adam(params, 0.01, use_nesterov=True),
    "adam_weight_decay": lambda params: nn.AdamWeightDecay(params, 0.01, weight_decay=0.1),
    "adamw": lambda params: optim.AdamW(params, 0.01, (0.8, 0.99), 1e-6, 0.1),
}


def assert_steps_equal(rule, steps):
    """Take each step from the same state with random gradients of any magnitude, every seventh step with nan.

    2 ulp are allowed, of the largest of the old value, the new one and the change. Adam's Nesterov change is a sum of
    two terms of the size of the rate, which may cancel. Subnormals count as zero: some of MindSpore's threads flush.
    """
    term = 0.01 if rule == "adam_nesterov" else 0.0
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(size).astype(np.float32) for size in SIZES]
    train_cells = []
    for finish in (lambda optimizer: optimizer, lossscale.fuse):
        net = GradientsAsGiven(values)
        optimizer = finish(EVERY_RULE[rule](list(net.w)))
        train_cells.append(lossscale.TrainOneStepWithLossScaleCell(net, optimizer, Tensor(1024.0)))
    stock, fused = train_cells
    assert (stock._stage_fusion, fused._stage_fusion) == (None, "scale")
    for i in range(steps):
        before = parameters(stock)
        for parameter in fused.get_parameters():
            # Not set_data: in PYNATIVE_MODE MindSpore 2.7 goes on showing what was set.
            ops.assign(parameter, Tensor(before[parameter.name], parameter.dtype))
        grads = [rng.standard_normal(size) * 10.0 ** rng.integers(-3, 2) for size in SIZES]
        if i % 7 == 3:
            grads[i % len(SIZES)][-1] = np.nan
        grads = [Tensor(grad.astype(np.float32)) for grad in grads]
        stock(*grads)
        fused(*grads)
        after, wanted = parameters(fused), parameters(stock)
        assert (after["w3"] != before["w3"]).any() == (i % 7 != 3)
        for name, value in wanted.items():
            old = before[name]
            largest = np.maximum.reduce([np.abs(value), np.abs(old), np.abs(value - old), np.full_like(value, term)])
            allowed = 2 * np.spacing(largest.astype(np.float32)) + np.finfo(np.float32).tiny
            assert (np.abs(after[name].astype(np.float64) - value) <= allowed).all(), (i, name)


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_each_step_from_the_same_state_equals_stock(mode, rule):
    assert_steps_equal(rule, 30)


@pytest.mark.slow
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_a_thousand_steps_from_the_same_states_equal_stock(rule):
    ms.set_context(mode=ms.GRAPH_MODE)
    assert_steps_equal(rule, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["momentum_decay", "adam_weight_decay_decay"])
def test_a_thousand_steps_are_equal(configuration):
    ms.set_context(mode=ms.GRAPH_MODE)
    (stock, fused), make_optimizer = CONFIGURATIONS[configuration]
    (stock_step, _), (fused_step, _) = build(make_optimizer, stock), build(make_optimizer, fused)
    for i in range(1000):
        stock_step(*batch(i))
        fused_step(*batch(i))
    assert_equal_states(without_subnormals(stock_step), without_subnormals(fused_step))


def without_subnormals(train_cell):
    """The state with subnormals as zero: some of MindSpore's threads flush them and some don't."""
    tiny = np.finfo(np.float32).tiny
    return {name: np.where(np.abs(value) < tiny, 0, value) for name, value in state(train_cell).items()}


@pytest.mark.parametrize("configuration", ["momentum", "adam_weight_decay"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_jit_levels(configuration, level):
    ms.set_context(mode=ms.GRAPH_MODE)
    pair, make_optimizer = CONFIGURATIONS[configuration]
    steps = [build(make_optimizer, make)[0] for make in pair]
    for step in steps:
        step.set_jit_config(ms.JitConfig(jit_level=level))
    for i in range(5):
        for step in steps:
            step(*batch(i))
    assert_equal_states(*map(state, steps))


@pytest.mark.parametrize("configuration", SIMPLE)
def test_nothing_moves_on_overflow(mode, configuration):
    (_, fused), make_optimizer = CONFIGURATIONS[configuration]
    step, optimizer = build(make_optimizer, fused)
    step(*batch(0))
    before = state(optimizer)
    _, overflow, _ = step(*batch(3))
    assert overflow and step.nonfinite_parameters() == ["0.weight"]
    assert_equal_states(before, state(optimizer))
    assert float(step.scale_sense) == 2.0**11
    assert before["state_step" if fused is lossscale.FusedAdamW else "global_step"].sum() == 1


@pytest.mark.parametrize("configuration", SIMPLE)
@pytest.mark.parametrize("saved_by, loaded_by", [(0, 1), (1, 0)])
def test_checkpoints_move_between_fused_and_stock(mode, configuration, saved_by, loaded_by, tmp_path):
    pair, make_optimizer = CONFIGURATIONS[configuration]
    first, _ = build(make_optimizer, pair[saved_by])
    for i in range(3):
        first(*batch(i))
    ms.save_checkpoint(first, str(tmp_path / "run.ckpt"))
    second, _ = build(make_optimizer, pair[loaded_by])
    assert ms.load_param_into_net(second, ms.load_checkpoint(str(tmp_path / "run.ckpt"))) == ([], [])
    assert_equal_states(state(first), state(second))
    for i in range(3, 8):
        first(*batch(i))
        second(*batch(i))
    assert_equal_states(state(first), state(second), pair in ROUNDED)


def test_an_asynchronous_checkpoint_holds_one_moment(mode, tmp_path):
    step, _ = build(CONFIGURATIONS["momentum"][1], lossscale.FusedMomentum)
    step(*batch(0))
    wanted = state(step)
    ms.save_checkpoint(step, str(tmp_path / "run.ckpt"), async_save=True)
    for i in range(4, 9):
        step(*batch(i))
    ms.async_ckpt_thread_status() and [thread.join() for thread in _checkpoint_threads()]
    saved = {name: value.asnumpy() for name, value in ms.load_checkpoint(str(tmp_path / "run.ckpt")).items()}
    assert_equal_states(wanted, saved)


def _checkpoint_threads():
    import threading

    return [thread for thread in threading.enumerate() if thread.name == "asyn_save_ckpt"]


class _ReadsWithoutGradient(nn.Cell):
    """Its loss depends on the weight's value, its gradient doesn't: only the declared side effect orders them."""

    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.full(100_000, 1.0, np.float32)), name="weight")

    def construct(self, x):
        return (self.weight * x).sum() / 100_000


class _ReadsAfterwards(nn.Cell):
    def __init__(self, step):
        super().__init__(auto_prefix=False)
        self.step = step
        self.weight = step.weights[0]

    def construct(self, *inputs):
        loss, overflow, _ = self.step(*inputs)
        return loss, overflow, ops.depend(self.weight, overflow)[:1] * 1.0


def test_the_forward_sees_old_weights_and_what_follows_new_ones(mode):
    net = _ReadsWithoutGradient()
    optimizer = lossscale.FusedMomentum(net.trainable_params(), 10_000.0, 0.0)
    train_cell = lossscale.TrainOneStepWithLossScaleCell(net, optimizer, Tensor(1024.0))
    step = _ReadsAfterwards(train_cell)
    assert train_cell._stage_fusion == "scale"
    weight = 1.0
    for _ in range(5):
        loss, _, after = step(Tensor(np.ones(100_000, np.float32)))
        assert float(loss) == pytest.approx(weight, rel=1e-4)
        weight -= 0.1
        assert float(after[0]) == pytest.approx(weight, rel=1e-4)
        assert net.weight.asnumpy()[-1] == pytest.approx(weight, rel=1e-4)


def test_weights_set_from_the_host_are_seen_and_copies_stay(mode):
    net = _ReadsWithoutGradient()
    step = lossscale.TrainOneStepWithLossScaleCell(
        net, lossscale.FusedMomentum(net.trainable_params(), 10_000.0, 0.0), Tensor(1024.0)
    )
    ones = Tensor(np.ones(100_000, np.float32))
    step(ones)
    copy, given = net.weight.copy(), Tensor(np.full(100_000, 7.0, np.float32))
    net.weight.set_data(given)
    loss, _, _ = step(ones)
    assert float(loss) == pytest.approx(7) and net.weight.asnumpy()[0] == pytest.approx(6.9)
    assert copy.asnumpy()[0] == pytest.approx(0.9)


@pytest.mark.parametrize("configuration", ["momentum", "adam_weight_decay"])
def test_under_a_plain_train_step_it_is_stock(mode, configuration):
    pair, make_optimizer = CONFIGURATIONS[configuration]
    cells_ = []
    for make in pair:
        scaled, optimizer = build(make_optimizer, make)
        cells_.append(nn.TrainOneStepCell(scaled.network, optimizer))
    for i in range(3):
        losses = [float(cell(*batch(i))) for cell in cells_]
        assert losses[0] == losses[1]
    assert_equal_states(*map(state, cells_))


class _Plain(nn.TrainOneStepCell):
    def construct(self, *inputs):
        loss = self.network(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, ops.ones_like(loss))
        return ops.depend(loss, self.optimizer.apply_gradients(grads))


@pytest.mark.parametrize("configuration", SIMPLE)
def test_apply_gradients_updates_without_a_look(mode, configuration):
    pair, make_optimizer = CONFIGURATIONS[configuration]
    scaled, optimizer = build(make_optimizer, pair[0])
    stock = nn.TrainOneStepCell(scaled.network, optimizer)
    scaled, optimizer = build(make_optimizer, pair[1])
    fused = _Plain(scaled.network, optimizer)
    for i in (0, 1, 3):
        stock(*batch(i))
        fused(*batch(i))
    assert_equal_states(state(stock), state(fused), pair in ROUNDED)
    assert np.isnan(state(fused)["0.weight"]).any()


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float32, ms.float64])
def test_gradients_of_any_dtype_are_read_right(dtype):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    weight = Parameter(Tensor(np.zeros(5000, np.float32)), name="weight")
    optimizer = lossscale.FusedSGD([weight], 1.0)
    values = np.random.default_rng(0).integers(-128, 128, 5000)  # exact in every dtype
    overflow, _ = optimizer.apply_scaled_gradients((Tensor(values, dtype),), Tensor(4.0))
    assert not overflow
    np.testing.assert_array_equal(weight.asnumpy(), -values / 4)


def test_overflow_is_judged_once_unscaled_and_in_every_tensor():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    weights = [Parameter(Tensor(np.zeros(2, np.float32)), name=f"weight{i}") for i in range(70)]
    optimizer = lossscale.FusedSGD(weights, 1.0)
    large, small = Tensor(np.float32([1, 3e38])), Tensor(np.ones(2, np.float32))
    overflow, flags = optimizer.apply_scaled_gradients((small,) * 69 + (large,), Tensor(0.25))
    assert overflow and flags.asnumpy().tolist() == [False] * 69 + [True]
    assert not any(weight.asnumpy().any() for weight in weights)
    overflow, _ = optimizer.apply_scaled_gradients((small,) * 69 + (large,), Tensor(1.0))
    assert not overflow and weights[69].asnumpy().tolist() == [-1, np.float32(-3e38)]


class _Mixed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(2), ms.float16), name="narrow")

    def construct(self, x):
        return (self.weight.astype(ms.float32) * x).sum()


def test_what_is_not_covered_runs_as_stock_with_one_warning(monkeypatch):
    monkeypatch.setattr(cells.fused, "_warned", set())
    with pytest.warns(UserWarning, match=r"FusedMomentum runs like MindSpore's own optimizer.*loss_scale") as seen:
        for _ in range(2):
            optimizer = lossscale.FusedMomentum(nn.Dense(2, 2).trainable_params(), 0.1, 0.9, loss_scale=2.0)
    assert len(seen) == 1 and not optimizer.takes_scaled_gradients
    with pytest.warns(UserWarning, match="not float32"):
        lossscale.FusedAdamWeightDecay(_Mixed().trainable_params())
    monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    with pytest.warns(UserWarning, match="native kernel does not run here"):
        step, optimizer = build(CONFIGURATIONS["momentum"][1], lossscale.FusedMomentum)
    stock, _ = build(CONFIGURATIONS["momentum"][1], nn.Momentum)
    for i in range(4):
        step(*batch(i))
        stock(*batch(i))
    assert_equal_states(state(step), state(stock))


def test_momentum_says_that_nesterov_is_ignored_like_mindspores(mode, monkeypatch):
    def nesterov(net, make):
        return make(net.trainable_params(), 0.1, 0.9, use_nesterov=True)

    monkeypatch.setattr(cells.fused, "_warned", set())
    stock, _ = build(nesterov, nn.Momentum)
    with pytest.warns(UserWarning, match=r"ignores use_nesterov.*Write nn.SGD\(..., nesterov=True\)"):
        fused, _ = build(nesterov, lossscale.FusedMomentum)
    for i in range(3):
        stock(*batch(i))
        fused(*batch(i))
    assert_equal_states(state(stock), state(fused))


class _OwnUpdateStage(lossscale.TrainOneStepWithLossScaleCell):
    def process_loss_scale(self, overflow):
        return ops.logical_or(overflow, Tensor(True))


def test_a_train_cell_with_a_say_in_skipping_uses_the_generic_path(mode):
    step, optimizer = build(CONFIGURATIONS["momentum"][1], lossscale.FusedMomentum)
    own = _OwnUpdateStage(step.network, optimizer, Tensor(2.0))
    before = state(step)["0.weight"]
    own(*batch(0))
    assert own._stage_fusion is None
    np.testing.assert_array_equal(state(own)["0.weight"], before)


class _SignDescent(nn.SGD):
    """An optimizer of one's own that follows the protocol, in plain ops."""

    takes_scaled_gradients = True

    def apply_scaled_gradients(self, gradients, loss_scale):
        flags = ops.stack([ops.logical_not(ops.isfinite(grad)).any() for grad in gradients])
        overflow = flags.any()
        rate = ops.select(overflow, Tensor(0.0), Tensor(0.5))
        done = ()
        for parameter, grad in zip(self.parameters, gradients):
            done += (ops.assign_sub(parameter, ops.nan_to_num(ops.sign(grad), 0.0) * rate),)
        return ops.depend(overflow, done), flags


def test_any_optimizer_can_follow_the_protocol(mode):
    net = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
    step = lossscale.TrainOneStepWithLossScaleCell(
        nn.WithLossCell(net, nn.MSELoss()), _SignDescent(net.trainable_params()), Tensor(8.0)
    )
    y = Tensor(np.zeros((1, 1), np.float32))
    _, overflow, _ = step(Tensor(np.ones((1, 2), np.float32)), y)
    assert not overflow and net.weight.asnumpy().tolist() == [[0.5, 0.5]]
    _, overflow, _ = step(Tensor(np.array([[1, np.inf]], np.float32)), y)
    assert overflow and net.weight.asnumpy().tolist() == [[0.5, 0.5]] and step.nonfinite_parameters()
