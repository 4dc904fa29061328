"""Which implementation of the gradient arithmetic runs: the native CPU kernel, or plain MindSpore ops."""

import os

from mindspore import context, nn

from cells.gradient_ops import PlainArithmetic
from cells.native import NativeArithmetic, library_path

_VARIABLE = "LOSSSCALE_BACKEND"


def backend() -> str:
    """Return "native" where train cells built now use the native CPU kernel, else "plain".

    The native kernel runs on CPU where it was compiled on installation, plain MindSpore ops everywhere else;
    results are the same. The environment variable ``LOSSSCALE_BACKEND`` = ``native`` or ``plain`` forces one. A
    train cell keeps what it was built with.

    Raises:
        ValueError: if the environment variable holds anything else.
        RuntimeError: if it says ``native`` where the kernel can't run.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import lossscale
        >>> lossscale.backend() in ("native", "plain")
        True
    """
    forced = os.environ.get(_VARIABLE, "")
    if forced not in ("", "native", "plain"):
        raise ValueError(f"The environment variable {_VARIABLE} must be 'native' or 'plain', but got {forced!r}.")
    if forced == "plain":
        return "plain"
    device = context.get_context("device_target")
    available = device == "CPU" and library_path() is not None
    if forced == "native" and not available:
        reason = (
            f"it runs on CPU, and the device is {device}" if device != "CPU" else "it was not built, or can't be opened"
        )
        raise RuntimeError(
            f"{_VARIABLE}=native asks for the native kernel, but {reason}. Unset the variable, or install lossscale "
            "again on a machine with a C++ compiler (pip install --force-reinstall --no-deps)."
        )
    return "native" if available else "plain"


def gradient_arithmetic(norms: bool = True, scalars: bool = True, in_branch: bool = False) -> nn.Cell:
    """Return the cell that does gradient arithmetic, native or plain, with the same methods.

    Args:
        norms, in_branch: see `cells.gradient_ops.PlainArithmetic`.
        scalars: whether some gradients may have shape (). False makes compiling faster where there are many.
    """
    return NativeArithmetic(norms, scalars) if backend() == "native" else PlainArithmetic(norms, in_branch)
