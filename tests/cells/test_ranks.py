"""Ranks that start alike, and those that don't, with the other rank played by what `gather` answers."""

import numpy as np
import pytest
from mindspore import Tensor, nn

import cells.ranks
from lossscale import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven


def check_against(monkeypatch, change):
    """Compare a train cell's state with that of a second rank on which `change` was made."""
    cells_ = []
    for _ in range(2):
        net = GradientsAsGiven([np.zeros(2, np.float32)])
        update = DynamicLossScaleUpdateCell(8.0, 2, 100)
        cells_.append(TrainOneStepWithLossScaleCell(net, nn.SGD(list(net.w), 1.0), update))
    change(cells_[1])
    sent = []
    monkeypatch.setattr(cells.ranks, "world_size", lambda: 2)
    monkeypatch.setattr(cells.ranks, "gather", lambda values: sent.append(values) or np.stack([values, values]))
    cells.ranks.check_ranks_agree(cells_[1])
    monkeypatch.setattr(cells.ranks, "gather", lambda values: np.stack([values, sent[0]]))
    cells.ranks.check_ranks_agree(cells_[0])


def test_equal_ranks_pass(monkeypatch):
    check_against(monkeypatch, lambda cell: None)


def test_a_scale_of_its_own_is_told(monkeypatch):
    with pytest.raises(RuntimeError, match=r"'scale_sense'.*\[8.0, 16.0\]"):
        check_against(monkeypatch, lambda cell: cell.set_sense_scale(Tensor(16.0)))


def test_a_counter_of_its_own_is_told(monkeypatch):
    def clean_step(cell):
        cell(Tensor(np.float32([1, 2])))

    with pytest.raises(RuntimeError, match=r"'current_iterator_step': \[1, 2\]"):
        check_against(monkeypatch, clean_step)
