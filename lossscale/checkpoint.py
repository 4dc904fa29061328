"""Save a train cell so that no crash can lose it, and refuse to load what is not a whole checkpoint of it."""

import os
import platform
import re
from pathlib import Path
from typing import Any, Optional, Union

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore import dtype as mstype

from cells.accumulate import GradientAccumulator
from cells.checks import check_positive_int
from cells.ranks import gather, rank, world_size
from lossscale.checkpoint_file import cut_off_at
from lossscale.files import checked_path

_NAME = re.compile(r"step_(\d{10,})\.ckpt")
_PARTIAL = re.compile(r"step_\d{10,}\.((?P<host>.+)-(?P<process>\d+)\.)?partial\.\w+")
_STEP = "train_state_step"
_LARGEST_STEP = 2**63 - 1
_OFFERED = 8  # so many of its newest checkpoints does each rank offer when they look for a common one


def save_train_state(folder: Union[str, Path], train_cell: nn.Cell, step: int, keep: int = 2) -> Path:
    """Save all Parameters of `train_cell` after step number `step`, whole or not at all.

    ::

        write <folder>/step_<step>.<host>-<process>.partial.ckpt, with a checksum; fsync it
        rename it to <folder>/step_<step>.ckpt; fsync the folder
        only then remove all but the newest `keep` of the checkpoints up to `step`

    so that a crash or a full disk at any moment leaves the previous checkpoint as it was. In data parallel each
    rank saves into ``<folder>/rank_<rank>``. The file is one of `mindspore.save_checkpoint`.

    MindSpore's `ModelCheckpoint` also writes beside and renames, but without fsync, and deletes its oldest file
    before it writes: with it, use ``keep_checkpoint_max`` of 2 or more.

    Args:
        folder: where to save; made if it is missing.
        train_cell: the train cell, not the network: it holds the optimizer's state and the loss scale as well.
        step: how many steps it has made, an int > 0.
        keep: how many checkpoints to keep, an int > 0; two or more let ranks that were stopped between two
            saves agree on one that all have. Default: 2.

    Returns:
        The path of the new checkpoint.

    Raises:
        TypeError, ValueError: if `step` or `keep` is not an int > 0.
        OSError: if it could not be written; the message names the file, and older checkpoints are still there.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from lossscale import DynamicLossScaleManager, build_train_network, load_train_state, save_train_state
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> manager = DynamicLossScaleManager()
        >>> train_cell = build_train_network(net, optimizer, nn.MSELoss(), loss_scale_manager=manager)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first_step = load_train_state(folder, train_cell)  # 0: nothing saved yet
        ...     _ = save_train_state(folder, train_cell, step=100)
        ...     load_train_state(folder, train_cell)
        100
    """
    owner = "save_train_state"
    folder = _folder_of_rank(folder, owner)
    _check_train_cell(train_cell, owner)
    step, keep = _checked_step(step, owner), check_positive_int("keep", keep, owner)
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, step)
    # A name of this process, which another one that saves into the folder leaves alone.
    partial = path.with_suffix(f".{platform.node()}-{os.getpid()}.partial.ckpt")
    try:
        mindspore.save_checkpoint(train_cell, str(partial), append_dict={_STEP: step}, crc_check=True)
        _flush(partial)
        os.replace(partial, path)
        _flush(folder)
    except Exception as error:
        _remove_partial(folder)
        raise OSError(
            f"The checkpoint {path} could not be written: {error}. Older checkpoints in {folder} are untouched."
        ) from error
    _remove_partial(folder)
    # Newer ones are of another process, or of steps that this one went back behind.
    for old in [saved for saved in _saved_steps(folder) if saved <= step][:-keep]:
        _path(folder, old).unlink(missing_ok=True)
    return path


def load_train_state(folder: Union[str, Path], train_cell: nn.Cell, step: Optional[int] = None) -> int:
    """Load the newest checkpoint of `save_train_state` into `train_cell`, all of it or nothing.

    In data parallel, where all ranks must call this, it is the newest one that every rank has.

    Args:
        folder: what `save_train_state` was given.
        train_cell: a train cell built like the one that was saved.
        step: load the checkpoint of this step. Default: None, the newest.

    Returns:
        The number of steps that the train cell has made: 0, and nothing is loaded, if no rank has a checkpoint.

    Raises:
        TypeError: if `train_cell` is not a Cell, or another argument has the wrong type.
        FileNotFoundError: if there is no checkpoint of `step`.
        NotADirectoryError: if `folder` is a file.
        ValueError: if the file is damaged, of another train cell or of another step. The message names the file
            and, unless bytes in it were changed, the Parameter; the train cell is as it was.
        RuntimeError: if ranks have checkpoints, but none of a step that all have.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import tempfile
        >>> from lossscale import build_train_network, load_train_state
        >>> from mindspore import nn
        >>> net = nn.Dense(4, 1)
        >>> optimizer = nn.Momentum(net.trainable_params(), learning_rate=0.1, momentum=0.9)
        >>> train_cell = build_train_network(net, optimizer, nn.MSELoss(), level="O2")
        >>> with tempfile.TemporaryDirectory() as folder:  # nothing saved yet: start from the beginning
        ...     load_train_state(folder, train_cell)
        0
    """
    owner = "load_train_state"
    folder = _folder_of_rank(folder, owner)
    _check_train_cell(train_cell, owner)
    step = _newest_common(folder) if step is None else _checked_step(step, owner)
    if step == 0:
        return 0
    path = _path(folder, step)
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}; saved are the steps {_saved_steps(folder)}.")
    saved = _read(path)
    windows = [cell for _, cell in train_cell.cells_and_names() if isinstance(cell, GradientAccumulator)]
    for window in windows:
        # Version 0.1.0 did not save how long its window was: its checkpoints are of this cell's.
        saved.setdefault(window.steps.name, Parameter(Tensor(window.accumulate_steps, mstype.int32)))
    _check_fits(path, saved, step, {p.name: p for p in train_cell.get_parameters()})
    for window in windows:
        window.check_window(int(saved[window.step.name]), int(saved[window.steps.name]))
    # In place: after load_param_into_net a train cell that has stepped before may go on updating the old Parameters.
    for parameter in train_cell.get_parameters():
        ops.assign(parameter, saved[parameter.name])
    for window in windows:
        window.check_restored()
    return step


def _folder_of_rank(folder: Union[str, Path], owner: str) -> Path:
    folder = checked_path("folder", folder, owner)
    if world_size() > 1:
        folder = folder / f"rank_{rank()}"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"For '{owner}', 'folder' must be a folder, but {folder} is a file.")
    return folder


def _check_train_cell(train_cell: Any, owner: str) -> None:
    if not isinstance(train_cell, nn.Cell):
        raise TypeError(f"For '{owner}', 'train_cell' must be a Cell, but got {train_cell!r:.80}.")


def _checked_step(step: Any, owner: str) -> int:
    step = check_positive_int("step", step, owner)
    if step > _LARGEST_STEP:
        raise ValueError(f"For '{owner}', 'step' must be at most {_LARGEST_STEP}, but got a larger number.")
    return step


def _path(folder: Path, step: int) -> Path:
    return folder / f"step_{step:010d}.ckpt"


def _saved_steps(folder: Path) -> list[int]:
    files = [path.name for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []
    names = [_NAME.fullmatch(file) for file in files]
    return sorted(int(name.group(1)) for name in names if name)


def _remove_partial(folder: Path) -> None:
    """Remove what this process and interrupted saves on this machine left."""
    for path in folder.glob("step_*.partial.*"):
        name = _PARTIAL.fullmatch(path.name)
        if name and (name["host"] is None or (name["host"] == platform.node() and not _saves(int(name["process"])))):
            path.unlink(missing_ok=True)


def _saves(process: int) -> bool:
    """Return whether another process that runs has this number."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _newest_common(folder: Path) -> int:
    """Return the newest step that all ranks have saved, 0 if none has saved any."""
    steps = _saved_steps(folder)
    if world_size() == 1:
        return steps[-1] if steps else 0
    newest = steps[-_OFFERED:]
    # As pairs of int32, all that every backend can gather.
    offered = np.array([divmod(step, 2**31) for step in newest + [0] * (_OFFERED - len(newest))], np.int64)
    rows = gather(offered.astype(np.uint32).view(np.int32).reshape(-1)).view(np.uint32).reshape(-1, _OFFERED, 2)
    by_rank = [{int(high) * 2**31 + int(low) for high, low in row if high or low} for row in rows]
    common = set.intersection(*by_rank)
    if not common and any(by_rank):
        listing = {number: sorted(own) for number, own in enumerate(by_rank)}
        raise RuntimeError(
            f"No step was saved by every rank; the steps by rank are {listing}, this rank's folder is {folder}. Copy "
            "the missing checkpoint from a rank that has it (ranks are equal in data parallel), or remove all."
        )
    return max(common, default=0)


def _read(path: Path) -> dict[str, Any]:
    cut = cut_off_at(path)
    if cut is not None:
        raise ValueError(f"The checkpoint {path} is damaged: it is cut off at {cut}. Use an older one.")
    try:
        return mindspore.load_checkpoint(str(path), crc_check=True)
    except Exception as error:
        raise ValueError(f"The checkpoint {path} is damaged: {error}. Use an older one.") from error


def _check_fits(path: Path, saved: dict[str, Any], step: int, wanted: dict[str, Parameter]) -> None:
    """Remove the step from `saved`; raise ValueError if the rest is not exactly what `wanted` needs."""
    stored = int(saved.pop(_STEP, 0))
    if stored != step:
        raise ValueError(
            f"The checkpoint {path} should hold '{_STEP}' = {step}, but holds {stored or None}: it was not written by "
            "save_train_state, or was renamed."
        )
    missing = sorted(set(wanted) - set(saved))
    unknown = sorted(set(saved) - set(wanted))
    if missing or unknown:
        raise ValueError(
            f"The checkpoint {path} is of another train cell: it lacks {missing} and has unknown {unknown}. Build the "
            "train cell as it was when saved."
        )
    for name, parameter in wanted.items():
        value = saved[name]
        if value.shape != parameter.shape or value.dtype != parameter.dtype:
            raise ValueError(
                f"The checkpoint {path} is of another train cell: its '{name}' is {value.dtype} of shape "
                f"{value.shape}, but {parameter.dtype} of shape {parameter.shape} is needed."
            )
