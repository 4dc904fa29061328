"""This library under MindSpore's names: what is replaced, what is not, and that it trains."""

import ast
import sys
import types
from pathlib import Path

import mindspore
import mindspore.train.amp
import mindspore.train.model
import numpy as np
import pytest
from mindspore import Tensor, amp, nn

import lossscale

# Other tests have imported MindSpore's originals by now.
pytestmark = pytest.mark.filterwarnings("ignore:imported before")

_STOCK = {
    "nn.TrainOneStepWithLossScaleCell": nn.TrainOneStepWithLossScaleCell,
    "Model": mindspore.Model,
    "amp.all_finite": amp.all_finite,
}


@pytest.fixture
def patched():
    with lossscale.patch_mindspore(verbose=False) as names:
        yield names


def test_every_public_name_is_replaced(patched):
    from mindspore.nn.wrap.loss_scale import TrainOneStepWithLossScaleCell

    assert TrainOneStepWithLossScaleCell is lossscale.TrainOneStepWithLossScaleCell
    assert nn.DynamicLossScaleUpdateCell is nn.wrap.DynamicLossScaleUpdateCell is lossscale.DynamicLossScaleUpdateCell
    assert nn.FixedLossScaleUpdateCell is lossscale.FixedLossScaleUpdateCell
    assert mindspore.Model is mindspore.train.Model is mindspore.train.model.Model is lossscale.Model
    assert mindspore.DynamicLossScaleManager is amp.DynamicLossScaleManager is lossscale.DynamicLossScaleManager
    assert mindspore.train.loss_scale_manager.FixedLossScaleManager is lossscale.FixedLossScaleManager
    assert amp.DynamicLossScaler is lossscale.DynamicLossScaler
    assert amp.StaticLossScaler is lossscale.StaticLossScaler
    assert amp.all_finite is lossscale.all_finite
    assert mindspore.train.amp.build_train_network is amp.build_train_network is lossscale.build_train_network
    assert "mindspore.nn.TrainOneStepWithLossScaleCell" in patched


def test_a_second_call_changes_nothing_and_leaves_the_end_to_the_first(patched):
    with lossscale.patch_mindspore() as again:
        assert list(again) == list(patched)
    assert mindspore.Model is lossscale.Model


def test_unpatched_names_are_mindspores_again():
    names = lossscale.patch_mindspore(verbose=False)
    assert names
    lossscale.unpatch_mindspore()
    lossscale.unpatch_mindspore()
    assert nn.TrainOneStepWithLossScaleCell is _STOCK["nn.TrainOneStepWithLossScaleCell"]
    assert mindspore.Model is _STOCK["Model"]
    assert amp.all_finite is _STOCK["amp.all_finite"]
    assert type(nn) is types.ModuleType


def test_modules_imported_before_are_named():
    early = types.ModuleType("early_import")
    early.Held = nn.TrainOneStepWithLossScaleCell
    early.Subclass = type("Subclass", (nn.TrainOneStepWithLossScaleCell,), {})
    early.OnOurs = type("OnOurs", (lossscale.TrainOneStepWithLossScaleCell,), {})
    sys.modules["early_import"] = early
    try:
        with pytest.warns(UserWarning, match="imported before") as caught, lossscale.patch_mindspore(verbose=False):
            pass
    finally:
        del sys.modules["early_import"]
    message = str(caught[0].message)
    assert "early_import.Held (is TrainOneStepWithLossScaleCell)" in message
    assert "early_import.Subclass (subclass of TrainOneStepWithLossScaleCell)" in message
    assert "OnOurs" not in message


def test_what_was_replaced_is_printed(capsys):
    with lossscale.patch_mindspore():
        pass
    assert "replaced" in capsys.readouterr().err


def test_stock_code_trains_and_skips_an_overflow(patched, mode):
    class ClientStep(nn.TrainOneStepWithLossScaleCell):
        def construct(self, x, y):
            return super().construct(x, y)

    net = nn.Dense(3, 1, has_bias=False)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    manager = mindspore.DynamicLossScaleManager(1024.0, 2, 100)
    step = ClientStep(nn.WithLossCell(net, nn.MSELoss()), optimizer, manager.get_update_cell())
    x, y = Tensor(np.ones((2, 3), np.float32)), Tensor(np.zeros((2, 1), np.float32))
    start = net.weight.asnumpy().copy()
    loss, overflow, _ = step(x, y)
    error = start.sum()
    assert not overflow
    np.testing.assert_allclose(net.weight.asnumpy(), start - 0.1 * 2 * error, rtol=1e-5)
    np.testing.assert_allclose(loss.asnumpy(), error**2, rtol=1e-5)
    before = net.weight.asnumpy().copy()
    _, overflow, scale = step(Tensor(np.full((2, 3), np.inf, np.float32)), y)
    assert overflow and float(scale) == 512.0
    np.testing.assert_array_equal(net.weight.asnumpy(), before)


@pytest.mark.parametrize("manager", ["DynamicLossScaleManager", "FixedLossScaleManager"])
def test_model_of_mindspores_name_builds_our_step(patched, manager):
    net = nn.Dense(3, 1)
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    model = mindspore.Model(net, nn.MSELoss(), optimizer, loss_scale_manager=getattr(mindspore, manager)())
    assert isinstance(model.train_network, lossscale.TrainOneStepWithLossScaleCell)
    cell = amp.build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=None)
    assert type(cell) is nn.TrainOneStepCell


def test_no_code_of_ours_looks_a_replaced_name_up_when_it_runs():
    replaced = {"TrainOneStepWithLossScaleCell", "all_finite", "build_train_network", "Model"}
    root = Path(lossscale.__file__).parent.parent
    for path in [*(root / "cells").rglob("*.py"), *(root / "lossscale").rglob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    at_call = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    found = at_call and node.value.id in ("nn", "amp", "mindspore", "ms") and node.attr in replaced
                    assert not found, f"{path}:{node.lineno}"


def test_verbose_must_be_a_bool():
    with pytest.raises(TypeError, match="verbose"):
        lossscale.patch_mindspore(verbose=1)
