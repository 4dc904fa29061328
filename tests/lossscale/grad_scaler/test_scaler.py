"""`GradScaler` in training: the shape of PyTorch's own tests, a control without scaling against a scaled run.

Both run the same four batches; inf gets into the gradient of one weight in iteration `OVERFLOW_AT`, which the
control leaves out. Start 128, growth 2, interval 1: the final scale is known exactly, and weights are equal to the bit.
"""

import copy
import pickle

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

from lossscale import GradScaler
from tests.oracles import parameters, same_bits

BATCHES, OVERFLOW_AT = 4, 2
FINAL_SCALE = 128.0 * 2.0**3 * 0.5**1
OPTIMIZERS = {
    "SGD": lambda weights: nn.SGD(weights, learning_rate=0.125),
    "Momentum": lambda weights: nn.Momentum(weights, learning_rate=0.125, momentum=0.5),
    "Adam": lambda weights: nn.Adam(weights, learning_rate=nn.ExponentialDecayLR(0.1, 0.5, 2)),
    "experimental SGD": lambda weights: optim.SGD(weights, lr=0.125, momentum=0.5),
    "experimental Adam": lambda weights: optim.Adam(weights, lr=0.125),
    "experimental AdamW": lambda weights: optim.AdamW(weights, lr=0.125),
}
loss_fn = nn.MSELoss()


def make_scaler(enabled=True):
    return GradScaler(init_scale=128.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1, enabled=enabled)


def make_net(prefix="net."):
    ms.set_seed(3)
    net = nn.SequentialCell(nn.Dense(4, 8), nn.Tanh(), nn.Dense(8, 1))
    net.update_parameters_name(prefix)
    return net


def batch(number):
    rng = np.random.default_rng(number)
    return Tensor(rng.normal(size=(8, 4)), ms.float32), Tensor(rng.normal(size=(8, 1)), ms.float32)


def gradient_function(net, weights, scaler, compiled=False):
    """(x, y, poison) -> loss and gradients of the scaled loss; `poison` is added to the first weight's gradient."""

    def forward(x, y, poison):
        loss = loss_fn(net(x), y)
        return scaler.scale(loss + (weights[0] * poison).sum()), loss

    grad_fn = ms.value_and_grad(forward, None, weights, has_aux=True)
    return ms.jit(grad_fn) if compiled else grad_fn


def step_only(scaler, optimizer, grads):
    scaler.step(optimizer, grads)


def clip_scaled(scaler, optimizer, grads):
    scaler.step(optimizer, ops.clip_by_global_norm(grads, 0.25 * scaler.get_scale()))


def unscale_and_clip(scaler, optimizer, grads):
    grads = scaler.unscale_(optimizer, grads)
    # MindSpore 2.7.0 clips wrongly in GRAPH_MODE if the tuple is a constant to the compiler.
    scaler.step(optimizer, ops.clip_by_global_norm(ms.mutable(grads), 0.25))


def train(scaler, make_optimizer=OPTIMIZERS["Momentum"], apply=step_only, compiled=False, between=None):
    """Train and return (net, optimizer, scaler); a disabled scaler skips nothing, so it leaves the bad batch out."""
    net = make_net()
    optimizer = make_optimizer(net.trainable_params())
    grad_fn = gradient_function(net, optimizer.parameters, scaler, compiled)
    for number in range(BATCHES):
        bad = number == OVERFLOW_AT
        if bad and not scaler.is_enabled():
            continue
        _, grads = grad_fn(*batch(number), Tensor(np.inf if bad else 0.0, ms.float32))
        apply(scaler, optimizer, grads)
        scaler.update()
        if between is not None:
            scaler = between(scaler)
            grad_fn = gradient_function(net, optimizer.parameters, scaler, compiled)
    return net, optimizer, scaler


def assert_equal_training(run, control):
    """All weights and all of the optimizer's state are equal to the bit, and the weights have moved."""
    start = parameters(make_net())
    assert any(not np.array_equal(start[name], value) for name, value in parameters(run[0]).items() if name in start)
    for a, b in ((run[0], control[0]), (run[1], control[1])):
        a, b = parameters(a), parameters(b)
        assert a.keys() == b.keys()
        for name in a:
            assert same_bits(a[name], b[name]), name


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_grad_scaling_autocast(mode, make_optimizer, compiled):
    """A skipped step leaves weights, moments, step counter and learning-rate schedule alone."""
    run = train(make_scaler(), make_optimizer, compiled=compiled, between=None)
    assert_equal_training(run, train(make_scaler(enabled=False), make_optimizer, between=None))
    assert run[2].get_scale() == FINAL_SCALE
    assert (run[2].total_skips, run[2].consecutive_skips) == (1, 0)


@pytest.mark.parametrize("apply", (clip_scaled, unscale_and_clip))
def test_grad_scaling_clipping(mode, apply):
    run, control = (train(make_scaler(enabled), apply=apply, between=None) for enabled in (True, False))
    assert_equal_training(run, control)
    assert run[2].get_scale() == FINAL_SCALE
    assert not same_bits(*(parameters(net)["net.0.weight"] for net in (run[0], train(make_scaler())[0])))


@pytest.mark.parametrize("through", (copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))))
def test_pickled_in_every_iteration(mode, through):
    run = train(make_scaler(), between=through)
    assert_equal_training(run, train(make_scaler(enabled=False)))
    assert run[2].get_scale() == FINAL_SCALE and run[2].total_skips == 1


@pytest.mark.parametrize("through", (copy.deepcopy, lambda scaler: pickle.loads(pickle.dumps(scaler))))
def test_a_copy_grows_when_the_original_would(through):
    scaler = GradScaler(8.0, growth_interval=3)
    scaler._state.adjust(False)
    for one in (scaler, through(scaler)):
        one._state.adjust(False)
        assert one.get_scale() == 8.0
        one._state.adjust(False)
        assert one.get_scale() == 16.0


def test_a_scale_set_by_hand_ends_the_iteration():
    scaler, net = GradScaler(8.0), make_net()
    optimizer = OPTIMIZERS["SGD"](net.trainable_params())
    bad = tuple([Tensor(np.full(p.shape, np.inf, np.float32)) for p in optimizer.parameters])
    for skips in (1, 2):
        scaler.step(optimizer, bad)
        scaler.update(4.0)
        assert (scaler.get_scale(), scaler.total_skips, scaler.consecutive_skips) == (4.0, skips, skips)
    scaler.unscale_(optimizer, bad)


def test_the_optimizer_gets_gradients_in_the_dtypes_of_its_parameters():
    parameters_ = [ms.Parameter(Tensor([1.0], d), name=f"p{i}") for i, d in enumerate((ms.bfloat16, ms.float32))]
    seen = []

    class Note:
        parameters = parameters_

        def __call__(self, grads):
            seen.extend(grads)

    GradScaler(8.0).step(Note(), tuple([Tensor([16.0], ms.float32)] * 2))
    assert [grad.dtype for grad in seen] == [ms.bfloat16, ms.float32]
    assert [float(grad.float()) for grad in seen] == [2.0, 2.0]


def test_errors_do_not_print_gradients():
    scaler, net = GradScaler(8.0), make_net()
    optimizer = OPTIMIZERS["SGD"](net.trainable_params())
    grads = tuple([Tensor(np.full(p.shape, 0.125, np.float32)) for p in optimizer.parameters])
    for wrong in ((grads, optimizer), (optimizer, (*grads[:-1], [grads[0]])), (optimizer, grads[0]), (Tensor, grads)):
        with pytest.raises(TypeError) as caught:
            scaler.step(*wrong)
        assert "0.125" not in str(caught.value) and len(str(caught.value)) < 400


def test_disabled_passes_everything_through():
    scaler = GradScaler(enabled=False)
    net = make_net()
    optimizer = OPTIMIZERS["SGD"](net.trainable_params())
    loss, grads = Tensor(2.0), tuple([Tensor(np.ones(p.shape, np.float32)) for p in optimizer.parameters])
    assert scaler.scale(loss) is loss
    assert scaler.unscale_(optimizer, grads) is grads and scaler.unscale_(optimizer, grads) is grads
    scaler.step(optimizer, grads)
    scaler.step(optimizer, grads)
    scaler.update()
    scaler.update(3.0)
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})
    scaler.load_state_dict({})
    scaler.load_state_dict({"scale": 4.0})
    assert scaler.get_scale() == 1.0 and not scaler.step_was_skipped()
    np.testing.assert_allclose(net[2].bias.asnumpy(), make_net()[2].bias.asnumpy() - 0.25, rtol=1e-6)


@pytest.mark.parametrize("compiled", (False, True))
def test_grad_scaling_penalty(mode, compiled):
    """Second-order gradients: the penalty is computed of unscaled gradients, its loss scaled again."""

    def run(scaler):
        net = make_net()
        optimizer = OPTIMIZERS["SGD"](net.trainable_params())
        weights = optimizer.parameters
        inner = ms.grad(lambda_free_loss(net, scaler), None, weights)

        def forward(x, y, poison):
            inv_scale = 1.0 / scaler.get_scale()
            square_sum = Tensor(0.0, ms.float32)
            for grad in inner(x, y):
                square_sum = square_sum + ops.square(grad * inv_scale).sum()
            loss = loss_fn(net(x), y) + ops.sqrt(square_sum) + (weights[0] * poison).sum()
            return scaler.scale(loss)

        grad_fn = ms.value_and_grad(forward, None, weights)
        grad_fn = ms.jit(grad_fn) if compiled else grad_fn
        for number in range(BATCHES):
            bad = number == OVERFLOW_AT
            if bad and not scaler.is_enabled():
                continue
            _, grads = grad_fn(*batch(number), Tensor(np.inf if bad else 0.0, ms.float32))
            scaler.step(optimizer, grads)
            scaler.update()
        return net, optimizer, scaler

    scaled = run(make_scaler())
    assert_equal_training(scaled, run(make_scaler(enabled=False)))
    assert scaled[2].get_scale() == FINAL_SCALE


def lambda_free_loss(net, scaler):
    def scaled_loss(x, y):
        return scaler.scale(loss_fn(net(x), y))

    return scaled_loss


@pytest.mark.parametrize("bad_micro_step", (0, 1))
def test_grad_scaling_accumulation(mode, bad_micro_step):
    """Two micro-batches an update; one bad micro-batch costs its whole window, and the scale changes once."""

    def run(scaler):
        net = make_net()
        optimizer = OPTIMIZERS["Momentum"](net.trainable_params())
        grad_fn = gradient_function(net, optimizer.parameters, scaler)
        scales = []
        for window in range(BATCHES):
            if window == OVERFLOW_AT and not scaler.is_enabled():
                continue
            total = None
            for micro in range(2):
                scales.append(scaler.get_scale())
                bad = (window, micro) == (OVERFLOW_AT, bad_micro_step)
                _, grads = grad_fn(*batch(2 * window + micro), Tensor(np.inf if bad else 0.0, ms.float32))
                total = grads if total is None else tuple([a + b for a, b in zip(total, grads)])
            scaler.step(optimizer, total)
            scaler.update()
        return net, optimizer, scales, scaler

    scaled = run(make_scaler())
    assert_equal_training(scaled, run(make_scaler(enabled=False)))
    assert scaled[2] == [128.0, 128.0, 256.0, 256.0, 512.0, 512.0, 256.0, 256.0]
    assert scaled[3].get_scale() == FINAL_SCALE


@pytest.mark.parametrize("stepped_first", (0, 1))
@pytest.mark.parametrize("overflowing", (0, 1))
def test_grad_scaling_multiple(mode, overflowing, stepped_first):
    """Two networks, optimizers and losses: only the overflowing one skips; the scale backs off once, in any order."""

    def run(scaler):
        nets = [make_net("a."), make_net("b.")]
        optimizers = [OPTIMIZERS["Momentum"](net.trainable_params()) for net in nets]
        weights = [*optimizers[0].parameters, *optimizers[1].parameters]

        def forward(x, y, poison0, poison1):
            out0, out1 = nets[0](x), nets[1](x)
            loss0 = loss_fn(2 * out0 + 3 * out1, y) + (weights[0] * poison0).sum()
            loss1 = loss_fn(3 * out0 - 5 * out1, y) + (weights[4] * poison1).sum()
            scaled0, scaled1 = scaler.scale((loss0, loss1))
            return scaled0 + scaled1

        grad_fn = ms.value_and_grad(forward, None, ms.ParameterTuple(weights))
        for number in range(BATCHES):
            bad = number == OVERFLOW_AT
            poison = [np.inf if bad and scaler.is_enabled() and i == overflowing else 0.0 for i in range(2)]
            _, grads = grad_fn(*batch(number), *[Tensor(value, ms.float32) for value in poison])
            grads = [grads[:4], grads[4:]]
            grads[0] = scaler.unscale_(optimizers[0], grads[0])
            for which in (stepped_first, 1 - stepped_first):
                if scaler.is_enabled() or not (bad and which == overflowing):
                    scaler.step(optimizers[which], grads[which])
            if bad and scaler.is_enabled():
                assert scaler.step_was_skipped(optimizers[overflowing])
                assert not scaler.step_was_skipped(optimizers[1 - overflowing])
                assert scaler.step_was_skipped() == (overflowing != stepped_first)
            scaler.update()
        return nets, scaler

    (nets, scaler), (controls, _) = run(make_scaler()), run(make_scaler(enabled=False))
    for net, control in zip(nets, controls):
        for (name, value), expected in zip(parameters(net).items(), parameters(control).values()):
            assert same_bits(value, expected), name
    assert scaler.get_scale() == FINAL_SCALE
    assert (scaler.total_skips, scaler.consecutive_skips) == (1, 0)


def test_grad_scale_will_not_overflow(mode):
    scaler = GradScaler(init_scale=1e38, growth_factor=16.0, growth_interval=1)
    net = nn.Dense(1, 1, weight_init="ones", has_bias=False)
    optimizer = nn.SGD(net.trainable_params(), learning_rate=1.0)
    grads = ms.grad(lambda_free_sum(net, scaler), None, optimizer.parameters)(Tensor([[1.5]]))
    scaler.step(optimizer, grads)
    scaler.update()
    assert scaler.get_scale() == float(np.float32(1e38))
    assert not scaler.step_was_skipped()
    np.testing.assert_allclose(net.weight.asnumpy(), [[-0.5]], rtol=1e-6)


def lambda_free_sum(net, scaler):
    def scaled_sum(x):
        return scaler.scale(net(x).sum())

    return scaled_sum


def test_replayed_graph_sees_the_scale_change(mode):
    """One compiled forward and backward for inputs that overflow in float16 and others; scale and gradient follow."""
    scaler = GradScaler(init_scale=4.0, growth_interval=2)
    weight = ms.Parameter(Tensor([2.0]), name="weight")
    optimizer = nn.SGD([weight], learning_rate=0.0)
    traces = []

    @ops.constexpr
    def note_trace():
        traces.append(1)
        return 0

    def forward(x):
        return scaler.scale((weight.astype(ms.float16) * x).sum().astype(ms.float32)) + note_trace()

    grad_fn = ms.jit(ms.grad(forward, None, optimizer.parameters))
    seen = []
    for x in (5.0, 20000.0, 5.0, 40000.0):
        grads = grad_fn(Tensor([x], ms.float16))
        seen.append((float(grads[0][0]), scaler.get_scale()))
        scaler.step(optimizer, grads)
        scaler.update()
    assert seen == [(20.0, 4.0), (np.inf, 4.0), (10.0, 2.0), (np.inf, 2.0)]
    assert scaler.get_scale() == 1.0 and len(traces) == 1


def test_nested_outputs_are_scaled(mode):
    scaler = GradScaler(8.0)
    tree = (Tensor([1.0]), [Tensor([2.0], ms.float16), {"a": Tensor(3.0, ms.float64)}], ())
    for scale in (scaler.scale, ms.jit(scaler.scale)):
        one, (two, inner), empty = scale(tree)
        assert (one.asnumpy().tolist(), two.asnumpy().tolist(), float(inner["a"]), empty) == ([8.0], [16.0], 24.0, ())
        assert (two.dtype, inner["a"].dtype) == (ms.float16, ms.float64)
    with pytest.raises(TypeError, match="Expected a Tensor"):
        scaler.scale(1.0)


@pytest.mark.parametrize("backend", ("native", "plain"))
def test_float16_gradients_come_back_as_float32(mode, backend, monkeypatch):
    if backend == "plain":
        monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    scaler = GradScaler(2.0**16)
    optimizer = nn.SGD([ms.Parameter(Tensor([1.0, 1.0]), name="w")], learning_rate=1.0)
    grads = scaler.unscale_(optimizer, (Tensor([2.0**-10, 3.0], ms.float16),))
    assert grads[0].dtype == ms.float32
    assert same_bits(grads[0].asnumpy(), np.array([2.0**-26, 3 * 2.0**-16], np.float32))


@pytest.mark.parametrize("backend", ("native", "plain"))
@pytest.mark.parametrize("scale", (3.0, 1e38, 3e38, 2.0**-126))
def test_unscale_equals_the_float32_reciprocal(mode, backend, scale, monkeypatch):
    if backend == "plain":
        monkeypatch.setenv("LOSSSCALE_BACKEND", "plain")
    scaler = GradScaler(scale)
    optimizer = nn.SGD([ms.Parameter(Tensor([1.0, 1.0]), name="w")], learning_rate=1.0)
    values = np.array([1.1, -1.05], np.float32) * np.float32(scale)
    got = scaler.unscale_(optimizer, (Tensor(values),))[0].asnumpy()
    if scale < 2.0**126:
        assert same_bits(got, values * (np.float32(1) / np.float32(scale)))
    np.testing.assert_allclose(got, [1.1, -1.05], rtol=3e-7)


def test_skips_are_told_and_counted():
    scaler = GradScaler(2.0**10)
    optimizer = nn.SGD([ms.Parameter(Tensor([1.0]), name="w")], learning_rate=1.0)
    assert not scaler.step_was_skipped() and not scaler.step_was_skipped(optimizer)
    counts = []
    for value in (np.nan, np.inf, 1.0, -np.inf):
        result = scaler.step(optimizer, (Tensor([value], ms.float32),))
        skipped = scaler.step_was_skipped()
        scaler.update()
        assert skipped == scaler.step_was_skipped(optimizer) == (not np.isfinite(value))
        assert (result is None) == skipped
        counts.append((scaler.consecutive_skips, scaler.total_skips))
    assert counts == [(1, 1), (2, 2), (0, 2), (1, 3)]


def test_optimizer_gets_further_arguments_and_its_result_is_returned():
    class Recorder:
        parameters = (ms.Parameter(Tensor([1.0]), name="w"),)

        def __call__(self, grads, *args):
            self.seen = grads, args
            return "result"

    optimizer, scaler = Recorder(), GradScaler(2.0)
    assert scaler.step(optimizer, [Tensor([4.0])], "more") == "result"
    assert optimizer.seen[0][0].asnumpy().tolist() == [2.0] and optimizer.seen[1] == ("more",)


def test_a_step_that_raised_can_be_repeated():
    class Failing:
        parameters = (ms.Parameter(Tensor([1.0]), name="w"),)
        calls = ()

        def __call__(self, grads):
            self.calls += (float(grads[0][0]),)
            if len(self.calls) == 1:
                raise OSError("out of luck")

    optimizer, scaler = Failing(), GradScaler(2.0)
    with pytest.raises(OSError, match="luck"):
        scaler.step(optimizer, (Tensor([4.0]),))
    scaler.step(optimizer, (Tensor([4.0]),))
    assert optimizer.calls == (2.0, 2.0)


def test_parameters_without_gradients():
    """An optimizer that takes no part in an iteration changes nothing for the others."""
    scaler = GradScaler(8.0, growth_interval=1)
    used, idle = (nn.SGD([ms.Parameter(Tensor([1.0]), name=name)], learning_rate=0.5) for name in "ab")
    scaler.step(used, (Tensor([8.0]),))
    scaler.update()
    assert scaler.get_scale() == 16.0
    assert (used.parameters[0].asnumpy().item(), idle.parameters[0].asnumpy().item()) == (0.5, 1.0)
