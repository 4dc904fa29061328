"""Run a training script as `python` would, with this library under MindSpore's names."""

import argparse
import functools
import importlib.util
import inspect
import runpy
import sys
import traceback
import types
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Callable, Optional

import mindspore as ms

import cells
from lossscale.convolutions import fast_convolutions
from lossscale.monitor import LossScaleMonitor, plot_history
from lossscale.patch import ModuleNames, patch_mindspore, unpatch_mindspore

_MODES = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE}
_StockModel = ms.Model
_FRAMES_OF_OURS = (__file__, runpy.__file__, "<frozen runpy>")


def add_run_parser(commands: Any) -> None:
    """Add the subcommand `run` to a command line."""
    run = commands.add_parser(
        "run",
        help="run a training script, unmodified, with this library's train step",
        description="Run a script as python would, with this library's classes under MindSpore's names. Options for "
        "the script come after its name.",
    )
    run.add_argument("--device", choices=("CPU", "Ascend", "GPU"), help="in place of what the script sets")
    run.add_argument("--mode", choices=sorted(_MODES), help="in place of what the script sets")
    run.add_argument("--monitor", type=Path, metavar="JSONL", help="record every Model.train, draw it at the end")
    run.add_argument("-m", dest="is_module", action="store_true", help="what follows is a module")
    run.add_argument("target", metavar="script.py", help="the script, or with -m the module")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the script")


def run_script(options: argparse.Namespace) -> int:
    """Run what `add_run_parser` parsed; return the exit code: the script's own, 2 if it can't be started."""
    problem = _problem(options)
    if problem is not None:
        print(f"lossscale run: error: {problem}", file=sys.stderr)
        return 2
    sys.argv = [options.target, *options.arguments]
    sys.path[0] = str(_folder(options))
    context_names = ModuleNames()
    stock_train, stock_fit = _StockModel.train, _StockModel.fit
    main_module = sys.modules["__main__"]
    patch_mindspore()
    fast_convolutions()
    try:
        _override_context(context_names, options)
        if options.monitor is not None:
            started: list[bool] = []
            _StockModel.train = _recorded(stock_train, options.monitor, started)
            _StockModel.fit = _recorded(stock_fit, options.monitor, started)
        try:
            code = _exit_code(options)
        finally:
            if options.monitor is not None:
                _draw(options.monitor, bool(started))
        return code
    finally:
        _StockModel.train, _StockModel.fit = stock_train, stock_fit
        context_names.restore()
        unpatch_mindspore()
        sys.modules["__main__"] = main_module


def _folder(options: argparse.Namespace) -> Path:
    return Path.cwd() if options.is_module else Path(options.target).resolve().parent


def _problem(options: argparse.Namespace) -> Optional[str]:
    """Return why the script can't be started, or None."""
    folder = _folder(options)
    if not options.is_module and not Path(options.target).is_file():
        return f"there is no script {options.target}"
    theirs = PathFinder.find_spec("cells", [str(folder)])
    ours = Path(str(cells.__file__)).resolve().parent
    if theirs is not None and (theirs.origin is None or Path(theirs.origin).resolve().parent != ours):
        where = theirs.origin or next(iter(theirs.submodule_search_locations or [str(folder)]))
        return (
            f"the script has a module 'cells' of its own ({where}), and lossscale has a package of that name, so "
            "'import cells' could mean only one of them. Rename the script's, or move it into a package."
        )
    if options.is_module:
        sys.path.insert(0, str(folder))
        try:
            found = importlib.util.find_spec(options.target)
        except (ImportError, ValueError):
            found = None
        finally:
            sys.path.pop(0)
        if found is None:
            return f"there is no module {options.target}"
    return None


def _override_context(names: ModuleNames, options: argparse.Namespace) -> None:
    """Set device and mode, and keep the script from setting others."""
    forced = {}
    if options.device is not None:
        forced["device_target"] = options.device
    if options.mode is not None:
        forced["mode"] = _MODES[options.mode]
    if not forced:
        return
    stock_set_context, stock_set_device = ms.set_context, ms.set_device

    @functools.wraps(stock_set_context)
    def set_context(**kwargs: Any) -> None:
        for name in forced.keys() & kwargs.keys():
            if kwargs[name] != forced[name]:
                _say(f"set_context({name}={kwargs[name]!r}) of the script is overridden: {forced[name]!r}")
        stock_set_context(**{**kwargs, **{name: forced[name] for name in forced.keys() & kwargs.keys()}})

    @functools.wraps(stock_set_device)
    def set_device(device_target: str, device_id: Optional[int] = None) -> None:
        if options.device is None:
            return stock_set_device(device_target, device_id)
        if device_target != options.device:
            _say(f"set_device({device_target!r}) of the script is overridden: {options.device!r}")
            device_id = None
        return stock_set_device(options.device, device_id)

    stock_set_context(**forced)
    names.replace([(stock_set_context, set_context), (stock_set_device, set_device)])


def _recorded(train: Callable, path: Path, started: list[bool]) -> Callable:
    """Return `Model.train` or `Model.fit` with a monitor among its callbacks."""
    signature = inspect.signature(train)

    @functools.wraps(train)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        given = call.arguments.get("callbacks")
        callbacks = list(given) if isinstance(given, (list, tuple)) else [] if given is None else [given]
        call.arguments["callbacks"] = [
            *callbacks,
            LossScaleMonitor(path, append=bool(started), progress=False, verbose=False),
        ]
        started.append(True)
        return train(*call.args, **call.kwargs)

    return recorded


def _draw(path: Path, started: bool) -> None:
    if not started:
        _say(f"no Model.train ran, so there is nothing in {path}")
        return
    try:
        _say(f"history {path}, picture {plot_history(path, path.with_suffix('.png'))}")
    except (OSError, ValueError, ImportError) as error:
        _say(f"history {path}, no picture: {error}")


def _exit_code(options: argparse.Namespace) -> int:
    """Run the script; return its exit code, after printing its traceback as python would."""
    try:
        if options.is_module:
            runpy.run_module(options.target, run_name="__main__", alter_sys=True)
        else:
            _run_file(Path(options.target))
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException as error:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename in _FRAMES_OF_OURS:
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run_file(path: Path) -> None:
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=str(path), __builtins__=__builtins__)
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)


def _say(text: str) -> None:
    print(f"lossscale run: {text}", file=sys.stderr)
