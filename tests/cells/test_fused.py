"""Fused optimizers against MindSpore's own: the same training, to the bit, and nothing moved on overflow."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import cells.fused
import lossscale
from cells.native import library_path

pytestmark = pytest.mark.skipif(library_path() is None, reason="the native kernel is not built")

MOMENTUM = (nn.Momentum, lossscale.FusedMomentum)
ADAM = (nn.AdamWeightDecay, lossscale.FusedAdamWeightDecay)


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
    "adam": (ADAM, lambda net, make: make(net.trainable_params(), 0.01)),
    "adam_decay": (ADAM, lambda net, make: make(net.trainable_params(), 0.01, 0.8, 0.99, 1e-8, weight_decay=0.1)),
    "adam_groups": (
        ADAM,
        lambda net, make: make(grouped(net, lr=nn.ExponentialDecayLR(0.1, 0.9, 3), weight_decay=0.1), 0.01),
    ),
    "adam_decay_schedule": (ADAM, lambda net, make: make(net.trainable_params(), 0.01, weight_decay=_Decay())),
}


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


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_trains_like_stock_to_the_bit(mode, configuration):
    (stock, fused), make_optimizer = CONFIGURATIONS[configuration]
    (stock_step, _), (fused_step, optimizer) = build(make_optimizer, stock), build(make_optimizer, fused)
    assert optimizer.takes_scaled_gradients and fused_step._stage_fusion == "scale"
    before = state(fused_step)
    for i in range(9):
        outputs = [[float(value) for value in step(*batch(i))] for step in (stock_step, fused_step)]
        np.testing.assert_array_equal(outputs[0], outputs[1])
        assert outputs[1][1] == (i % 7 == 3)
    assert_equal_states(state(stock_step), state(fused_step))
    assert all((state(fused_step)[name] != before[name]).any() for name in ("0.weight", "2.bias"))


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["momentum_decay", "adam_decay"])
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


@pytest.mark.parametrize("pair", [MOMENTUM, ADAM])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_jit_levels(pair, level):
    ms.set_context(mode=ms.GRAPH_MODE)
    make_optimizer = CONFIGURATIONS["momentum" if pair is MOMENTUM else "adam"][1]
    steps = [build(make_optimizer, make)[0] for make in pair]
    for step in steps:
        step.set_jit_config(ms.JitConfig(jit_level=level))
    for i in range(5):
        for step in steps:
            step(*batch(i))
    assert_equal_states(*map(state, steps))


def test_nothing_moves_on_overflow(mode):
    step, optimizer = build(CONFIGURATIONS["adam_decay"][1], lossscale.FusedAdamWeightDecay)
    step(*batch(0))
    before = state(step)
    _, overflow, _ = step(*batch(3))
    assert overflow and step.nonfinite_parameters() == ["0.weight"]
    after = state(step)
    assert_equal_states(
        {p.name: before[p.name] for p in optimizer.get_parameters()},
        {p.name: after[p.name] for p in optimizer.get_parameters()},
    )
    assert (after["scale_sense"], after["global_step"].tolist()) == (2.0**11, [1])


@pytest.mark.parametrize("pair", [MOMENTUM, ADAM])
@pytest.mark.parametrize("saved_by, loaded_by", [(0, 1), (1, 0), (1, 1)])
def test_checkpoints_move_between_fused_and_stock(mode, pair, saved_by, loaded_by, tmp_path):
    make_optimizer = CONFIGURATIONS["momentum_decay" if pair is MOMENTUM else "adam_decay"][1]
    first, _ = build(make_optimizer, pair[saved_by])
    for i in range(3):
        first(*batch(i))
    ms.save_checkpoint(first, str(tmp_path / "run.ckpt"))
    second, _ = build(make_optimizer, pair[loaded_by])
    assert ms.load_param_into_net(second, ms.load_checkpoint(str(tmp_path / "run.ckpt"))) == ([], [])
    for i in range(3, 8):
        first(*batch(i))
        second(*batch(i))
    assert_equal_states(state(first), state(second))


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


@pytest.mark.parametrize("pair", [MOMENTUM, ADAM])
def test_under_a_plain_train_step_it_is_stock(mode, pair):
    make_optimizer = CONFIGURATIONS["momentum" if pair is MOMENTUM else "adam"][1]
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


@pytest.mark.parametrize("pair", [MOMENTUM, ADAM])
def test_apply_gradients_updates_without_a_look(mode, pair):
    make_optimizer = CONFIGURATIONS["momentum" if pair is MOMENTUM else "adam"][1]
    scaled, optimizer = build(make_optimizer, pair[0])
    stock = nn.TrainOneStepCell(scaled.network, optimizer)
    scaled, optimizer = build(make_optimizer, pair[1])
    fused = _Plain(scaled.network, optimizer)
    for i in (0, 1, 3):
        stock(*batch(i))
        fused(*batch(i))
    assert_equal_states(state(stock), state(fused))
    assert np.isnan(state(fused)["0.weight"]).any()


class _Mixed(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones(2), ms.float16), name="narrow")

    def construct(self, x):
        return (self.weight.astype(ms.float32) * x).sum()


def test_what_is_not_covered_runs_as_stock_with_one_warning(monkeypatch):
    monkeypatch.setattr(cells.fused, "_warned", set())
    with pytest.warns(UserWarning, match=r"FusedMomentum runs like MindSpore's own optimizer.*use_nesterov") as seen:
        for _ in range(2):
            optimizer = lossscale.FusedMomentum(nn.Dense(2, 2).trainable_params(), 0.1, 0.9, use_nesterov=True)
    assert len(seen) == 1 and not optimizer.takes_scaled_gradients
    with pytest.warns(UserWarning, match="not float32"):
        lossscale.FusedAdamWeightDecay(_Mixed().trainable_params())
    with pytest.warns(UserWarning, match="loss_scale of its own"):
        lossscale.FusedMomentum(nn.Dense(2, 2).trainable_params(), 0.1, 0.9, loss_scale=2.0)
    monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    with pytest.warns(UserWarning, match="native kernel does not run here"):
        step, optimizer = build(CONFIGURATIONS["momentum"][1], lossscale.FusedMomentum)
    stock, _ = build(CONFIGURATIONS["momentum"][1], nn.Momentum)
    for i in range(4):
        step(*batch(i))
        stock(*batch(i))
    assert_equal_states(state(step), state(stock))


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
