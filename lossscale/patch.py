"""Put this library under MindSpore's own names, for training code that is not to be changed."""

import sys
import types
import warnings
from typing import Any, Optional

import mindspore
from mindspore import amp, nn

import lossscale

_ORIGINALS: dict[str, Any] = {
    "TrainOneStepWithLossScaleCell": nn.TrainOneStepWithLossScaleCell,
    "DynamicLossScaleUpdateCell": nn.DynamicLossScaleUpdateCell,
    "FixedLossScaleUpdateCell": nn.FixedLossScaleUpdateCell,
    "DynamicLossScaleManager": mindspore.DynamicLossScaleManager,
    "FixedLossScaleManager": mindspore.FixedLossScaleManager,
    "Model": mindspore.Model,
    "DynamicLossScaler": amp.DynamicLossScaler,
    "StaticLossScaler": amp.StaticLossScaler,
    "all_finite": amp.all_finite,
    "build_train_network": amp.build_train_network,
}
_OWN_PACKAGES = ("mindspore", "cells", "lossscale")


class ModuleNames:
    """Names of modules that answer with something else, seen from outside of those modules.

    Each module gets a class of its own with a property for each name. Code inside a module looks its globals up in
    the module's dict, so MindSpore's own `super(Class, self)` and `isinstance` keep meaning MindSpore's classes.
    """

    def __init__(self) -> None:
        self._classes: dict[types.ModuleType, type] = {}

    def replace(self, replacements: list[tuple[Any, Any]]) -> list[str]:
        """Replace each (original, replacement) under every public name; return the names."""
        names = []
        for module in _public_modules():
            found = {
                name: ours
                for name, value in vars(module).items()
                for original, ours in replacements
                if value is original and not name.startswith("_")
            }
            if found:
                self._classes[module] = module.__class__
                properties: dict[str, Any] = {name: _answer(name, ours) for name, ours in found.items()}
                module.__class__ = type("PatchedModule", (module.__class__,), properties)
                names += [f"{module.__name__}.{name}" for name in found]
        return sorted(names)

    def restore(self) -> None:
        """Let all names mean again what they meant."""
        for module, cls in self._classes.items():
            module.__class__ = cls
        self._classes.clear()

    @property
    def active(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._classes)


def _answer(name: str, ours: Any) -> property:
    def get(module: types.ModuleType) -> Any:
        return ours

    def put(module: types.ModuleType, value: Any) -> None:
        raise AttributeError(
            f"{module.__name__}.{name} is replaced by lossscale. Call lossscale.unpatch_mindspore() before setting it."
        )

    return property(get, put)


def _public_modules() -> list[types.ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and name.split(".")[0] == "mindspore"
        and not any(part.startswith("_") for part in name.split("."))
    ]


_names = ModuleNames()


class Patch(list):
    """The names that `patch_mindspore` replaced, as a list of str; as a context manager it ends the patch."""

    def __init__(self, names: list[str], owns: bool):
        super().__init__(names)
        self._owns = owns

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._owns:
            unpatch_mindspore()


_replaced: list[str] = []


def patch_mindspore(verbose: bool = True) -> Patch:
    """Put this library's train step, update cells, managers, scalers and `Model` under MindSpore's names.

    Call it before the training code is imported; `nn.TrainOneStepWithLossScaleCell`, `mindspore.Model`,
    `mindspore.amp.DynamicLossScaler` and the like then are this library's, wherever MindSpore has them. The base
    classes `LossScaleManager` and `LossScaler` stay: this library's are instances of them. MindSpore's own modules go
    on using their own classes inside. A second call changes nothing.

    Args:
        verbose: whether to print what was replaced. Default: True.

    Returns:
        List of the names replaced. ``with patch_mindspore():`` undoes it at the end, unless it was patched before.

    Raises:
        TypeError: if `verbose` is not a bool.

    Warns:
        UserWarning: names modules imported before that hold MindSpore's originals or subclass them.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import mindspore
        >>> import lossscale
        >>> with lossscale.patch_mindspore(verbose=False):
        ...     mindspore.nn.TrainOneStepWithLossScaleCell is lossscale.TrainOneStepWithLossScaleCell
        True
        >>> mindspore.nn.TrainOneStepWithLossScaleCell is lossscale.TrainOneStepWithLossScaleCell
        False
    """
    if not isinstance(verbose, bool):
        raise TypeError(f"'verbose' must be a bool, but got {verbose!r}.")
    owns = not _names.active
    if owns:
        _warn_of_earlier_imports()
        _replaced[:] = _names.replace([(original, getattr(lossscale, name)) for name, original in _ORIGINALS.items()])
        if verbose:
            print(f"lossscale: replaced {', '.join(_replaced)}", file=sys.stderr)
    return Patch(_replaced, owns)


def unpatch_mindspore() -> None:
    """Let MindSpore's names mean MindSpore's classes again. What was built or subclassed meanwhile stays as it is.

    Examples:
        >>> import lossscale
        >>> lossscale.unpatch_mindspore()
    """
    _names.restore()
    _replaced.clear()


def _warn_of_earlier_imports() -> None:
    held = []
    for module_name, module in sorted(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or module_name.split(".")[0] in _OWN_PACKAGES:
            continue
        for name, value in list(vars(module).items()):
            original = _original_in(value)
            if original is not None:
                held.append(f"{module_name}.{name} ({original})")
    if held:
        warnings.warn(
            f"imported before patch_mindspore(), these keep MindSpore's own: {', '.join(held)}. Call "
            "patch_mindspore() before importing them, or start the script with 'lossscale run'.",
            UserWarning,
            stacklevel=3,
        )


def _original_in(value: Any) -> Optional[str]:
    """Return which original `value` is or has as a base without this library's in between, or None."""
    for name, original in _ORIGINALS.items():
        if value is original:
            return f"is {name}"
        if isinstance(value, type) and isinstance(original, type) and original in value.__mro__:
            return None if getattr(lossscale, name) in value.__mro__ else f"subclass of {name}"
    return None
