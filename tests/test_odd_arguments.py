"""Arguments of the wrong kind, to every public name: a TypeError or ValueError that names the argument."""

import inspect
import os
import warnings

import numpy as np
import pytest
from mindspore import Tensor, nn

import lossscale
from lossscale import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    GradScaler,
    LossScaleMonitor,
)
from tests.nets import mlp

ODD = {
    "huge": 10**400,
    "None": None,
    "class": nn.Dense,
    "nan": float("nan"),
    "text": "odd",
    "-1": -1,
    "True": True,
    "list": [],
    "object": object(),
    "2**31": 2**31,
}
MORE = [-(10**400), 2**64, 0, 1e39, 1e-50, -1e39, float("inf"), -float("inf"), 1j, "", "\0", "a" * 300, b"odd"]
MORE += [bytearray(b"odd"), (), (1,), {}, {"a": 1}, {1}, range(3), slice(1), ..., NotImplemented, int, os]
MORE += [Exception("odd"), np.float64("nan"), np.ones(3), np.array("odd"), np.bool_(True), Tensor([1.0, 2.0])]
MORE += [Tensor(True), Tensor(float("nan")), type, iter([]), 1.5, -0.5, np.int64(-3), np.float16("inf")]

# What each argument takes of `ODD`; all else is refused.
NUMBER = {"2**31"}
OPTIONAL_NUMBER = {"2**31", "None"}
FLAG = {"True"}
OPTIONAL = {"None"}
NOTHING: set = set()
RULE = {"scale_factor": NUMBER, "scale_window": {"2**31", "huge"}, "min_loss_scale": NUMBER}
RULE |= {"max_loss_scale": OPTIONAL_NUMBER, "backoff_factor": OPTIONAL, "hysteresis": NOTHING}
PLACES = {"text"}
TAKES = {
    "ClipByGlobalNorm": {"max_norm": NUMBER, "skip_above": OPTIONAL_NUMBER},
    "ClipByNorm": {"max_norm": NUMBER},
    "ClipByValue": {"limit": NUMBER},
    "CustomTrainOneStepCell": {"network": NOTHING, "optimizer": NOTHING, "sens": NUMBER},
    "DynamicLossScaleManager": {"init_loss_scale": NUMBER, **RULE},
    "DynamicLossScaleUpdateCell": {"loss_scale_value": NUMBER, **RULE},
    "DynamicLossScaler": {"scale_value": NUMBER, **RULE, "name": {"None", "text"}},
    "EMA": {"decay": NOTHING, "parameters": OPTIONAL, "warmup": FLAG},
    "FixedLossScaleManager": {"loss_scale": NUMBER, "drop_overflow_update": FLAG},
    "FixedLossScaleUpdateCell": {"loss_scale_value": NUMBER},
    "GradScaler": {"init_scale": NUMBER, "growth_factor": NUMBER, "backoff_factor": NOTHING, "enabled": FLAG}
    | {"growth_interval": {"2**31", "huge"}},
    "LossScaleMonitor": {"history_file": {"None", "text"}, "append": FLAG, "every": {"2**31", "huge"}, "verbose": FLAG}
    | {"stop_after": {"2**31", "huge", "None"}, "progress": FLAG},
    "LossScaleUpdateCell": {"loss_scale_value": NUMBER},
    "LossScaler": {"name": {"None", "text"}},
    "Model": {
        "network": NOTHING,
        "loss_fn": OPTIONAL,
        "optimizer": OPTIONAL,
        "loss_scale_manager": OPTIONAL,
        "amp_level": NOTHING,
    },
    "StaticLossScaler": {"scale_value": NUMBER, "name": {"None", "text"}},
    "TrainOneStepWithLossScaleCell": {"network": NOTHING, "optimizer": NOTHING, "scale_sense": OPTIONAL}
    | {"accumulate_steps": NOTHING, "clip_grad": OPTIONAL, "ema": OPTIONAL, "drop_overflow_update": FLAG}
    | {"outputs": NOTHING},
    "all_finite": {"inputs": {"list"}},
    "build_train_network": {"network": NOTHING, "optimizer": NOTHING, "loss_fn": OPTIONAL, "level": NOTHING}
    | {"boost_level": NOTHING, "loss_scale_manager": OPTIONAL},
    "find_loss_scale": {"network": NOTHING, "loss_fn": OPTIONAL, "amp_level": OPTIONAL, "tolerance": NOTHING}
    | {"seed": NUMBER, "progress": FLAG},
    "find_nonfinite": {"grads": {"list"}, "names": OPTIONAL},
    "fuse": {"optimizer": NOTHING},
    "load_train_state": {"folder": PLACES, "train_cell": NOTHING, "step": OPTIONAL_NUMBER},
    "patch_mindspore": {"verbose": FLAG},
    "plot_history": {"history": NOTHING, "path": PLACES},
    "read_history": {"path": NOTHING},
    "save_train_state": {"folder": PLACES, "train_cell": NOTHING, "step": NUMBER, "keep": {"2**31", "huge"}},
}
# These take nothing, or are results that nobody makes by hand.
# MindSpore's optimizers check what they are given.
WITHOUT = {"FusedAdam", "FusedAdamW", "FusedAdamWeightDecay", "FusedMomentum", "FusedSGD"}
WITHOUT |= {
    "FastConvolutions",
    "fast_convolutions",
    "unpatch_mindspore",
    "LossScaleManager",
    "LossScaleReport",
    "NoOpLossScaler",
    "NonfiniteGradient",
    "backend",
}
METHODS = {
    "GradScaler.update": {"new_scale": OPTIONAL_NUMBER},
    "GradScaler.set_growth_factor": {"new_factor": NUMBER},
    "GradScaler.set_backoff_factor": {"new_factor": NOTHING},
    "GradScaler.set_growth_interval": {"new_interval": {"2**31", "huge"}},
    "GradScaler.load_state_dict": {"state_dict": NOTHING},
    "GradScaler.step": {"optimizer": NOTHING, "grads": NOTHING},
    "GradScaler.unscale_": {"optimizer": NOTHING, "grads": NOTHING},
    "LossScaleMonitor.start": {"train_cell": OPTIONAL, "total_steps": OPTIONAL_NUMBER, "first_step": {"2**31", "huge"}},
    "DynamicLossScaler.load_state_dict": {"state_dict": NOTHING},
}
# What is still met otherwise.
EXPECTED = {
    "CustomTrainOneStepCell": {"network", "optimizer"},
    "DynamicLossScaleManager": {"hysteresis"},
    "DynamicLossScaleUpdateCell": {"hysteresis", "scale_window"},
    "DynamicLossScaler": {"hysteresis", "scale_window", "scale_factor"},
    "EMA": {"parameters"},
    "TrainOneStepWithLossScaleCell": {"network", "optimizer", "accumulate_steps", "outputs"},
}
# What the error calls an argument, where that is not its name.
CALLED = {"new_factor": "factor", "new_interval": "interval", "loss_scale_manager": "manager", "amp_level": "level"}
CALLED |= {"state_dict": "state dict", "inputs": "Tensor", "boost_level": "boost"}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Right arguments for each name, made anew for each call."""
    net = mlp(2, 2, 1)
    weights = net.trainable_params()
    optimizer = nn.Momentum(weights, 0.1, 0.9)
    with_loss = nn.WithLossCell(net, nn.MSELoss())
    grads = tuple([Tensor(np.ones(weight.shape, np.float32)) for weight in weights])
    folder = tmp_path_factory.mktemp("odd")
    rule = {"scale_factor": 2.0, "scale_window": 3}
    cells = {"network": with_loss, "optimizer": optimizer}
    saved = {"folder": folder, "train_cell": nn.TrainOneStepCell(with_loss, optimizer), "step": 1}
    return {
        "ClipByGlobalNorm": {"max_norm": 1.0},
        "ClipByNorm": {"max_norm": 1.0},
        "ClipByValue": {"limit": 1.0},
        "CustomTrainOneStepCell": cells,
        "DynamicLossScaleUpdateCell": {"loss_scale_value": 8.0, **rule},
        "DynamicLossScaler": {"scale_value": 8.0, **rule},
        "EMA": {"decay": 0.9},
        "FixedLossScaleUpdateCell": {"loss_scale_value": 8.0},
        "LossScaleUpdateCell": {"loss_scale_value": 8.0},
        "Model": {"network": with_loss, "optimizer": optimizer, "loss_scale_manager": DynamicLossScaleManager()},
        "StaticLossScaler": {"scale_value": 8.0},
        "TrainOneStepWithLossScaleCell": {**cells, "scale_sense": Tensor(8.0)},
        "build_train_network": {**cells, "loss_scale_manager": DynamicLossScaleManager()},
        "find_loss_scale": {"network": net, "loss_fn": nn.MSELoss()},
        "find_nonfinite": {"grads": grads},
        "load_train_state": saved,
        "save_train_state": saved,
        "plot_history": {"history": [], "path": folder / "run.png"},
        "GradScaler.step": {"optimizer": optimizer, "grads": grads},
        "GradScaler.unscale_": {"optimizer": optimizer, "grads": grads},
    }


def function_of(name):
    """Return the function, the class, or the method of a new object."""
    owner, _, method = name.partition(".")
    if not method:
        return getattr(lossscale, name)
    make = {"GradScaler": GradScaler, "DynamicLossScaler": lambda: DynamicLossScaler(8.0, 2.0, 3)}
    make["LossScaleMonitor"] = lambda: LossScaleMonitor(progress=False)
    return getattr(make[owner](), method)


def complaint(name, arguments, argument, value):
    """Return what is wrong with how an odd value is met, None if it is taken or refused by the argument's name."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function_of(name)(**{**arguments, argument: value})
    except (TypeError, ValueError, RuntimeError) as error:
        if CALLED.get(argument, argument) in str(error).replace("'state_dict'", "state dict"):
            return ""
        return f"{type(error).__name__}: {error}"[:200]
    except OSError as error:
        return "" if str(value) in str(error) else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:200]
    return None


def test_the_table_has_every_public_name():
    assert set(TAKES) | WITHOUT == set(lossscale.__all__)
    assert not set(TAKES) & WITHOUT
    for name, arguments in TAKES.items():
        known = inspect.signature(getattr(lossscale, name)).parameters
        assert set(arguments) <= {*known, "loss_scale_manager"}, name


@pytest.mark.parametrize("name", [*TAKES, *METHODS])
def test_odd_arguments_are_refused_by_name(right, name):
    table = TAKES.get(name) or METHODS[name]
    wrong = {}
    for argument, taken in table.items():
        if argument in EXPECTED.get(name, ()):
            continue
        for odd in set(ODD) - taken:
            said = complaint(name, right.get(name, {}), argument, ODD[odd])
            if said != "":
                wrong[f"{argument}={odd}"] = said or "accepted"
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TAKES, *METHODS])
def test_odder_arguments_are_taken_or_refused_by_name(right, name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    wrong = {}
    for argument in set(TAKES.get(name) or METHODS[name]) - EXPECTED.get(name, set()):
        for value in MORE:
            said = complaint(name, right.get(name, {}), argument, value)
            if said and "needs the Tensors of one batch" not in said:  # what find_loss_scale looks at last
                wrong[f"{argument}={value!r:.40}"] = said
    assert wrong == {}
