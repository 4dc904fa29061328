import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, boost, context, nn

from lossscale import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    FixedLossScaleManager,
    Model,
    TrainOneStepWithLossScaleCell,
    build_train_network,
)
from tests.nets import batch, copy_parameters
from tests.oracles import StockTrainStep, parameters, same_bits


def network():
    return nn.SequentialCell(nn.Dense(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dense(16, 4))


def momentum(net, **kwargs):
    return nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9, **kwargs)


def built(net=None, optimizer=None, **kwargs):
    net = network() if net is None else net
    return build_train_network(net, optimizer or momentum(net), nn.MSELoss(), **kwargs)


def builds_in_both(net, optimizer, **kwargs):
    """Functions that build with `build_train_network` and with `Model`."""
    return (
        lambda: build_train_network(net, optimizer, nn.MSELoss(), **kwargs),
        lambda: Model(net, nn.MSELoss(), optimizer, **kwargs),
    )


@pytest.fixture
def on_ascend(monkeypatch):
    """Make MindSpore's Python code believe that it builds for Ascend."""
    real = context.get_context
    monkeypatch.setattr(context, "get_context", lambda key: "Ascend" if key == "device_target" else real(key))


def pretend_parallel(monkeypatch, key, value):
    real = context.get_auto_parallel_context
    monkeypatch.setattr(context, "get_auto_parallel_context", lambda name: value if name == key else real(name))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_every_level_trains_as_mindspores_cells(mode, level):
    nets = network(), network()
    copy_parameters(*nets)
    ours = built(nets[0], level=level, loss_scale_manager=DynamicLossScaleManager(2**10, 2, 2))
    assert isinstance(ours, TrainOneStepWithLossScaleCell)
    optimizer = momentum(nets[1])
    plain = amp.build_train_network(nets[1], optimizer, nn.MSELoss(), level, loss_scale_manager=None)
    stock = StockTrainStep(plain.network, optimizer, nn.DynamicLossScaleUpdateCell(2**10, 2, 2)).set_train()
    before = parameters(nets[0])
    for step in range(4):
        x, y = batch(seed=step)
        if step == 2:
            y = y * np.inf
        outputs = ours(x, y)
        assert bool(outputs[1]) is (step == 2)
        for a, b in zip(outputs, stock(x, y)):
            assert same_bits(a.asnumpy(), b.asnumpy())
    after, expected = parameters(nets[0]), parameters(nets[1])
    assert all(same_bits(a, b) for a, b in zip(after.values(), expected.values()))
    assert not same_bits(after["0.weight"], before["0.weight"])


@pytest.mark.parametrize(
    ("level", "options", "dense", "norm"),
    [
        ("O0", {}, "Float32", "Float32"),
        ("O2", {}, "Float16", "Float32"),
        ("O3", {}, "Float16", "Float16"),
        ("O0", {"cast_model_type": ms.float16}, "Float16", "Float16"),
        ("O0", {"cast_model_type": ms.float16, "keep_batchnorm_fp32": True}, "Float16", "Float32"),
        ("O2", {"cast_model_type": ms.float32}, "Float32", "Float32"),
        ("O2", {"keep_batchnorm_fp32": False}, "Float16", "Float16"),
    ],
)
def test_levels_and_what_overrides_them(level, options, dense, norm):
    net = network()
    train_cell = built(net, level=level, loss_scale_manager=FixedLossScaleManager(8.0), **options)
    assert isinstance(train_cell, TrainOneStepWithLossScaleCell)
    assert compute_dtype(net[0]) == dense
    assert compute_dtype(net[1]) == norm


def compute_dtype(cell):
    """The dtype that the cell's flags make it compute in."""
    return "Float16" if getattr(cell, "to_float_fp16", False) or cell.get_flags().get("fp16") else "Float32"


def test_o2_brings_a_new_dynamic_manager_each_time():
    first, second = built(level="O2"), built(level="O2")
    cells = first.loss_scaling_manager, second.loss_scaling_manager
    assert cells[0] is not cells[1]
    assert all(isinstance(cell, DynamicLossScaleUpdateCell) for cell in cells)
    assert float(first.scale_sense) == 2**24
    first.scale_sense.set_data(Tensor(4.0, ms.float32))
    assert float(second.scale_sense) == float(built(level="O2").scale_sense) == 2**24


@pytest.mark.parametrize("level", ["O0", "O1", "O3", "auto"])
def test_other_levels_bring_no_manager(level):
    assert type(built(level=level)) is nn.TrainOneStepCell


def test_explicit_none_means_none():
    assert type(built(level="O2", loss_scale_manager=None)) is nn.TrainOneStepCell


def test_returned_cell_trains():
    assert built(loss_scale_manager=FixedLossScaleManager()).training
    assert built().training


def test_without_a_loss_function_the_network_holds_it(mode):
    net = network()
    train_cell = build_train_network(
        nn.WithLossCell(net, nn.MSELoss()), momentum(net), loss_scale_manager=FixedLossScaleManager(8.0)
    )
    loss, overflow, scale = train_cell(*batch())
    assert np.isfinite(float(loss))
    assert (bool(overflow), float(scale)) == (False, 8.0)


@pytest.mark.parametrize("drop", [True, False])
def test_fixed_manager_trains_as_without_scaling(mode, drop):
    nets = network(), network()
    copy_parameters(*nets)
    optimizer = momentum(nets[0]) if drop else momentum(nets[0], loss_scale=1024.0)
    scaled = built(nets[0], optimizer, loss_scale_manager=FixedLossScaleManager(1024.0, drop))
    plain = built(nets[1])
    for step in range(3):
        out = scaled(*batch(seed=step))
        assert same_bits((out[0] if drop else out).asnumpy(), plain(*batch(seed=step)).asnumpy())
    for a, b in zip(nets[0].trainable_params(), nets[1].trainable_params()):
        assert same_bits(a.asnumpy(), b.asnumpy())


@pytest.mark.parametrize("manager", [amp.DynamicLossScaleManager(512, 2, 2), amp.FixedLossScaleManager(512.0)])
def test_mindspores_managers_work(mode, manager):
    train_cell = built(loss_scale_manager=manager)
    x, y = batch()
    scales = [float(train_cell(x, y)[2]) for _ in range(2)]
    _, overflow, scale = train_cell(x * np.inf, y)
    assert bool(overflow)
    grows = isinstance(manager, amp.DynamicLossScaleManager)
    assert [*scales, float(scale)] == ([512, 1024, 512] if grows else [512] * 3)


def test_unknown_arguments_are_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown arguments \['cast', 'scale'\].*cast_model_type.*loss_scale_manager"):
        built(scale=1, cast=2)
    with pytest.raises(ValueError, match=r"'Model' got unknown arguments \['scale'\].*'loss_scale_manager'"):
        Model(network(), scale=1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"level": "O5"}, ValueError, "'O2', 'O3', 'auto'"),
        ({"level": 2}, TypeError, "string"),
        ({"boost_level": "O9"}, ValueError, "O2"),
        ({"loss_scale_manager": 1024}, TypeError, r"got 1024 of type int. Write FixedLossScaleManager\(1024.0\)"),
        ({"loss_scale_manager": FixedLossScaleManager}, TypeError, "must be a LossScaleManager or None"),
        ({"optimizer": "sgd"}, TypeError, "'optimizer' must be a Cell, but got 'sgd'"),
        ({"network": "lenet"}, TypeError, "'network' must be a Cell, but got 'lenet'"),
        ({"cast_model_type": ms.int8}, TypeError, "cast_model_type"),
        ({"keep_batchnorm_fp32": 1}, TypeError, "keep_batchnorm_fp32"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    net = network()
    manager = {"loss_scale_manager": FixedLossScaleManager()} if "boost_level" not in arguments else {}
    with pytest.raises(error, match=message):
        build_train_network(**{"network": net, "optimizer": momentum(net), **manager, **arguments})


def test_an_optimizer_that_divides_too_is_refused():
    net = network()
    optimizer = momentum(net, loss_scale=1024.0)
    for manager in (FixedLossScaleManager(1024.0), DynamicLossScaleManager(), amp.FixedLossScaleManager(1024.0)):
        for build in builds_in_both(net, optimizer, loss_scale_manager=manager):
            with pytest.raises(ValueError, match=r"loss_scale=1024.*divided twice. Build the optimizer without"):
                build()
    for build in (lambda: built(net, optimizer, level="O2"), lambda: Model(net, None, optimizer, amp_level="O2")):
        with pytest.raises(ValueError, match="divided twice"):
            build()
    assert compute_dtype(net[0]) == "Float32"  # nothing was cast before the refusal


@pytest.mark.parametrize("divisor", [{}, {"loss_scale": 512.0}])
def test_a_kept_overflow_warns_of_another_division_and_trains_as_stock(divisor):
    manager, nets = FixedLossScaleManager(1024.0, False), [network(), network()]
    copy_parameters(*nets)
    rate = 1024 / divisor.get("loss_scale", 1)
    with pytest.warns(UserWarning, match=rf"effective learning rate is {rate:g} times.*loss_scale=1024"):
        ours = build_train_network(nets[0], momentum(nets[0], **divisor), nn.MSELoss(), loss_scale_manager=manager)
    stock = amp.build_train_network(nets[1], momentum(nets[1], **divisor), nn.MSELoss(), loss_scale_manager=manager)
    for _ in range(2):
        assert float(ours(*batch())) == float(stock(*batch()))


def test_an_optimizer_inside_a_wrapper_counts(on_ascend):
    net = network()
    wrapped = boost.FreezeOpt(momentum(net, loss_scale=8.0))
    with pytest.raises(ValueError, match=r"loss_scale=8.*divided twice"):
        built(net, wrapped, loss_scale_manager=FixedLossScaleManager(8.0))
    assert type(built(net, wrapped, loss_scale_manager=FixedLossScaleManager(8.0, False))) is nn.TrainOneStepCell


def test_boost_is_mindspores_or_refused():
    assert type(built(boost_level="O1")).__name__ == "BoostTrainOneStepCell"
    with pytest.raises(ValueError, match=r"boost_level='O1' is left to MindSpore.*CPU. Use loss_scale_manager=None"):
        built(boost_level="O1", loss_scale_manager=FixedLossScaleManager())
    with pytest.raises(ValueError, match="boost_level='O2' is left"):
        built(level="O2", boost_level="O2")


def test_an_optimizer_wrapper_is_refused():
    net = network()
    with pytest.raises(ValueError, match="The optimizer wrapper FreezeOpt is left to MindSpore"):
        built(net, boost.FreezeOpt(momentum(net)), loss_scale_manager=FixedLossScaleManager())


def test_group_manager_is_refused():
    net = network()
    with pytest.raises(ValueError, match="GroupLossScaleManager is left to MindSpore"):
        built(net, loss_scale_manager=boost.GroupLossScaleManager(4, [net.trainable_params()[:1], []]))


def test_gradient_accumulation_is_refused():
    net = network()
    inside = nn.GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)
    with pytest.raises(ValueError, match="gradient-accumulation cell inside the network is left to MindSpore"):
        build_train_network(inside, momentum(net), loss_scale_manager=DynamicLossScaleManager())
    with pytest.raises(ValueError, match="divide gradients that were never multiplied"):
        build_train_network(inside, momentum(net, loss_scale=8.0), loss_scale_manager=FixedLossScaleManager(8.0, False))
    unscaled = build_train_network(inside, momentum(net))
    assert type(unscaled).__name__ == "_TrainGradAccuStepCell"


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("pipeline_stages", 2, "Pipeline parallelism"),
        ("parallel_mode", "semi_auto_parallel", "Parallel mode 'semi_auto_parallel'"),
        ("parallel_mode", "auto_parallel", "Parallel mode 'auto_parallel'"),
    ],
)
def test_parallel_modes_are_refused(monkeypatch, key, value, reason):
    pretend_parallel(monkeypatch, key, value)
    with pytest.raises(ValueError, match=f"{reason} is left to MindSpore"):
        built(loss_scale_manager=FixedLossScaleManager())


def test_on_ascend_the_step_is_ours(on_ascend):
    assert type(built(level="O2")) is TrainOneStepWithLossScaleCell


@pytest.mark.parametrize("key", [None, "parallel_mode"])
def test_on_ascend_what_is_not_ours_goes_to_mindspore(monkeypatch, on_ascend, key):
    boost_level = "O1"
    if key is not None:
        pretend_parallel(monkeypatch, key, "semi_auto_parallel")
        boost_level = "O0"
    train_cell = built(loss_scale_manager=DynamicLossScaleManager(64), boost_level=boost_level)
    expected = nn.TrainOneStepWithLossScaleCell if key else boost.BoostTrainOneStepWithLossScaleCell
    assert type(train_cell) is expected
    assert float(train_cell.scale_sense) == 64


@pytest.mark.parametrize("by_name", [False, True])
def test_model_keeps_dynamic_inputs(mode, by_name):
    net = nn.Dense(8, 4)
    inputs = Tensor(shape=[None, 8], dtype=ms.float32)
    net.set_inputs(x=inputs) if by_name else net.set_inputs(inputs)
    loss_fn = nn.MSELoss()
    loss_fn.set_inputs(*[Tensor(shape=[None, 4], dtype=ms.float32)] * 2)
    stock = ms.Model(net, loss_fn, momentum(net)).train_network
    ours = Model(net, loss_fn, momentum(net), loss_scale_manager=FixedLossScaleManager(8.0)).train_network
    assert str(ours.get_inputs()) == str(stock.get_inputs())
    for size in (3, 5):
        assert np.isfinite(float(ours(*batch(size))[0]))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_dynamic_shapes(mode, level):
    train_cell = built(nn.SequentialCell(nn.Dense(8, 4)), level=level, loss_scale_manager=FixedLossScaleManager(8.0))
    train_cell.set_inputs(Tensor(shape=[None, 8], dtype=ms.float32), Tensor(shape=[None, 4], dtype=ms.float32))
    for size in (3, 5):
        loss, overflow, _ = train_cell(*batch(size))
        assert np.isfinite(float(loss))
        assert not bool(overflow)
