"""Shared fixtures: the two execution modes, and a fixed seed for each test."""

import mindspore as ms
import numpy as np
import pytest

MODES = {"GRAPH": ms.GRAPH_MODE, "PYNATIVE": ms.PYNATIVE_MODE}


@pytest.fixture(params=MODES)
def mode(request):
    """Run the test in GRAPH_MODE and in PYNATIVE_MODE."""
    ms.set_context(mode=MODES[request.param])
    return request.param


@pytest.fixture(autouse=True)
def _own_seed_and_mode():
    before = ms.get_context("mode")
    ms.set_seed(1)
    np.random.seed(1)
    yield
    ms.set_context(mode=before)
