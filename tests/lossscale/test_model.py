import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, CheckpointConfig, LossMonitor, ModelCheckpoint

from lossscale import (
    DynamicLossScaleManager,
    FixedLossScaleManager,
    Model,
    TrainOneStepWithLossScaleCell,
    build_train_network,
)
from tests.nets import copy_parameters, mlp
from tests.oracles import same_bits

BATCHES = 4


def dataset(poisoned=()):
    """Four batches of eight; those whose numbers are in `poisoned` hold an inf."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCHES, 8, 8)).astype(np.float32)
    y = rng.standard_normal((BATCHES, 8, 4)).astype(np.float32)
    y[list(poisoned)] = np.inf
    rows = list(zip(x.reshape(-1, 8), y.reshape(-1, 4)))
    return GeneratorDataset(rows, ["x", "y"], shuffle=False, num_parallel_workers=1).batch(8)


def momentum(net, **kwargs):
    return nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9, **kwargs)


def model_of(net, cls=Model, optimizer=None, **kwargs):
    return cls(net, nn.MSELoss(), optimizer or momentum(net), metrics={"mae": nn.MAE()}, **kwargs)


class Record(Callback):
    """Keep what each step returned, and count epochs and evaluations."""

    def __init__(self):
        self.outputs, self.epochs, self.evaluations = [], 0, 0

    def on_train_epoch_begin(self, run_context):
        self.epochs += 1

    def on_eval_end(self, run_context):
        self.evaluations += 1

    def on_train_step_end(self, run_context):
        outputs = run_context.original_args().net_outputs
        self.outputs.append(outputs if isinstance(outputs, tuple) else (outputs,))

    def numbers(self):
        return [tuple(float(value) for value in outputs) for outputs in self.outputs]


@pytest.mark.parametrize("sink", [False, True])
def test_train_skips_overflows_and_moves_the_scale(mode, sink):
    manager, record, net = DynamicLossScaleManager(2**10, 2, 2), Record(), mlp()
    model = model_of(net, loss_scale_manager=manager)
    model.train(2, dataset(poisoned=[1]), callbacks=[record], dataset_sink_mode=sink)
    steps = record.numbers()
    assert [step[1] for step in steps] == [0, 1, 0, 0] * 2
    assert [step[2] for step in steps] == [1024, 512, 512, 1024, 1024, 512, 512, 1024]
    assert manager.get_loss_scale() == 1024
    assert manager.bad_step == 0
    assert all(np.isfinite(p.asnumpy()).all() for p in model.train_network.get_parameters())


@pytest.mark.parametrize("drop", [True, False])
def test_a_fixed_manager_trains_as_no_manager(mode, drop):
    nets = mlp(), mlp()
    copy_parameters(*nets)
    optimizer = momentum(nets[0]) if drop else momentum(nets[0], loss_scale=256.0)
    scaled = model_of(nets[0], optimizer=optimizer, loss_scale_manager=FixedLossScaleManager(256.0, drop))
    scaled.train(1, dataset(), dataset_sink_mode=False)
    before = nets[1].trainable_params()[0].asnumpy().copy()
    model_of(nets[1], ms.Model).train(1, dataset(), dataset_sink_mode=False)
    for a, b in zip(nets[0].trainable_params(), nets[1].trainable_params()):
        assert same_bits(a.asnumpy(), b.asnumpy())
    assert not same_bits(before, nets[1].trainable_params()[0].asnumpy())


def test_eval_and_predict_are_mindspores(mode):
    nets = mlp(), mlp()
    copy_parameters(*nets)
    ours = model_of(nets[0], loss_scale_manager=DynamicLossScaleManager())
    stock = model_of(nets[1], ms.Model)
    assert ours.eval(dataset(), dataset_sink_mode=False) == stock.eval(dataset(), dataset_sink_mode=False)
    x = ms.Tensor(np.ones((2, 8), np.float32))
    assert same_bits(ours.predict(x).asnumpy(), stock.predict(x).asnumpy())


def test_fit_trains_and_evaluates(mode):
    record = Record()
    model = model_of(mlp(), loss_scale_manager=DynamicLossScaleManager())
    model.fit(3, dataset(), dataset(), callbacks=[record], dataset_sink_mode=False)
    losses = [step[0] for step in record.numbers()]
    assert record.epochs == 3
    assert len(losses) == 3 * BATCHES
    assert sum(losses[-BATCHES:]) < sum(losses[:BATCHES])
    assert record.evaluations == 3


def test_loss_monitor_prints_the_unscaled_loss(capsys):
    record = Record()
    model = model_of(mlp(), loss_scale_manager=FixedLossScaleManager(2.0**20))
    model.train(1, dataset(), callbacks=[record, LossMonitor()], dataset_sink_mode=False)
    printed = [float(line.split("loss is ")[1]) for line in capsys.readouterr().out.splitlines() if "loss is" in line]
    assert printed == pytest.approx([step[0] for step in record.numbers()])


def test_model_checkpoint_saves_scale_and_counters(mode, tmp_path):
    model = model_of(mlp(), loss_scale_manager=DynamicLossScaleManager(2**10, 2, 100))
    saver = ModelCheckpoint("m", str(tmp_path), CheckpointConfig(save_checkpoint_steps=BATCHES))
    model.train(1, dataset(poisoned=[0, 2, 3]), callbacks=[saver], dataset_sink_mode=False)
    saved = ms.load_checkpoint(str(tmp_path / f"m-1_{BATCHES}.ckpt"))
    seen = {name: float(value.asnumpy()) for name, value in saved.items() if value.shape == ()}
    assert seen["scale_sense"] == 128
    assert seen["current_iterator_step"] == 5
    assert seen["last_overflow_iterator_step"] == 4
    assert seen["consecutive_overflows"] == 2
    assert seen["total_overflows"] == 3


def test_o2_brings_a_manager_that_the_model_updates():
    model = model_of(mlp(), amp_level="O2")
    record = Record()
    model.train(1, dataset(poisoned=[3]), callbacks=[record], dataset_sink_mode=False)
    overflows = sum(step[1] for step in record.numbers())
    assert overflows > 0
    assert model._loss_scale_manager.get_loss_scale() == record.numbers()[-1][2] == 2 ** (24 - overflows)
    assert model._loss_scale_manager.bad_step > 0


def test_two_o2_models_share_nothing():
    first, second = model_of(mlp(), amp_level="O2"), model_of(mlp(), amp_level="O2")
    first.train(1, dataset(poisoned=[3]), dataset_sink_mode=False)
    assert second._loss_scale_manager.get_loss_scale() == 2**24


def test_o2_with_an_explicit_none_does_not_scale():
    model = model_of(mlp(), amp_level="O2", loss_scale_manager=None)
    assert type(model.train_network) is nn.TrainOneStepCell


@pytest.mark.parametrize("cls", [Model, ms.Model])
def test_model_of_a_train_cell(mode, cls):
    net, record = mlp(), Record()
    cell = build_train_network(
        net, momentum(net), nn.MSELoss(), loss_scale_manager=DynamicLossScaleManager(2**10, 2, 3)
    )
    cls(cell).train(1, dataset(poisoned=[0]), callbacks=[record], dataset_sink_mode=False)
    assert [step[1:] for step in record.numbers()] == [(1, 512), (0, 512), (0, 512), (0, 1024)]


def test_mindspores_own_manager():
    manager, record = ms.amp.DynamicLossScaleManager(2**10, 2, 100), Record()
    model = model_of(mlp(), loss_scale_manager=manager)
    assert isinstance(model.train_network, TrainOneStepWithLossScaleCell)
    model.train(1, dataset(poisoned=[0, 1]), callbacks=[record], dataset_sink_mode=False)
    assert [step[2] for step in record.numbers()] == [512, 256, 256, 256]


def test_model_counts_overflows_in_a_row_and_stops():
    manager = DynamicLossScaleManager()
    manager.bad_step_max = 5
    model = model_of(mlp(), loss_scale_manager=manager)
    with pytest.raises(RuntimeError, match="6 overflows in a row"):
        model.train(2, dataset(poisoned=range(BATCHES)), dataset_sink_mode=False)
    assert manager.bad_step == 6


def test_a_clean_step_resets_the_count():
    manager = DynamicLossScaleManager()
    manager.bad_step_max = 3
    model_of(mlp(), loss_scale_manager=manager).train(3, dataset(poisoned=[0, 1, 2]), dataset_sink_mode=False)
    assert manager.bad_step == 0


def test_without_an_optimizer():
    with pytest.raises(ValueError, match="optimizer"):
        Model(mlp(), nn.MSELoss(), loss_scale_manager=DynamicLossScaleManager())
    assert np.isfinite(Model(mlp(), nn.MSELoss(), metrics={"mae": nn.MAE()}).eval(dataset())["mae"])


def test_keep_batchnorm_fp32_reaches_the_network():
    def normed():
        return nn.SequentialCell(nn.Dense(8, 4), nn.BatchNorm1d(4))

    kept, cast = normed(), normed()
    model_of(kept, amp_level="O2")
    model_of(cast, amp_level="O2", keep_batchnorm_fp32=False)
    assert [kept[1].get_flags().get("fp16", False), cast[1].get_flags().get("fp16", False)] == [False, True]
