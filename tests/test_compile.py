"""The graph is compiled once, however the scale changes."""

import mindspore as ms
import pytest
from mindspore import Tensor, nn
from mindspore.common.api import _cell_graph_executor

from lossscale import DynamicLossScaleManager, DynamicLossScaleUpdateCell, Model, TrainOneStepWithLossScaleCell
from tests.lossscale.test_model import dataset, model_of
from tests.nets import batch, mlp


@pytest.fixture
def compilations(monkeypatch):
    """Count how often MindSpore builds a new graph, in GRAPH_MODE."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    count = []
    executor = _cell_graph_executor._graph_executor

    class Counting:
        def __getattr__(self, name):
            return getattr(executor, name)

        def __call__(self, *args, **kwargs):
            return executor(*args, **kwargs)

        def compile(self, *args, **kwargs):
            count.append(args)
            return executor.compile(*args, **kwargs)

    monkeypatch.setattr(_cell_graph_executor, "_graph_executor", Counting())
    yield count
    ms.set_context(mode=before)


def train_cell(scale_sense=None):
    net = mlp()
    optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
    return TrainOneStepWithLossScaleCell(nn.WithLossCell(net, nn.MSELoss()), optimizer, scale_sense)


def test_a_moving_scale_compiles_once(compilations):
    cell = train_cell(DynamicLossScaleUpdateCell(2**10, 2, 2))
    x, y = batch()
    bad = y * float("inf")
    del compilations[:]
    scales = [float(cell(x, bad if step % 5 == 0 else y)[2]) for step in range(20)]
    assert len(set(scales)) > 2
    assert len(compilations) == 1


def test_set_sense_scale_compiles_nothing(compilations):
    cell = train_cell(Tensor(2.0, ms.float32))
    x, y = batch()
    del compilations[:]
    for scale in (2.0, 4.0, 8.0):
        cell.set_sense_scale(Tensor(scale, ms.float32))
        assert float(cell(x, y)[2]) == scale
    assert len(compilations) == 1


def test_the_scale_of_each_call_compiles_once(compilations):
    cell = train_cell()
    x, y = batch()
    scales = [Tensor([scale], ms.float32) for scale in (1.0, 2.0, 1024.0, 3.0)]
    del compilations[:]
    assert [float(cell(x, y, scale)[2]) for scale in scales] == [1.0, 2.0, 1024.0, 3.0]
    assert len(compilations) == 1


def test_a_per_call_scale_beside_an_update_cell_adds_one(compilations):
    cell = train_cell(DynamicLossScaleUpdateCell(2**10, 2, 2))
    x, y = batch()
    scales = [Tensor(scale, ms.float32) for scale in (1.0, 2.0, 4.0)]
    del compilations[:]
    for scale in scales:
        cell(x, y)
        cell(x, y, scale)
    assert len(compilations) == 2


def test_a_new_shape_is_seen_by_the_counter(compilations):
    cell = train_cell(Tensor(2.0, ms.float32))
    del compilations[:]
    cell(*batch(8))
    cell(*batch(4))
    assert len(compilations) == 2


def test_model_compiles_once_for_all_epochs(compilations):
    model = model_of(mlp(), Model, loss_scale_manager=DynamicLossScaleManager(2**10, 2, 2))
    del compilations[:]
    model.train(3, dataset(poisoned=[1]), dataset_sink_mode=False)
    assert len(compilations) == 1
