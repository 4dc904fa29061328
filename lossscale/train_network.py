"""Build a train cell from a network, an optimizer and a manager, as `mindspore.amp.build_train_network` does."""

import warnings
from typing import Any, Callable, Optional

from mindspore import amp, boost, context, experimental, nn
from mindspore.train.loss_scale_manager import LossScaleManager as _MindSporeLossScaleManager

from cells import TrainOneStepWithLossScaleCell
from lossscale.managers import DynamicLossScaleManager, LossScaleManager

# Bound here: patch_mindspore() puts ours under MindSpore's name, and a look-up at the call would find that.
_stock_build = amp.build_train_network

_KNOWN_ARGUMENTS = ("cast_model_type", "keep_batchnorm_fp32", "loss_scale_manager")


def build_train_network(
    network: nn.Cell,
    optimizer: nn.Cell,
    loss_fn: Optional[nn.Cell] = None,
    level: str = "O0",
    boost_level: str = "O0",
    **kwargs: Any,
) -> nn.Cell:
    """Return a train cell for `network` in mixed precision, with the loss scaled as its manager says.

    Like `mindspore.amp.build_train_network`, which does the casting here too, but a manager that skips
    overflowing steps works on every device.

    Args:
        network: the network, with the loss inside where `loss_fn` is None. It is cast in place.
        optimizer: updates the parameters of the network; of `mindspore.nn`, `mindspore.experimental.optim` or
            `mindspore.mint.optim`.
        loss_fn: the loss function. Default: None.
        level: mixed-precision level, "O0" (none), "O1", "O2", "O3" or "auto". "O2" brings a new
            `DynamicLossScaleManager()` of its own. Default: "O0".
        boost_level: "O0", "O1" or "O2"; above "O0" MindSpore's boost cells are used. Default: "O0".
        **kwargs: `loss_scale_manager` (None: no scaling, also under "O2"), `cast_model_type`
            (float16 or float32) and `keep_batchnorm_fp32` (bool), each in place of what `level` brings.

    Returns:
        `TrainOneStepWithLossScaleCell` where overflowing steps are skipped, else `nn.TrainOneStepCell`.

    Raises:
        ValueError: for an unknown argument, level or combination, and where gradients would be divided by the
            scale twice or not at all.
        TypeError: if an argument has the wrong type.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from lossscale import DynamicLossScaleManager, build_train_network
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> train_cell = build_train_network(net, optimizer, nn.MSELoss(), level="O2")
        >>> type(train_cell).__name__
        'TrainOneStepWithLossScaleCell'
    """
    check_known(kwargs, _KNOWN_ARGUMENTS, "build_train_network")
    check_loss_fn(loss_fn, "build_train_network")
    check_level("level", level, "build_train_network")
    check_level("boost_level", boost_level, "build_train_network")
    manager = kwargs.pop("loss_scale_manager") if "loss_scale_manager" in kwargs else manager_of_level(level)

    def build(stock_optimizer, stock_manager):
        return _stock_build(
            network, stock_optimizer, loss_fn, level, boost_level, loss_scale_manager=stock_manager, **kwargs
        )

    return build_scaled(build, network, optimizer, manager, boost_level)


def manager_of_level(level: str) -> Optional[LossScaleManager]:
    """Return the loss-scale manager that a mixed-precision level brings: a new one for "O2", none for the others."""
    return DynamicLossScaleManager() if level == "O2" else None


def build_scaled(
    build: Callable[[nn.Cell, Optional[Any]], nn.Cell],
    network: nn.Cell,
    optimizer: nn.Cell,
    manager: Optional[Any],
    boost_level: str,
) -> nn.Cell:
    """Return the train cell that MindSpore's `build` makes, with this library's train step where that applies.

    Args:
        build: MindSpore's own builder, a function of optimizer and manager. It is called once, after all checks.
    """
    for name, cell in (("network", network), ("optimizer", optimizer)):
        if not isinstance(cell, nn.Cell):
            raise TypeError(f"'{name}' must be a Cell, but got {cell!r:.80} of type {type(cell).__name__}.")
    update_cell = _checked_update_cell(network, optimizer, manager, boost_level)
    of_nn = not isinstance(optimizer, experimental.optim.Optimizer)
    if update_cell is None and (of_nn or boost_level != "O0" or _reason_for_accumulation(network) is not None):
        return build(optimizer, manager)
    # MindSpore's builder casts the network and adds the loss, and refuses optimizers that are not of mindspore.nn. It
    # gets a stand-in without state for those, and the optimizer itself goes into a train cell made here.
    plain = build(optimizer if of_nn else nn.Optimizer(1.0, list(optimizer.parameters)), None)
    if update_cell is None:
        sens = 1.0 if manager is None else manager.get_loss_scale()
        train_cell = nn.TrainOneStepCell(plain.network, optimizer, sens).set_train()
    else:
        train_cell = TrainOneStepWithLossScaleCell(plain.network, optimizer, update_cell).set_train()
    inputs = plain.get_inputs()
    if isinstance(inputs, dict):  # MindSpore keeps inputs that were set by name as a dict
        train_cell.set_inputs(**inputs)
    elif inputs is not None:
        train_cell.set_inputs(*inputs)
    return train_cell


def check_loss_fn(loss_fn: Any, owner: str) -> None:
    """Raise TypeError if `loss_fn` is neither None nor something to call."""
    if loss_fn is not None and (isinstance(loss_fn, type) or not callable(loss_fn)):
        raise TypeError(f"For '{owner}', 'loss_fn' must be a Cell, a function or None, but got {loss_fn!r:.80}.")


def check_level(name: str, level: Any, owner: str) -> None:
    """Raise TypeError if a level is no string; which ones there are, MindSpore knows."""
    if not isinstance(level, str):
        raise TypeError(f"For '{owner}', '{name}' must be a string such as 'O2', but got {level!r:.80}.")


def check_known(kwargs: dict, known: tuple, owner: str) -> None:
    """Raise ValueError if `kwargs` holds a name that is not known."""
    unknown = sorted(set(kwargs) - set(known))
    if unknown:
        raise ValueError(f"'{owner}' got unknown arguments {unknown}; known are {list(known)}.")


def _checked_update_cell(
    network: nn.Cell, optimizer: nn.Cell, manager: Optional[Any], boost_level: str
) -> Optional[nn.Cell]:
    """Return the update cell for our train step, or None where MindSpore's own cell is to be used."""
    if manager is None:
        return None
    if not isinstance(manager, (_MindSporeLossScaleManager, boost.GroupLossScaleManager)):
        raise TypeError(
            f"'loss_scale_manager' must be a LossScaleManager or None, but got {manager!r:.80} of type "
            f"{type(manager).__name__}. Write FixedLossScaleManager(1024.0) for a fixed scale."
        )
    reason = _reason_for_stock(network, optimizer, manager, boost_level)
    update_cell = manager.get_update_cell()
    if update_cell is None:
        _check_optimizer_unscales(optimizer, manager)
        _check_loss_is_scaled(network, manager)
        return None
    _check_optimizer_leaves_gradients(optimizer)
    if reason is None:
        return update_cell
    if context.get_context("device_target") == "CPU":
        raise ValueError(
            f"{reason} is left to MindSpore's own train cells, which can't skip overflowing steps on CPU. Use "
            "loss_scale_manager=None here, or train without it."
        )
    warnings.warn(
        f"{reason} is left to MindSpore's own train cells, without what this library adds to them.", stacklevel=4
    )
    return None


def _reason_for_stock(network: nn.Cell, optimizer: nn.Cell, manager: Any, boost_level: str) -> Optional[str]:
    """Return what only MindSpore's own train cells cover, or None."""
    if boost_level != "O0":
        return f"boost_level={boost_level!r}"
    if isinstance(manager, boost.GroupLossScaleManager):
        return "GroupLossScaleManager"
    if not isinstance(optimizer, (nn.Optimizer, experimental.optim.Optimizer)):
        return f"The optimizer wrapper {type(optimizer).__name__}"
    accumulation = _reason_for_accumulation(network)
    if accumulation is not None:
        return accumulation
    if any(cell.cls_name in ("PipelineCell", "Pipeline") for _, cell in network.cells_and_names()):
        return "A pipeline cell inside the network"
    mode = context.get_auto_parallel_context("parallel_mode")
    if mode not in ("stand_alone", "data_parallel"):
        return f"Parallel mode {mode!r}"
    return None


def _reason_for_accumulation(network: nn.Cell) -> Optional[str]:
    """Return what makes MindSpore sum gradients over micro batches in a train cell of its own, or None."""
    if context.get_auto_parallel_context("pipeline_stages") > 1:
        return "Pipeline parallelism"
    if any(cell.cls_name in ("GradAccumulationCell", "GradAccumulation") for _, cell in network.cells_and_names()):
        return "A gradient-accumulation cell inside the network"
    return None


def _check_optimizer_unscales(optimizer: nn.Cell, manager: Any) -> None:
    scale = manager.get_loss_scale()
    divisor = _optimizer_divisor(optimizer)
    if divisor != scale:
        warnings.warn(
            f"The manager does not drop overflowing updates, so the optimizer must divide by the loss scale {scale:g}, "
            f"but it was built with loss_scale={divisor:g}: the effective learning rate is {scale / divisor:g} times "
            f"that of the optimizer. Build it with loss_scale={scale:g}; for an optimizer that has no such argument "
            "use CustomTrainOneStepCell, or drop_overflow_update=True.",
            UserWarning,
            stacklevel=5,
        )


def _check_loss_is_scaled(network: nn.Cell, manager: Any) -> None:
    reason = _reason_for_accumulation(network)
    if reason is not None and manager.get_loss_scale() != 1:
        raise ValueError(
            f"{reason} is left to MindSpore's own train cell, which does not scale the loss where overflowing updates "
            "are kept: the optimizer would divide gradients that were never multiplied. Use loss_scale_manager=None "
            "and an optimizer without loss_scale."
        )


def _optimizer_divisor(optimizer: nn.Cell) -> float:
    """Return what the optimizer divides gradients by; MindSpore's wrappers leave that to the optimizer inside."""
    for inner in (getattr(optimizer, name, None) for name in ("single_opt", "optimizer")):
        if isinstance(inner, nn.Optimizer):
            return _optimizer_divisor(inner)
    return getattr(optimizer, "loss_scale", 1.0)


def _check_optimizer_leaves_gradients(optimizer: nn.Cell) -> None:
    """Raise ValueError if the optimizer divides gradients that the train step has divided already."""
    divisor = _optimizer_divisor(optimizer)
    if divisor != 1.0:
        raise ValueError(
            f"The optimizer was built with loss_scale={divisor:g}, but the train step unscales the gradients "
            "itself: they would be divided twice. Build the optimizer without loss_scale."
        )
