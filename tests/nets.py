"""Small networks for the tests, and a way to put inf or nan into the gradient of a chosen parameter."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


class LeNet5(nn.Cell):
    """LeNet for 1x32x32 images."""

    def __init__(self, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, pad_mode="valid")
        self.conv2 = nn.Conv2d(6, 16, 5, pad_mode="valid")
        self.fc1 = nn.Dense(16 * 5 * 5, 120)
        self.fc2 = nn.Dense(120, 84)
        self.fc3 = nn.Dense(84, classes)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=2, stride=2)
        self.flatten = nn.Flatten()

    def construct(self, x):
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.flatten(x)
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


def mlp(inputs=8, hidden=16, outputs=4):
    return nn.SequentialCell(nn.Dense(inputs, hidden), nn.ReLU(), nn.Dense(hidden, outputs))


class Poisoned(nn.Cell):
    """A network with loss whose gradient of weight i grows by poison[i]: 0 for none, inf or nan for an overflow."""

    def __init__(self, network_with_loss):
        super().__init__(auto_prefix=False)
        self.network = network_with_loss
        self.poisoned = network_with_loss.trainable_params()

    def construct(self, x, y, poison):
        loss = self.network(x, y)
        for i in range(len(self.poisoned)):
            loss = loss + (self.poisoned[i] * poison[i]).sum()
        return loss


class GradientsAsGiven(nn.Cell):
    """A network whose gradient of each weight is the input of the same place (times the loss's own gradient)."""

    def __init__(self, values, dtypes=None):
        super().__init__()
        dtypes = dtypes or [ms.float32] * len(values)
        self.w = ms.ParameterTuple(
            [Parameter(Tensor(v).astype(d), name=f"w{i}") for i, (v, d) in enumerate(zip(values, dtypes))]
        )

    def construct(self, *grads):
        loss = ops.zeros((), ms.float32)
        for i in range(len(self.w)):
            loss = loss + (self.w[i] * grads[i]).sum().astype(ms.float32)
        return loss


def copy_parameters(source, target):
    """Copy the values of all parameters from one cell to another of the same structure."""
    for a, b in zip(source.get_parameters(), target.get_parameters()):
        b.set_data(Tensor(a.asnumpy().copy(), b.dtype))


def batch(size=8, inputs=8, outputs=4, seed=0):
    """Random inputs and targets of an `mlp`."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((size, inputs)).astype(np.float32)
    return Tensor(x), Tensor(rng.standard_normal((size, outputs)).astype(np.float32))
