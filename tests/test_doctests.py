"""The examples in the docstrings run and print what they show; every public name has one."""

import doctest
import importlib
import inspect
import pkgutil

import pytest

import cells
import lossscale


def modules():
    for package in (cells, lossscale):
        yield package
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if found.name != "cells._native":  # the compiled kernel, no Python module
                yield importlib.import_module(found.name)


def doctests():
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [test for module in modules() for test in finder.find(module, module.__name__) if test.examples]


@pytest.mark.filterwarnings("ignore:imported before patch_mindspore")  # the tests subclass MindSpore's cells
@pytest.mark.parametrize("test", doctests(), ids=lambda test: test.name)
def test_docstring_runs(test):
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    report = []
    doctest.DocTestRunner(verbose=False, optionflags=flags).run(test, out=report.append)
    assert not report, "".join(report)


def test_public_names_have_an_example():
    without = [
        name
        for name in lossscale.__all__
        if ">>>" not in (inspect.getdoc(getattr(lossscale, name)) or "") and name not in BASES
    ]
    assert not without


BASES = {"LossScaleManager", "LossScaleUpdateCell"}  # to subclass, not to use
