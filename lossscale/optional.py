"""Optional packages, imported when they are used, with an error that names the extra to install."""

import importlib
from types import ModuleType


def require(module: str, extra: str, purpose: str, instead: str = "") -> ModuleType:
    """Return the imported `module`; ImportError says what it is for and which extra of lossscale brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f'{purpose} needs {package}: pip install "lossscale[{extra}]"{instead}.') from error
