"""The networks that MindSpore trains in the benchmark."""

import mindspore as ms
import numpy as np
from mindspore import nn

from benchmarks import workloads

SHAPE_OF_DIGITS = (workloads.LENET_BATCH, 1, 32, 32)


class LeNet5(nn.Cell):
    """The usual one, for 32 x 32 images."""

    def __init__(self):
        super().__init__()
        self.body = nn.SequentialCell(
            nn.Conv2d(1, 6, 5, pad_mode="valid"),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Conv2d(6, 16, 5, pad_mode="valid"),
            nn.ReLU(),
            nn.MaxPool2d(2, 2),
            nn.Flatten(),
            nn.Dense(400, 120),
            nn.ReLU(),
            nn.Dense(120, 84),
            nn.ReLU(),
            nn.Dense(84, 10),
        )

    def construct(self, x):
        return self.body(x)


def build_net(workload: str) -> tuple[nn.Cell, np.ndarray, np.ndarray]:
    """Return a net, a batch of inputs and one of targets of the same shape as its output."""
    ms.set_seed(1)
    rng = np.random.default_rng(1)
    if workload in workloads.MLP:
        batch, width, layers = workloads.MLP[workload]
        cells = [cell for _ in range(layers) for cell in (nn.Dense(width, width), nn.ReLU())]
        net, shape, out = nn.SequentialCell(*cells[:-1]), (batch, width), (batch, width)
    elif workload == "lenet5_b32":
        net, shape, out = LeNet5(), SHAPE_OF_DIGITS, (workloads.LENET_BATCH, 10)
    else:
        batch, length, width, heads, layers, hidden = workloads.TRANSFORMER
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True)
        net, shape = nn.TransformerEncoder(layer, layers), (batch, length, width)
        out = shape
    inputs, targets = (rng.standard_normal(s).astype(np.float32) * 0.1 for s in (shape, out))
    return net, inputs, targets
