"""Would the tests notice? A random sample of small changes to the code, each made in a copy of the tree and tested.

The changes are cosmic-ray's; those of the C++ kernel are the patches in `native/`. Run it by `make mutate`.
"""

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.testing import run_tests
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.mutations.tests_of import EQUIVALENT, NATIVE, first_tests

ROOT = Path(__file__).parents[2]
GOAL = 0.92


def copy_tree(target):
    """Copy what git knows or would add, and the built kernel."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True)
    names = [ROOT / name for name in listed.split("\0") if name] + list(ROOT.glob("cells/_native*.so"))
    for path in filter(Path.is_file, names):
        place = target / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, place)


def lines_without_behaviour(module):
    """Return the spans of annotations, as ((line, column), (line, column))."""
    spans = []
    for node in ast.walk(ast.parse(Path(module).read_text(encoding="utf-8"))):
        for found in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if found is not None:
                spans.append(((found.lineno, found.col_offset), (found.end_lineno, found.end_col_offset)))
    return spans


def changes(modules):
    """Return the changes that can be made, in lists of those at the same place of the source."""
    places = defaultdict(list)
    with use_db(":memory:", WorkDB.Mode.create) as database:
        init([Path(module) for module in modules], database, {})
        specs = [item.mutations[0] for item in database.work_items]
    lines = {module: Path(module).read_text(encoding="utf-8").splitlines() for module in modules}
    spans = {module: lines_without_behaviour(module) for module in modules}
    for spec in sorted(specs, key=lambda spec: (str(spec.module_path), spec.operator_name, spec.occurrence)):
        module, line = str(spec.module_path), lines[str(spec.module_path)][spec.start_pos[0] - 1]
        annotated = any(start <= tuple(spec.start_pos) < end for start, end in spans[module])
        if not annotated and not any(name in spec.operator_name and part in line for name, part, _ in EQUIVALENT):
            places[module, tuple(spec.start_pos), tuple(spec.end_pos)].append(spec)
    return [places[key] for key in sorted(places)]


def pytest_command(python, tests, jobs):
    return f'{python} -m pytest -x -q -p no:cacheprovider -n {jobs} -m "not slow and not processes" {" ".join(tests)}'


def survives(spec, arguments):
    """Return a diff and "" if neither the tests of its module nor all others notice the change, else None and who."""
    tests = first_tests(str(spec.module_path))
    rounds = [tests] if arguments.first_only or tests == ["tests"] else [tests, ["tests"]]
    for tests, timeout in zip(rounds, (arguments.timeout, 5 * arguments.timeout)):
        result = mutate_and_test([spec], pytest_command(arguments.python, tests, arguments.jobs), timeout)
        if result.test_outcome != TestOutcome.SURVIVED:
            last = (result.output or "").strip().splitlines()[-1:]
            return None, f"by {' '.join(tests)}: {''.join(last)}"
    return result.diff, ""


def native_survives(patch, arguments):
    """Return whether the kernel, built with a patch, passes its tests."""
    subprocess.run(["git", "apply", str(patch)], check=True)
    try:
        built = subprocess.run([arguments.python, "setup.py", "build_ext", "--inplace"], capture_output=True, text=True)
        if built.returncode:
            raise SystemExit(f"{patch} does not build, which says nothing about the tests:\n{built.stderr[-2000:]}")
        command = pytest_command(arguments.python, NATIVE, arguments.jobs)
        return run_tests(command, 2 * arguments.timeout)[0] == TestOutcome.SURVIVED
    finally:
        subprocess.run(["git", "apply", "-R", str(patch)], check=True)


def parsed():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the project installed")
    parser.add_argument("--number", type=int, default=40, help="changes to try")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="repeats a sample on the same code")
    parser.add_argument("--only", default="", help="start of the modules' paths, such as cells/clip")
    parser.add_argument("--jobs", type=int, default=2, help="test processes at a time")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for the tests of one module")
    parser.add_argument("--first-only", action="store_true", help="ask the tests of the module only")
    parser.add_argument("--no-native", action="store_true", help="leave out the patches of the C++ kernel")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass without a change")
    arguments = parser.parse_args()
    arguments.python = os.path.abspath(arguments.python)
    return arguments


def main():
    arguments = parsed()
    with tempfile.TemporaryDirectory(prefix="mutate_") as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        os.environ["PYTHONPATH"] = folder
        found = [str(path) for package in ("cells", "lossscale") for path in sorted(Path(package).rglob("*.py"))]
        places = changes([module for module in found if module.startswith(arguments.only)])
        draw = random.Random(arguments.seed)
        chosen = [draw.choice(place) for place in draw.sample(places, min(arguments.number, len(places)))]
        patches = [] if arguments.no_native else sorted(Path("tests/mutations/native").glob("*.patch"))
        print(f"seed {arguments.seed}: {len(chosen)} of {len(places)} places, {len(patches)} patches", flush=True)
        if not arguments.no_baseline:
            tests = sorted({test for spec in chosen for test in first_tests(str(spec.module_path))})
            outcome, output = run_tests(pytest_command(arguments.python, tests, arguments.jobs), 10 * arguments.timeout)
            if outcome != TestOutcome.SURVIVED:
                raise SystemExit(f"The tests fail without any change:\n{output[-3000:]}")
        survivors = []
        for number, spec in enumerate(chosen, 1):
            started = time.monotonic()
            diff, how = survives(spec, arguments)
            survivors += [diff] if diff else []
            name = f"{spec.module_path}:{spec.start_pos[0]} {spec.operator_name.split('/')[1]}"
            took = time.monotonic() - started
            print(f"{number:3} {'SURVIVED' if diff else 'killed'} {name} ({took:.0f} s) {how}", flush=True)
        native = []
        for patch in patches:
            native += [patch.name] if native_survives(patch, arguments) else []
            print(f"    {'SURVIVED' if patch.name in native[-1:] else 'killed'} {patch.name}", flush=True)
    print("\n".join(survivors))
    killed = len(chosen) - len(survivors)
    print(f"{killed} of {len(chosen)} changes and {len(patches) - len(native)} of {len(patches)} patches were noticed.")
    print(f"Repeat it by make mutate N={arguments.number} SEED={arguments.seed}")
    return 0 if killed >= GOAL * len(chosen) and not native else 1


if __name__ == "__main__":
    sys.exit(main())
