"""Inputs by name: bound to their places before the graph is called."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from lossscale import CustomTrainOneStepCell, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import batch, copy_parameters, mlp
from tests.oracles import parameters, same_bits


class Weighted(nn.Cell):
    """A loss with inputs that may be left out."""

    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor([1.0, 2.0]), name="w")

    def construct(self, x, y, weight=None, factor=1.0):
        loss = ((self.w * x - y) ** 2).sum() * factor
        return loss if weight is None else loss * weight


def steps(scale_sense=None):
    net = Weighted()
    yield CustomTrainOneStepCell(net, nn.SGD([net.w], 0.01), 8.0)
    net = Weighted()
    yield TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 0.01), scale_sense or Tensor(8.0), outputs="loss")


X, Y, WEIGHT = Tensor([3.0, 4.0]), Tensor([1.0, 1.0]), Tensor(0.5)


@pytest.mark.parametrize(
    ("inputs", "named", "expected"),
    [
        ((X, Y), {}, 53.0),
        ((), {"y": Y, "x": X}, 53.0),
        ((X,), {"y": Y, "weight": WEIGHT}, 26.5),
        ((X,), {"factor": 2.0, "y": Y}, 106.0),
        ((X, Y), {"factor": 2.0, "weight": WEIGHT}, 53.0),
    ],
    ids=["places", "names", "mixed", "gap", "swapped"],
)
def test_names_reach_their_places(mode, inputs, named, expected):
    for step in steps():
        assert float(step(*inputs, **named)) == expected


@pytest.mark.parametrize(
    ("inputs", "named", "words"),
    [
        ((X,), {"weight": WEIGHT}, "missing a required argument: 'y'"),
        ((X, Y), {"y": Y}, "multiple values for argument 'y'"),
        ((X, Y), {"z": Y}, "unexpected keyword argument 'z'"),
    ],
    ids=["missing", "twice", "unknown"],
)
def test_names_that_do_not_fit_are_refused_and_nothing_moves(mode, inputs, named, words):
    for step in steps():
        before = parameters(step)
        with pytest.raises(TypeError, match=rf"'{type(step).__name__}'.*{words}"):
            step(*inputs, **named)
        assert all(same_bits(before[name], value) for name, value in parameters(step).items())


def test_names_train_as_places_do_through_casting_wrappers(mode):
    cells = []
    for _ in range(2):
        net = ms.amp.auto_mixed_precision(nn.WithLossCell(mlp(), nn.MSELoss()), "O2")
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        cells.append(TrainOneStepWithLossScaleCell(net, optimizer, DynamicLossScaleUpdateCell(8.0, 2, 2)))
    copy_parameters(*cells)
    for seed in range(3):
        x, y = batch(seed=seed)
        by_place, by_name = cells[0](x, y), cells[1](label=y, data=x)
        assert [same_bits(a.asnumpy(), b.asnumpy()) for a, b in zip(by_place, by_name)] == [True] * 3
    assert all(same_bits(a, b) for a, b in zip(parameters(cells[0]).values(), parameters(cells[1]).values()))


@pytest.mark.parametrize("scale_sense", [None, DynamicLossScaleUpdateCell(8.0, 2, 2)], ids=["every", "some"])
def test_the_scale_of_a_call_has_a_name_too(mode, scale_sense):
    net = nn.WithLossCell(mlp(), nn.MSELoss())
    update = scale_sense and DynamicLossScaleUpdateCell(8.0, 2, 2)
    step = TrainOneStepWithLossScaleCell(net, nn.SGD(net.trainable_params(), 0.01), update)
    x, y = batch()
    for named in ({"data": x, "label": y}, {"label": y}):
        inputs = () if "data" in named else (x,)
        assert float(step(*inputs, **named, scale_sense=Tensor([64.0]))[2]) == 64.0


def test_a_network_with_an_input_of_that_name_keeps_it(mode):
    class Own(Weighted):
        def construct(self, x, scale_sense):
            return (self.w * x * scale_sense).sum()

    net = Own()
    step = TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 0.01), Tensor(8.0))
    loss, _, scale = step(x=X, scale_sense=Tensor(2.0))
    assert (float(loss), float(scale)) == (22.0, 8.0)


def test_inputs_without_a_place_are_refused():
    class Named(Weighted):
        def construct(self, x, *, y):
            return (self.w * x - y).sum()

    net = Named()
    step = TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 0.01), Tensor(8.0))
    with pytest.raises(TypeError, match=r"\['y'\], which have no place"):
        step(X, y=Y)


def test_numpy_arrays_of_one_number_are_no_scale():
    net = Weighted()
    step = TrainOneStepWithLossScaleCell(net, nn.SGD([net.w], 0.01))
    with pytest.raises((TypeError, ValueError), match="Tensor of shape"):
        step(X, Y, np.float32(2))
