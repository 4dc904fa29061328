"""Shared fixtures: the two execution modes, and a fixed seed for each test."""

import os

import mindspore as ms
import numpy as np
import pytest

# On CPUs with AVX-512 the gradients of MindSpore's convolutions are up to 30 times slower without it. Read when the
# first convolution runs, by this process and those that it starts; nothing happens on CPUs without AVX2.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

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
