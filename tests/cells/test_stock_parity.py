"""Bit for bit what MindSpore's own cell computes, over 60 steps with inf and nan in chosen gradients."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from lossscale import DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import LeNet5, Poisoned, copy_parameters, mlp
from tests.oracles import StockTrainStep, parameters, same_bits

STEPS = 60
OVERFLOWS = {0: np.inf, 7: np.nan, 8: -np.inf, 20: np.inf, 21: np.nan, 22: np.inf, 41: np.nan, 59: np.inf}
OPTIMIZERS = {
    "Momentum": lambda p: nn.Momentum(p, 0.01, 0.9),
    "Adam": lambda p: nn.Adam(p, 0.01),
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01, weight_decay=0.1),
    "SGD with a schedule": lambda p: nn.SGD(p, nn.cosine_decay_lr(0.001, 0.01, 100, 10, 5), momentum=0.9),
}
NETS = {"LeNet5": (LeNet5, (4, 1, 32, 32), 10), "MLP": (mlp, (8, 8), 4)}

ALL = list(itertools.product(("GRAPH", "PYNATIVE"), NETS, OPTIMIZERS, (2, 3), ("O0", "O2")))
# Each value of each choice, and each pair of network and optimizer in GRAPH_MODE, at least once.
SHORT = [case for i, case in enumerate(ALL) if i % 4 == (i // 4) % 4 and case[0] == "GRAPH"]
SHORT += [("PYNATIVE", "MLP", "Momentum", 3, "O0"), ("PYNATIVE", "MLP", "Adam", 2, "O2")]


def build(cell, update, net_name, optimizer, level):
    make, _, _ = NETS[net_name]
    net = make()
    plain = ms.amp.build_train_network(
        net, OPTIMIZERS[optimizer](net.trainable_params()), nn.MSELoss(), level, loss_scale_manager=None
    )
    network = Poisoned(plain.network)
    return cell(network, OPTIMIZERS[optimizer](net.trainable_params()), update).set_train()


def check_parity(net_name, optimizer, factor, level, steps=STEPS):
    ours = build(
        TrainOneStepWithLossScaleCell, DynamicLossScaleUpdateCell(2.0**12, factor, 5), net_name, optimizer, level
    )
    stock = build(StockTrainStep, nn.DynamicLossScaleUpdateCell(2.0**12, factor, 5), net_name, optimizer, level)
    copy_parameters(stock, ours)
    _, shape, classes = NETS[net_name]
    rng = np.random.default_rng(0)
    places = len(stock.weights)
    start = parameters(stock)
    for i in range(steps):
        x = Tensor(rng.standard_normal(shape).astype(np.float32))
        y = Tensor(rng.standard_normal((shape[0], classes)).astype(np.float32))
        poison = np.zeros(places, np.float32)
        if i in OVERFLOWS:
            poison[(3 * i) % places] = OVERFLOWS[i]
        got, expected = ours(x, y, Tensor(poison)), stock(x, y, Tensor(poison))
        assert same_bits(got[0].asnumpy(), expected[0].asnumpy()), (i, "loss")
        assert bool(got[1]) == bool(expected[1]), (i, "overflow")
        assert bool(got[1]) or i not in OVERFLOWS
        assert same_bits(got[2].asnumpy(), expected[2].asnumpy()), (i, "scale")
    end, ours_end = parameters(stock), parameters(ours)
    assert [name for name in end if not same_bits(end[name], ours_end[name])] == []
    assert all(not same_bits(start[w.name], end[w.name]) for w in stock.weights)


ARGUMENTS = ("mode", "net_name", "optimizer", "factor", "level")


@pytest.mark.parametrize(ARGUMENTS, SHORT, indirect=["mode"])
def test_sixty_steps_equal_stock(mode, net_name, optimizer, factor, level):
    # Each step of PYNATIVE_MODE costs ten of GRAPH_MODE; 24 hold six of the overflows and a growth of the scale.
    check_parity(net_name, optimizer, factor, level, STEPS if mode == "GRAPH" else 24)


@pytest.mark.slow
@pytest.mark.parametrize(ARGUMENTS, [case for case in ALL if case not in SHORT], indirect=["mode"])
def test_sixty_steps_equal_stock_in_every_combination(mode, net_name, optimizer, factor, level):
    check_parity(net_name, optimizer, factor, level)
