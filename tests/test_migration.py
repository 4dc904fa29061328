"""The train cells of examples/migration do what the wrappers are meant to do: against numpy and plain MindSpore."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from examples.migration import bert, mindaudio, mindcv, mindformers, mindocr, mindone, mindyolo
from lossscale import EMA, DynamicLossScaleUpdateCell
from tests.nets import GradientsAsGiven, Poisoned, batch, copy_parameters
from tests.oracles import DynamicScale
from tests.test_examples import last_line, run

SHAPES = [(3, 2), (4,)]


def network_with_norm():
    return nn.SequentialCell(nn.Dense(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dense(16, 4))


def test_mindcv_equals_a_loop_in_plain_mindspore(mode):
    ours, plain = (Poisoned(nn.WithLossCell(network_with_norm(), nn.MSELoss())).set_train() for _ in range(2))
    copy_parameters(plain, ours)
    options = {"accumulate_steps": 2, "clip_value": 0.5, "ema_decay": 0.9, "drop_overflow_update": True}
    optimizer = nn.Momentum(ours.trainable_params(), 0.1, 0.9)
    step = mindcv.train_cell(ours, optimizer, loss_scale_type="dynamic", loss_scale=2.0**10, **options)
    ops.assign(step.ema.updates, Tensor(1000, ms.int32))  # where the ramp is steep

    optimizer = nn.Momentum(plain.trainable_params(), 0.1, 0.9)
    losses_and_grads = ms.value_and_grad(plain, None, optimizer.parameters)
    shadows, updates = [p.asnumpy().copy() for p in plain.get_parameters()], 1000
    for window in range(4):
        total = [0.0] * len(optimizer.parameters)
        for micro in range(2):
            x, y = batch(seed=2 * window + micro)
            poison = np.zeros(6, np.float32)
            poison[3] = np.inf if (window, micro) == (1, 0) else 0
            loss, grads = losses_and_grads(x, y, Tensor(poison))
            total = [t + g.asnumpy() / 2 for t, g in zip(total, grads)]
            np.testing.assert_allclose(float(step(x, y, Tensor(poison))), float(loss), rtol=1e-5)
        if all(np.isfinite(t).all() for t in total):
            optimizer(tuple(ops.clip_by_global_norm([Tensor(t) for t in total], 0.5)))
            updates += 1
            decay = 0.9 * (1 - np.exp(-updates / 2000))
            shadows = [decay * s + (1 - decay) * p.asnumpy() for s, p in zip(shadows, plain.get_parameters())]
    for got, want in zip(ours.get_parameters(), plain.get_parameters()):
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-4, atol=1e-5)
    for got, want in zip(step.ema.shadows, shadows):
        np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-4, atol=1e-5)
    assert len(shadows) == 8  # the statistics of BatchNorm too
    assert (float(step.scale_sense.asnumpy()), updates) == (2.0**9, 1003)


class Holder(nn.Cell):
    """Holds an optimizer, as mindcv's accumulation does, which gives its Parameters a prefix."""

    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer


class NamesOfMindcv(nn.TrainOneStepWithLossScaleCell):
    """The Parameters of mindcv's train cell, with and without accumulation; it never trains."""

    def __init__(self, network, optimizer, accumulates):
        super().__init__(network, optimizer, nn.DynamicLossScaleUpdateCell(1024, 2, 2000))
        self.updates = Parameter(Tensor(0.0, ms.float32))
        self.weights_all = ms.ParameterTuple(list(network.get_parameters()))
        self.ema_weight = self.weights_all.clone("ema", init="same")
        if accumulates:
            self.gradient_accumulation = Holder(optimizer)
            self.sums = self.weights.clone("grad_accumulation", init="zeros")
            self.accumulation_step = Parameter(Tensor(1, ms.int32), name="accumulation_step")


def of_mindcv(accumulates, folder):
    """Write a checkpoint as mindcv's cell does, with random values; return its path and the values by our names."""
    theirs = nn.WithLossCell(network_with_norm(), nn.MSELoss())
    theirs = NamesOfMindcv(theirs, nn.Momentum(theirs.trainable_params(), 0.1, 0.9), accumulates)
    rng, values = np.random.default_rng(0), {}
    for parameter in theirs.get_parameters():
        value = np.asarray(rng.uniform(1, 2, parameter.shape), np.float32)
        if parameter.dtype != ms.float32 or parameter.name == "updates":
            value = np.full(parameter.shape, 3, ms.dtype_to_nptype(parameter.dtype))
        parameter.set_data(Tensor(value))
        values[parameter.name.removeprefix("optimizer.").replace("updates", "ema.updates")] = value
    ms.save_checkpoint(theirs, str(folder / "theirs.ckpt"))
    names = [parameter.name for parameter in theirs.get_parameters()]
    assert ("optimizer.global_step" in names) == accumulates
    return folder / "theirs.ckpt", values


@pytest.mark.parametrize("accumulates", [False, True])
def test_mindcv_checkpoints_load_and_train_on(mode, tmp_path, accumulates):
    path, values = of_mindcv(accumulates, tmp_path)
    cells = []
    for _ in range(2):
        net = nn.WithLossCell(network_with_norm(), nn.MSELoss()).set_train()
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        options = {"loss_scale_type": "dynamic", "loss_scale": 64.0, "ema_decay": 0.9}
        cells.append(mindcv.train_cell(net, optimizer, accumulate_steps=2 if accumulates else 1, **options))
    loaded, assigned = cells
    loaded(*batch(seed=9)), loaded(*batch(seed=9))  # into a cell that has stepped, too
    missing = mindcv.load_checkpoint(loaded, path)
    assert {"consecutive_overflows", "total_overflows"} <= set(missing) and not set(missing) & set(values)
    for parameter in assigned.get_parameters():
        if parameter.name in values:
            parameter.set_data(Tensor(values[parameter.name].astype(ms.dtype_to_nptype(parameter.dtype))))
    for seed in range(4):
        assert float(loaded(*batch(seed=seed))) == float(assigned(*batch(seed=seed)))
    for got, want in zip(loaded.get_parameters(), assigned.get_parameters()):
        np.testing.assert_array_equal(got.asnumpy(), want.asnumpy(), got.name)
    assert int(loaded.ema.updates.asnumpy()) == 3 + (2 if accumulates else 4)


def test_mindcv_checkpoint_of_another_network_is_refused(tmp_path):
    path, _ = of_mindcv(False, tmp_path)
    net = nn.WithLossCell(nn.Dense(8, 4), nn.MSELoss())
    step = mindcv.train_cell(net, nn.Momentum(net.trainable_params(), 0.1, 0.9))
    with pytest.raises(ValueError, match="no checkpoint of this network"):
        mindcv.load_checkpoint(step, path)


def series(count, overflows, seed=0):
    """Return gradients of `count` micro-steps; those in `overflows` hold an inf."""
    rng = np.random.default_rng(seed)
    steps = [[rng.standard_normal(shape).astype(np.float32) for shape in SHAPES] for _ in range(count)]
    for place in overflows:
        steps[place][1][2] = np.inf
    return steps


def by_hand(steps, window, clip, decay=None, drop=True, rate=0.5):
    """Return what plain gradient descent makes of 0: after each window its weights, and at last their average."""
    weights = [np.zeros(shape) for shape in SHAPES]
    averages, history = weights, []
    with np.errstate(all="ignore"):
        for start in range(0, len(steps), window):
            mean = [np.sum(grads, axis=0, dtype=np.float64) / window for grads in zip(*steps[start : start + window])]
            if not drop or all(np.isfinite(g).all() for g in mean):
                weights = [w - rate * g for w, g in zip(weights, clip(mean))]
                averages = [a if decay is None else decay * a + (1 - decay) * w for a, w in zip(averages, weights)]
            history.append(weights)
    return history, averages


def global_norm(limit):
    def clip(grads):
        norm = np.sqrt(sum((g**2).sum() for g in grads))
        return [g if norm <= limit else g * (limit / norm) for g in grads]

    return clip


def check(step, steps, window, history):
    """Run `step` over the gradients; compare the weights at the end of each window, and unmoved inside it."""
    before, outputs = [np.zeros(shape) for shape in SHAPES], []
    for i, grads in enumerate(steps):
        outputs.append(step(*[Tensor(g) for g in grads]))
        if (i + 1) % window == 0:
            before = history[i // window]
        for weight, want in zip(step.weights, before):
            np.testing.assert_allclose(weight.asnumpy(), want, rtol=1e-4, atol=1e-6)
    return outputs


def given():
    net = GradientsAsGiven([np.zeros(shape, np.float32) for shape in SHAPES])
    return net, nn.SGD(list(net.w), 0.5)


def test_mindone_trainer_equals_numpy(mode):
    steps = series(12, overflows=[4])
    history, averages = by_hand(steps, 3, global_norm(1.0), decay=0.75)
    options = {"accumulate_steps": 3, "clip_norm": 1.0, "ema_decay": 0.75}
    step = mindone.trainer_cell(*given(), DynamicLossScaleUpdateCell(64.0, 2, 2), **options)
    outputs = check(step, steps, 3, history)
    assert [bool(overflow) for _, overflow, _ in outputs] == [i == 5 for i in range(12)]
    rule = DynamicScale(64.0, window=2)
    assert [float(scale) for _, _, scale in outputs[2::3]] == [rule.step(window == 1) for window in range(4)]
    for shadow, want in zip(step.ema.shadows, averages):
        np.testing.assert_allclose(shadow.asnumpy(), want, rtol=1e-4, atol=1e-6)


class WithAuxiliary(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0, 2.0]), name="w")

    def construct(self, grad):
        return (self.w * grad).sum(), self.w * 10.0


def test_mindone_diffusers_reports_the_true_loss_while_the_scale_moves(mode):
    net = WithAuxiliary()
    update = DynamicLossScaleUpdateCell(8.0, 2, 1)
    step = mindone.diffusers_cell(net, nn.SGD([net.w], 0.0), update, accumulate_steps=2)
    for i in range(6):
        grad = Tensor(np.float32([1, 3e38 if i == 3 else 1]))  # 2 * 3e38 is inf, and so are the sums
        loss, auxiliary = step(grad)
        assert (float(loss), auxiliary.asnumpy().tolist()) == (np.inf if i == 3 else 3.0, [10.0, 20.0])
    assert float(step.scale_sense.asnumpy()) == 16.0  # 8 -> 16 -> 8 -> 16


def test_mindocr_keeps_overflowing_updates(mode):
    steps = series(6, overflows=[2])
    history, averages = by_hand(steps, 2, global_norm(1.0), decay=0.0, drop=False)
    assert np.isnan(history[1][1][2])
    assert np.isfinite(history[2][0]).all()  # other weights: a factor of 1 / inf, and then clean updates
    scaler = {"type": "dynamic", "loss_scale": 512, "scale_factor": 2.0, "scale_window": 1000.0}
    step = mindocr.train_cell(*given(), scaler, accumulate_steps=2, clip_norm=1.0, ema_decay=0.0)
    outputs = check(step, steps, 2, history)
    assert [(bool(overflow), float(scale)) for _, overflow, scale in outputs[1::2]] == [
        (False, 512.0),
        (True, 256.0),
        (False, 256.0),
    ]
    for shadow, want in zip(step.ema.shadows, averages):
        np.testing.assert_allclose(shadow.asnumpy(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_mindocr_drops_where_asked(mode, kind):
    steps = series(6, overflows=[2])
    history, _ = by_hand(steps, 2, global_norm(1.0))
    scaler = {"type": kind, "loss_scale": 512}
    step = mindocr.train_cell(*given(), scaler, accumulate_steps=2, clip_norm=1.0, drop_overflow_update=True)
    outputs = check(step, steps, 2, history)
    assert float(outputs[-1][2]) == (256.0 if kind == "dynamic" else 512.0)


@pytest.mark.parametrize("force_update", [False, True])
def test_mindaudio_conformer_has_its_five_places(mode, force_update):
    net, _ = given()
    steps = series(4, overflows=[1])
    history, _ = by_hand(steps, 1, global_norm(2.0), drop=not force_update)
    optimizer = nn.SGD(list(net.w), [0.5, 0.5, 0.5, 0.5])
    update = DynamicLossScaleUpdateCell(64.0, 2, 100)
    step = mindaudio.conformer_cell(net, optimizer, update, clip_norm=2.0, force_update=force_update)
    outputs = check(step, steps, 1, history)
    assert all(len(output) == 5 for output in outputs)
    assert [[float(value) for value in output[1:]] for output in outputs] == [
        [0, 64, 0, 0.5],
        [1, 32, 1, 0.5],
        [0, 32, 0, 0.5],
        [0, 32, 0, 0.5],
    ]


def test_mindaudio_ecapa_sees_what_its_clip_would_hide(mode):
    net = WithAuxiliary()
    step = mindaudio.ecapa_cell(net, nn.SGD([net.w], 1.0))
    _, overflow, scale, output = step(Tensor(np.float32([np.inf, 0.5])))
    assert (bool(overflow), float(scale), output.shape) == (True, 2.0**14, (2,))
    assert net.w.asnumpy().tolist() == [1.0, 2.0]
    _, overflow, _, output = step(Tensor(np.float32([-7, 0.5])))
    assert (bool(overflow), output.asnumpy().tolist()) == (False, [10.0, 20.0])
    assert net.w.asnumpy().tolist() == [2.0, 1.5]


def test_mindaudio_fastspeech2_always_updates(mode):
    steps = series(3, overflows=[1])
    history, _ = by_hand(steps, 1, lambda grads: grads, drop=False)
    assert np.isinf(history[1][1][2])
    step = mindaudio.fastspeech2_cell(*given(), DynamicLossScaleUpdateCell(64.0, 2, 100))
    outputs = check(step, steps, 1, history)
    assert outputs[0].shape == ()
    assert float(step.scale_sense.asnumpy()) == 32.0


def test_mindaudio_deepspeech2_divides_once(mode):
    steps = series(2, overflows=[])
    history, _ = by_hand(steps, 1, lambda grads: grads)
    check(mindaudio.deepspeech2_cell(*given()), steps, 1, history)
    net, _ = given()
    with pytest.raises(ValueError, match="divided twice"):
        mindaudio.deepspeech2_cell(net, nn.Adam(list(net.w), loss_scale=1024.0))


def own_norms(grads):
    norms = [np.sqrt((g**2).sum()) for g in grads]
    return [g if norm <= 1 else g / norm for g, norm in zip(grads, norms)]


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        ("norm", own_norms),
        ("value", lambda grads: [np.clip(g, -1, 1) for g in grads]),
        ("global_norm", global_norm(1.0)),
    ],
    ids=["norm", "value", "global_norm"],
)
def test_bert_drops_whole_windows(mode, kind, clip):
    steps = series(9, overflows=[3])
    history, _ = by_hand(steps, 3, clip)
    step = bert.train_cell(*given(), DynamicLossScaleUpdateCell(64.0, 2, 100), accumulate_steps=3, clip=kind)
    outputs = check(step, steps, 3, history)
    assert [bool(overflow) for _, overflow, _ in outputs] == [i == 5 for i in range(9)]
    assert [float(scale) for _, _, scale in outputs] == [64.0] * 5 + [32.0] * 4


class SumOfTokens(nn.Cell):
    """The loss of `series` as a sum over tokens, with their number."""

    def __init__(self):
        super().__init__()
        self.net = GradientsAsGiven([np.zeros(shape, np.float32) for shape in SHAPES])

    def construct(self, *inputs):
        return self.net(*inputs[:-1]) * inputs[-1], inputs[-1]


def test_mindformers_divides_by_tokens_clips_and_skips_spikes(mode):
    net = SumOfTokens()
    steps = series(10, overflows=[2])
    steps[6] = [grad * 100 for grad in steps[6]]  # a spike
    tokens = np.random.default_rng(1).integers(1, 9, 10).astype(np.float32)
    options = {"max_grad_norm": 1.0, "global_norm_spike_threshold": 20.0, "accumulate_steps": 2}
    update = DynamicLossScaleUpdateCell(64.0, 2, 100)
    step = mindformers.train_cell(net, nn.SGD(list(net.net.w), 0.5), update, calculate_per_token_loss=True, **options)
    weights = [np.zeros(shape) for shape in SHAPES]
    for window in range(5):
        for micro in (2 * window, 2 * window + 1):
            outputs = step(*[Tensor(grad) for grad in steps[micro]], Tensor(tokens[micro]))
        first, second = tokens[2 * window : 2 * window + 2]
        pairs = zip(steps[2 * window], steps[2 * window + 1])
        mean = [(a.astype(np.float64) * first + b * second) / (first + second) for a, b in pairs]
        norm = np.sqrt(sum((grad**2).sum() for grad in mean))
        assert (norm > 20) == (window in (1, 3))
        if norm <= 20:
            weights = [w - 0.5 * g for w, g in zip(weights, global_norm(1.0)(mean))]
        for got, want in zip(net.net.w, weights):
            np.testing.assert_allclose(got.asnumpy(), want, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(float(outputs[4]), norm, rtol=1e-5)
        assert [float(value) for value in outputs[1:4]] == [window == 1, 64 if window < 1 else 32, 0.5]


@pytest.mark.parametrize(("clip", "spike"), [(None, None), (None, 20.0), (1.0, None)])
def test_mindformers_without_tokens(mode, clip, spike):
    steps = series(3, overflows=[1])
    step = mindformers.train_cell(*given(), 64.0, max_grad_norm=clip, global_norm_spike_threshold=spike)
    history, _ = by_hand(steps, 1, global_norm(clip or 1e9))
    outputs = check(step, steps, 1, history)
    assert [float(output[2]) for output in outputs] == [64.0] * 3


@pytest.mark.parametrize("still", [False, True])
def test_mindyolo_equals_numpy(mode, still):
    steps = series(4, overflows=[1])
    history, averages = by_hand(steps, 1, global_norm(1.0), decay=0.75, drop=not still)
    net, optimizer = given()
    scaler, average = mindyolo.loss_scaler("dynamic", 64.0, 2, 100), EMA(0.75)

    def with_parts(loss, label):
        return loss, label

    options = {"clip_grad_value": 1.0, "overflow_still_update": still, "ema": average}
    wrapped = Together(net)
    step = mindyolo.train_step_fn(wrapped, with_parts, optimizer, scaler, **options)
    for i, grads in enumerate(steps):
        _, parts, finite = step([Tensor(grad) for grad in grads], Tensor(float(i)))
        assert (float(parts), bool(finite)) == (i, i != 1)
        for weight, want in zip(net.w, history[i]):
            np.testing.assert_allclose(weight.asnumpy(), want, rtol=1e-4, atol=1e-6)
    assert float(scaler.scale_value.asnumpy()) == 32.0
    for shadow, want in zip(average.shadows, averages):
        np.testing.assert_allclose(shadow.asnumpy(), want, rtol=1e-4, atol=1e-6)


class Together(nn.Cell):
    """Takes the inputs of a network as one tuple."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def construct(self, inputs):
        return self.network(*inputs)


def test_mindyolo_scalers():
    assert [float(mindyolo.loss_scaler(kind, 8.0).scale_value.asnumpy()) for kind in ("static", "none", "dynamic")] == [
        8.0,
        1.0,
        8.0,
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "promise"),
    [
        ("mindcv", lambda result: result["averaged_accuracy"] > 0.4 and 0 < result["updates"] < 44),
        ("mindone", lambda result: result["last_loss"] < 0.7 * result["first_loss"]),
        ("mindocr", lambda result: result["accuracy"] > 0.6),
        ("mindaudio", lambda result: result["running_accuracy"] > 0.8),
        ("mindformers", lambda result: result["last_loss"] < 0.7 * result["first_loss"] and result["norm"] > 0),
        ("mindyolo", lambda result: result["accuracy"] > 0.8 and 0 < result["skipped"] < 20),
        ("bert", lambda result: result["last_loss"] < 0.8 * result["first_loss"]),
    ],
)
def test_each_runs_on_real_data(name, promise):
    result = last_line(run("-m", f"examples.migration.{name}"))
    assert promise(result), result
