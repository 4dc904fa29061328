"""Which tests are asked first about a change in a module, and which changes are not worth asking about."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Beside the test file of the same name.
ALSO = {
    "cells/train_step.py": ("test_step_order", "test_overrides", "test_fused_options", "test_accumulate", "test_names"),
    "cells/outputs.py": ("test_step_order", "test_train_step"),
    "cells/backward.py": ("test_train_step", "test_step_order"),
    "cells/accumulate.py": ("test_step_order",),
    "cells/clip.py": ("test_step_order",),
    "cells/ema.py": ("test_step_order",),
    "cells/storage.py": ("../test_checkpoint", "../lossscale/test_checkpoint"),
    "cells/weight_state.py": ("test_accumulate", "test_ema"),
    "cells/unscale.py": ("test_backends", "test_train_step"),
    "cells/gradient_ops.py": ("test_unscale", "test_backends", "test_train_step"),
    "cells/overflow_record.py": ("test_train_step", "test_backends", "test_fused_options"),
    "cells/fused.py": ("test_fused_options", "test_fusion", "test_factor"),
    "cells/checks.py": ("test_train_step", "test_scale_update"),
    "cells/trees.py": ("test_scalers", "test_finite"),
    "cells/state_dict.py": ("test_scalers", "../lossscale/grad_scaler/test_scaler"),
    "cells/native/__init__.py": ("test_native", "test_backends"),
    "lossscale/checkpoint_file.py": ("test_checkpoint",),
    "lossscale/doctor.py": ("test_cli",),
    "lossscale/figures.py": ("test_cli", "monitor/test_picture"),
    "lossscale/files.py": ("test_checkpoint", "monitor/test_history", "monitor/test_picture"),
    "lossscale/optional.py": ("test_cli", "monitor/test_picture"),
}
NATIVE = tuple(f"tests/cells/test_{name}.py" for name in ("native", "scale_rule", "backends", "fused", "fusion"))

# No behaviour to test: (part of the operator's name, part of the line, reason).
EQUIVALENT = (
    ("RemoveDecorator", "@jit", "compiled or not, the results are the same"),
    ("NumberReplacer", "stacklevel=", "which line a warning points at"),
    ("", "Tensor([0] * 8", "the status that MindSpore's check fills on Ascend"),
    ("", "TYPE_CHECKING", "read by type checkers only"),
)


def first_tests(module: str) -> list:
    """Return the test files of one module, or the folder of its package's tests where it has none."""
    path = Path(module)
    folder = Path("tests", *path.parent.parts)
    wanted = [folder / f"test_{path.stem}.py", folder.parent / f"test_{path.parent.name}.py"]
    wanted += [Path("tests", path.parts[0], f"{name}.py") for name in ALSO.get(module, ())]
    found = [test for test in wanted if (ROOT / test).exists()] or [folder]
    return list(dict.fromkeys(os.path.normpath(test) for test in found))
