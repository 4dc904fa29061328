"""The train step: what it returns and leaves alone, its third input, sizes of gradients, subclasses, errors."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import cells.backward
from cells.unscale import Unscale
from lossscale import (
    EMA,
    CustomTrainOneStepCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    TrainOneStepWithLossScaleCell,
)
from tests.nets import GradientsAsGiven, Poisoned, batch, mlp
from tests.oracles import parameters, same_bits

OPTIMIZERS = {
    "Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "Adam": lambda p: nn.Adam(p, 0.1),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1),
    "SGD, dynamic rate": lambda p: nn.SGD(p, nn.exponential_decay_lr(0.1, 0.9, 40, 5, 1), momentum=0.9),
}


def poisoned_step(update, optimizer=OPTIMIZERS["Momentum"]):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    return TrainOneStepWithLossScaleCell(net, optimizer(net.trainable_params()), update)


def given_step(values, scale_sense, dtypes=None, rate=1.0):
    net = GradientsAsGiven(values, dtypes)
    return TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), rate), scale_sense)


NO_POISON = Tensor(np.zeros(4, np.float32))


def poison(place, value):
    values = np.zeros(4, np.float32)
    values[place] = value
    return Tensor(values)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("place", "value"), [(0, np.inf), (3, np.nan), (2, -np.inf)])
def test_overflow_leaves_everything_but_the_scale(mode, optimizer, place, value):
    step = poisoned_step(DynamicLossScaleUpdateCell(1024.0, 2, 100), OPTIMIZERS[optimizer])
    x, y = batch()
    step(x, y, NO_POISON)
    before = parameters(step)
    _, overflow, loss_scale = step(x, y, poison(place, value))
    after = parameters(step)
    assert bool(overflow)
    assert (float(loss_scale), float(after["scale_sense"])) == (512.0, 512.0)
    counters = {"scale_sense", "current_iterator_step", "last_overflow_iterator_step"}
    counters |= {"consecutive_overflows", "total_overflows"}
    assert all(same_bits(before[name], after[name]) for name in set(before) - counters)
    step(x, y, NO_POISON)
    moved = parameters(step)
    assert not same_bits(before["0.weight"], moved["0.weight"])


def test_outputs_are_values_of_their_own(mode):
    step = poisoned_step(DynamicLossScaleUpdateCell(1024.0, 2, 2))
    x, y = batch()
    flags = [0, 0, 1, 1, 0, 0, 0, 1, 0]
    outputs = [step(x, y, poison(1, np.inf) if bad else NO_POISON) for bad in flags]
    assert [bool(overflow) for _, overflow, _ in outputs] == [bool(bad) for bad in flags]
    expected = [1024.0, 2048.0, 1024.0, 512.0, 512.0, 1024.0, 1024.0, 512.0, 512.0]
    assert [float(scale) for _, _, scale in outputs] == expected
    for loss, overflow, scale in outputs:
        assert (loss.shape, overflow.shape, scale.shape) == ((), (), ())
        assert (overflow.dtype, scale.dtype) == (ms.bool_, ms.float32)
        assert not isinstance(scale, Parameter)


def test_the_loss_is_not_scaled(mode):
    step = poisoned_step(FixedLossScaleUpdateCell(2.0**16))
    x, y = batch()
    expected = float(step.network(x, y, NO_POISON))
    assert float(step(x, y, NO_POISON)[0]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("scale", [1, 3, 0.25, 2.0**24, 2.0**126, 2.0**127])
def test_every_gradient_reaches_the_optimizer_at_its_true_size(mode, scale):
    rng = np.random.default_rng(0)
    grads = [rng.standard_normal(shape).astype(np.float32) * 0.01 for shape in [(4, 3), (3,), (1,)]]
    step = given_step([np.zeros_like(g) for g in grads], Tensor(scale, ms.float32))
    _, overflow, _ = step(*[Tensor(g) for g in grads])
    assert not bool(overflow)
    seed = np.float32(min(scale, 2.0**126))
    for weight, grad in zip(step.weights, grads):
        np.testing.assert_array_equal(-weight.asnumpy(), (grad * seed) * (np.float32(1) / seed))


def test_float16_gradients_that_would_vanish_in_float16(mode):
    # 2**-30 is 0 in float16. Scaled by 2**20 it survives the backward pass, and float32 keeps it to the end.
    grads = [np.full((4,), 2.0**-30, np.float32)]
    step = given_step([np.zeros(4, np.float32)], Tensor(2.0**20))
    step(*[Tensor(g) for g in grads])
    assert same_bits(-step.weights[0].asnumpy(), grads[0])


def test_parameters_in_float16_are_checked_in_float16(mode):
    # 1e6 is finite in float32, but inf is what a float16 optimizer would get.
    step = given_step([np.zeros(2, np.float32)], Tensor(2.0**-10), [ms.float16])
    _, overflow, _ = step(Tensor(np.float32([1.0, 60000.0])).astype(ms.float16))
    assert not bool(overflow)
    before = step.weights[0].asnumpy().copy()
    _, overflow, _ = step(Tensor(np.float32([1e30, 0.0])).astype(ms.float16))
    assert bool(overflow)
    assert same_bits(before, step.weights[0].asnumpy())


def test_float64_gradients_stay_float64(mode):
    net = GradientsAsGiven([np.zeros(2)], [ms.float64])
    step = TrainOneStepWithLossScaleCell(net, KeepGradients(list(net.w)), Tensor(2.0**10))
    value = 1 + 2.0**-40
    step(Tensor(np.full(2, value)))
    assert step.optimizer.kept.asnumpy().tolist() == [value, value]


class KeepGradients(nn.Optimizer):
    """An optimizer that only remembers its first gradient."""

    def __init__(self, parameters):
        super().__init__(0.1, parameters)
        self.kept = Parameter(Tensor(np.zeros(2)), name="kept")

    def construct(self, gradients):
        return ops.assign(self.kept, gradients[0])


@pytest.mark.parametrize("dtype", [ms.int32, ms.int64, ms.float16, ms.float32, ms.float64, ms.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_scale_of_any_numeric_dtype_keeps_its_shape(mode, dtype, shape):
    step = given_step([np.zeros(2, np.float32)], Tensor(np.full(shape, 8), ms.int32).astype(dtype))
    scale = step.scale_sense
    assert (scale.name, scale.dtype, scale.shape, float(scale.asnumpy().item())) == (
        "scale_sense",
        ms.float32,
        shape,
        8.0,
    )
    step.set_sense_scale(Tensor([16]).astype(dtype))
    _, _, third = step(Tensor(np.float32([1, 2])))
    assert (third.shape, third.dtype, float(third.asnumpy().item())) == (shape, ms.float32, 16.0)


def test_set_sense_scale_works_in_a_compiled_graph(mode):
    step = given_step([np.zeros(2, np.float32)], Tensor(1024.0))
    grad = Tensor(np.float32([2.0**-2, 1.0]))
    for scale in (4.0, 2.0**20, 3.0):
        step.set_sense_scale(Tensor(scale))
        before = step.weights[0].asnumpy().copy()
        assert float(step(grad)[2]) == scale
        np.testing.assert_allclose(before - step.weights[0].asnumpy(), [0.25, 1.0], rtol=1e-6)


@pytest.mark.parametrize(
    ("scale_sense", "error", "words"),
    [
        (1024.0, TypeError, "Tensor"),
        ("1024", TypeError, "Tensor"),
        (Tensor([1.0, 2.0]), ValueError, r"shape.*\(2,\)"),
        (Tensor([[1.0]]), ValueError, "shape"),
        (Tensor(True), TypeError, "real number"),
        (Tensor(0.0), ValueError, "> 0"),
        (Tensor(-2.0), ValueError, "> 0"),
        (Tensor(np.inf, ms.float32), ValueError, "finite"),
        (Tensor(np.nan, ms.float32), ValueError, "finite"),
    ],
    ids=str,
)
def test_bad_scales_are_refused_and_change_nothing(scale_sense, error, words):
    with pytest.raises(error, match=words):
        given_step([np.zeros(2, np.float32)], scale_sense)
    step = given_step([np.zeros(2, np.float32)], Tensor(8.0))
    with pytest.raises(error, match=words):
        step.set_sense_scale(scale_sense)
    assert float(step.scale_sense.asnumpy()) == 8.0


class TestScaleOfTheCall:
    """Seed 003's extra last input."""

    @pytest.mark.parametrize("shape", [(), (1,)], ids=str)
    def test_without_scale_sense_the_last_input_is_the_scale(self, mode, shape):
        net = GradientsAsGiven([np.zeros(2, np.float32)])
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0))
        for scale in (4, 2.0**20, 3):
            before = net.w[0].asnumpy().copy()
            _, overflow, third = step(Tensor(np.float32([0.25, 1.0])), Tensor(np.full(shape, scale, np.float32)))
            np.testing.assert_allclose(before - net.w[0].asnumpy(), [0.25, 1.0], rtol=1e-6)
            assert (third.shape, float(third.asnumpy().item()), bool(overflow)) == (shape, scale, False)

    def test_with_an_update_cell_it_replaces_the_scale_for_that_call(self, mode):
        net = nn.WithLossCell(mlp(), nn.MSELoss())
        update = DynamicLossScaleUpdateCell(1024.0, 2, 2)
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.1), update)
        x, y = batch()
        assert float(step(x, y)[2]) == 1024.0
        assert float(step(x, y, Tensor([8.0]))[2].asnumpy().item()) == 8.0
        assert (update.get_loss_scale(), int(update.cur_iter.asnumpy())) == (1024.0, 2)
        assert float(step(x, y)[2]) == 2048.0

    def test_an_overflowing_call_is_skipped_and_leaves_the_counters(self, mode):
        net = nn.WithLossCell(mlp(), nn.MSELoss())
        update = DynamicLossScaleUpdateCell(1024.0, 2, 2)
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.1), update)
        before = parameters(step)
        x, y = batch()
        _, overflow, scale = step(x * np.inf, y, Tensor(8.0))
        after = parameters(step)
        assert (bool(overflow), float(scale)) == (True, 8.0)
        assert all(same_bits(before[name], after[name]) for name in before)

    def test_it_sees_through_the_casting_wrapper(self, mode):
        net = ms.amp.auto_mixed_precision(nn.WithLossCell(mlp(), nn.MSELoss()), "O3")
        step = TrainOneStepWithLossScaleCell(
            net, nn.SGD(net.trainable_params(), 0.1), DynamicLossScaleUpdateCell(1024.0, 2, 2)
        )
        assert float(step(*batch(), Tensor([8.0]))[2].asnumpy().item()) == 8.0

    @pytest.mark.parametrize("scale", [Tensor([1.0, 2.0]), Tensor([[1.0]])], ids=str)
    def test_a_scale_of_another_shape_is_refused(self, mode, scale):
        net = GradientsAsGiven([np.zeros(2, np.float32)])
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0))
        with pytest.raises(ValueError, match="last input"):
            step(Tensor(np.float32([0.25, 1.0])), scale)
        assert net.w[0].asnumpy().tolist() == [0, 0]

    def test_set_sense_scale_is_refused(self):
        net = GradientsAsGiven([np.zeros(2, np.float32)])
        step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0))
        with pytest.raises(RuntimeError, match="last input of each call"):
            step.set_sense_scale(Tensor(2.0))


class Float16Loss(GradientsAsGiven):
    def construct(self, grad):
        return (self.w[0] * grad).sum().astype(ms.float16)


def test_a_float16_loss_is_named_with_its_cure(mode, monkeypatch):
    monkeypatch.setattr(cells.backward, "_warned", set())
    net = Float16Loss([np.zeros(2, np.float32)])
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(2.0**17))
    with pytest.warns(UserWarning, match=r"float16.*65504.*float32") as caught:
        for _ in range(2):
            _, overflow, _ = step(Tensor(np.float32([0.25, 1.0])))
    assert bool(overflow)
    assert len(caught) == 1


class Embedding(nn.Cell):
    def __init__(self):
        super().__init__()
        self.lookup = nn.EmbeddingLookup(20, 4, param_init="ones", target="CPU", sparse=True)
        self.dense = nn.Dense(4, 1)

    def construct(self, ids, factor):
        return (self.dense(self.lookup(ids)) * factor).mean()


def test_sparse_gradients_in_graph_mode():
    ms.set_context(mode=ms.GRAPH_MODE)
    net = Embedding()
    optimizer = nn.LazyAdam(net.trainable_params(), 0.1)
    optimizer.target = "CPU"
    step = TrainOneStepWithLossScaleCell(net, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 100))
    table = net.lookup.embedding_table
    before = table.asnumpy().copy()
    _, overflow, _ = step(Tensor([1, 3, 3], ms.int32), Tensor(1.0))
    moved = np.flatnonzero((table.asnumpy() != before).any(axis=1))
    assert (moved.tolist(), bool(overflow)) == ([1, 3], False)
    kept = table.asnumpy().copy()
    _, overflow, scale = step(Tensor([2, 4, 5], ms.int32), Tensor(np.inf, ms.float32))
    assert (bool(overflow), float(scale)) == (True, 512.0)
    assert same_bits(kept, table.asnumpy())


class OwnStep(TrainOneStepWithLossScaleCell):
    """The pattern of the libraries built on MindSpore's cell: construct written anew from its parts."""

    def construct(self, *inputs):
        loss = self.network(*inputs)
        scaling_sens = self.scale_sense
        status, scaling_sens = self.start_overflow_check(loss, scaling_sens)
        seed = ops.ones_like(loss) * ops.cast(scaling_sens, ops.dtype(loss))
        grads = self.grad(self.network, self.weights)(*inputs, seed)
        grads = self.hyper_map(ops.partial(_divide, scaling_sens), grads)
        grads = self.grad_reducer(grads)
        cond = self.get_overflow_status(status, grads)
        overflow = self.process_loss_scale(cond)
        if not overflow:
            loss = ops.depend(loss, self.optimizer(grads))
        return loss, cond, scaling_sens


_divide = ops.MultitypeFuncGraph("divide")


@_divide.register("Tensor", "Tensor")
def _divide_tensor(scale, grad):
    return grad * ops.reciprocal(scale)


def test_a_subclass_with_its_own_construct_works(mode):
    net = Poisoned(nn.WithLossCell(mlp(), nn.MSELoss()))
    update = DynamicLossScaleUpdateCell(1024.0, 2, 2)
    step = OwnStep(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), update)
    x, y = batch()
    flags = [bool(step(x, y, p)[1]) for p in (NO_POISON, poison(0, np.nan), NO_POISON, NO_POISON)]
    assert flags == [False, True, False, False]
    assert update.get_loss_scale() == 1024.0


class OwnCheck(TrainOneStepWithLossScaleCell):
    def get_overflow_status(self, status, compute_output):
        return compute_output[0].sum() > 3


def test_a_subclass_with_its_own_check_is_asked(mode):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = OwnCheck(net, nn.SGD(list(net.w), 1.0), Tensor(8.0))
    assert [bool(step(Tensor(np.float32([1, v])))[1]) for v in (1, 5)] == [False, True]


def test_it_is_a_stock_cell_with_all_that_subclasses_use():
    step = given_step([np.zeros(2, np.float32)], Tensor(8.0))
    assert isinstance(step, nn.TrainOneStepWithLossScaleCell)
    names = "network optimizer weights grad grad_reducer hyper_map scale_sense loss_scaling_manager reducer_flag"
    names += " parallel_mode is_distributed allreduce base less_equal use_graceful_exit"
    names += " set_sense_scale start_overflow_check get_overflow_status process_loss_scale"
    assert [name for name in names.split() if not hasattr(step, name)] == []


class OfMyOwn(TrainOneStepWithLossScaleCell):
    pass


def flag_of_sum(self, compute_output):
    return compute_output[0].sum() > 3


@pytest.mark.parametrize("kind", [TrainOneStepWithLossScaleCell, OfMyOwn])
def test_mindspores_check_is_compiled_into_the_step_of_a_subclass_too(mode, monkeypatch, kind):
    monkeypatch.setattr(nn.TrainOneStepWithLossScaleCell, "_get_gpu_overflow_status", flag_of_sum)
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = kind(net, nn.SGD(list(net.w), 1.0), Tensor(8.0))
    step.cpu_target = False
    step._stage_unscaling, step._stage_looks_again = Unscale(step.weights, False), True
    step.gpu_target = True
    assert [bool(step(Tensor(np.float32([1, v])))[1]) for v in (1, 5)] == [False, True]


@pytest.mark.parametrize(
    ("device", "soc", "check"),
    [
        ("CPU", None, None),
        ("GPU", None, "_get_gpu_overflow_status"),
        ("Ascend", "910b", "_get_ascend_overflow_status_on_infnan_mode"),
        ("Ascend", "910a", "_get_ascend_overflow_status_on_saturation_mode"),
    ],
)
def test_each_device_gets_its_check(monkeypatch, device, soc, check):
    real = ms.context.get_context
    monkeypatch.setattr(ms.context, "get_context", lambda key: device if key == "device_target" else real(key))
    step = given_step([np.zeros(2, np.float32)], Tensor(8.0))
    step.ascend_910b_target = soc == "910b"
    called = []
    for name in (
        "_get_gpu_overflow_status",
        "_get_ascend_overflow_status_on_infnan_mode",
        "_get_ascend_overflow_status_on_saturation_mode",
    ):
        monkeypatch.setattr(type(step), name, lambda *_, n=name: called.append(n) or Tensor(True), raising=False)
    grads = (Tensor(np.float32([np.inf])),)
    _, overflow, _ = step.unscale_and_check(grads, Tensor(8.0))
    assert bool(overflow)
    assert called == ([check] if check else [])


class Returns(GradientsAsGiven):
    def __init__(self, make):
        super().__init__([np.ones(2, np.float32)])
        self.make = make

    def construct(self, grad):
        return self.make((self.w[0] * grad).sum(), self.w[0] * 100.0)


def dict_beside(loss, h):
    return loss, {"h": h}


def none_beside(loss, h):
    return loss, None, h


def number_beside(loss, h):
    return loss, 3, h


def in_list(loss, h):
    return [loss, h]


def in_dict(loss, h):
    return {"h": h, "loss": loss}


def nothing(loss, h):
    return None


def dict_without_loss(loss, h):
    return {"h": h}


@pytest.mark.parametrize("make", [dict_beside, none_beside, number_beside, in_list, in_dict])
def test_whatever_stands_beside_the_loss_comes_back_and_is_not_differentiated(mode, make):
    net = Returns(make)
    loss, overflow, _, *extras = TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(8.0))(
        Tensor(np.float32([1, 2]))
    )
    assert (float(loss), bool(overflow), net.w[0].asnumpy().tolist()) == (3.0, False, [0, -1])
    last = extras[-1]["h"] if isinstance(extras[-1], dict) else extras[-1]
    assert last.asnumpy().tolist() == [100, 100]
    plain = CustomTrainOneStepCell(net, nn.SGD(list(net.w), 1.0), 4.0)
    assert float(plain(Tensor(np.float32([1, 2])))[0]) == -2.0
    assert net.w[0].asnumpy().tolist() == [-1, -3]


@pytest.mark.parametrize("make", [nothing, dict_without_loss])
def test_a_network_without_a_loss_is_told_what_to_return(mode, make):
    net = Returns(make)
    with pytest.raises(TypeError, match="must return its loss"):
        TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), Tensor(8.0))(Tensor(np.float32([1, 2])))


@pytest.mark.parametrize("make", [TrainOneStepWithLossScaleCell, CustomTrainOneStepCell])
def test_an_optimizer_that_divides_too_is_warned_of(make):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    with pytest.warns(UserWarning, match=r"loss_scale=8, .*divided twice") as caught:
        make(
            net,
            nn.SGD(list(net.w), 1.0, loss_scale=8.0),
            *([Tensor(8.0)] if make is not CustomTrainOneStepCell else [8]),
        )
    assert len(caught) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate_steps": 0},
        {"outputs": None},
        {"outputs": [3]},
        {"clip_grad": 1.0},
        {"ema": nn.ReLU()},
        {"drop_overflow_update": 2},
        {"optimizer": None},
        {"optimizer": nn.SGD},
        {"network": None},
        {"network": GradientsAsGiven},
    ],
    ids=str,
)
def test_a_failed_constructor_leaves_its_update_cell_and_average_free(options):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    update, ema = DynamicLossScaleUpdateCell(8.0, 2, 2), EMA(0.5)
    good = {"network": net, "optimizer": nn.SGD(list(net.w), 1.0), "scale_sense": update, "ema": ema}
    with pytest.raises((TypeError, ValueError), match=f"'{next(iter(options))}'"):
        TrainOneStepWithLossScaleCell(**{**good, **options})
    step = TrainOneStepWithLossScaleCell(**good)
    assert update.is_bound
    with pytest.raises(ValueError, match="belongs to another train cell"):
        TrainOneStepWithLossScaleCell(net, step.optimizer, Tensor(8.0), ema=ema)
