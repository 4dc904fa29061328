"""Gradients in MindSpore from the ground up: what `grad` returns, scaling the loss, clipping, accumulating.

Run it: ``python -m examples.gradients``. The network is one weight [[2, 3, 4]] and the input [[1, 2, 3]], so every
number can be checked by hand: logits = 20, loss = (20 - 19)**2 = 1, d loss / d weight = 2 * (20 - 19) * x.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from lossscale import DynamicLossScaler, StaticLossScaler, all_finite


class Net(nn.Cell):
    """Returns the loss, which is differentiated, and the logits, which come along."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Dense(3, 1, has_bias=False)
        self.fc.weight.set_data(Tensor([[2, 3, 4]], ms.float32))
        self.loss_fn = nn.MSELoss()

    def construct(self, x, y):
        logits = self.fc(x).squeeze()
        return self.loss_fn(logits, y), logits


X = Tensor([[1, 2, 3]], ms.float32)
Y = Tensor(19, ms.float32)
POSITIONS = (0, 1, (0, 1))


def plain(values):
    """Return nested tuples of Tensors as nested tuples and lists of numbers, to print."""
    if isinstance(values, (tuple, list)):
        return tuple([plain(value) for value in values])
    return values.asnumpy().tolist()


def rounded(value):
    """Return a Tensor's numbers with four decimals, to print."""
    return np.round(value.asnumpy().astype(np.float64), 4).tolist()


def gradient_table(transform):
    """Print what `ms.grad` or `ms.value_and_grad` returns for each choice of what to differentiate for."""
    net = Net()
    weights = net.trainable_params()
    cases = [(position, None) for position in POSITIONS]
    cases += [(position, weights) for position in (None, 0, (0, 1))]
    for position, chosen in cases:
        first, second = transform(net, grad_position=position, weights=chosen, has_aux=True)(X, Y)
        named = "None" if chosen is None else "weights"
        print(f"grad_position={position}, weights={named}: {plain(first)}, {plain(second)}")
    try:
        transform(net, grad_position=None, weights=None, has_aux=True)(X, Y)
    except ValueError as error:
        print("grad_position=None, weights=None:", error)


def without_aux():
    """Without `has_aux` all outputs are added up before they are differentiated."""

    def sum_of_outputs(x, y):
        loss, logits = net(x, y)
        return loss + logits

    net = Net()
    print("has_aux=False:", plain(ms.grad(net, grad_position=0)(X, Y)))
    print("loss + logits:", plain(ms.grad(sum_of_outputs, grad_position=0)(X, Y)))


def scaled_loss():
    """Scale the loss, differentiate, unscale loss and gradients, check them. Returns the gradients."""
    net, scaler = Net(), StaticLossScaler(1024.0)

    def forward(x, y):
        loss, logits = net(x, y)
        return scaler.scale(loss), logits

    grad_fn = ms.value_and_grad(forward, grad_position=None, weights=net.trainable_params(), has_aux=True)
    (loss, _), grads = grad_fn(X, Y)
    print("scaled:  ", plain(loss), plain(grads))
    loss = scaler.unscale(loss)
    grads = scaler.unscale(grads, keep_dtype=False)  # float32, also where the gradients were float16
    print("unscaled:", plain(loss), plain(grads))
    print("finite:  ", all_finite(grads))
    return grads


def clipped(grads):
    """Clip after unscaling: the limit is meant for true gradients."""
    clipped_grads = ops.clip_by_global_norm(grads, clip_norm=1.0)
    print("clipped: ", rounded(clipped_grads[0]))


def accumulated(micro_batches=2):
    """Add up the scaled gradients of several micro-batches; unscale, check, adjust and update once for all."""
    net = Net()
    optimizer = nn.SGD(net.trainable_params(), learning_rate=0.1)
    scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=1)

    def forward(x, y):
        loss, _ = net(x, y)
        return scaler.scale(loss / micro_batches)  # so that the sum is the mean over the whole batch

    grad_fn = ms.value_and_grad(forward, grad_position=None, weights=optimizer.parameters)
    total = None
    for _ in range(micro_batches):
        _, grads = grad_fn(X, Y)
        total = grads if total is None else tuple([old + new for old, new in zip(total, grads)])
    grads = scaler.unscale(total, keep_dtype=False)
    finite = all_finite(grads)
    scaler.adjust(finite)
    if finite:
        optimizer(grads)
    print("accumulated:", plain(grads))
    print("weight:", rounded(net.fc.weight), "next scale:", scaler.scale_value.asnumpy())


def main():
    loss, logits = Net()(X, Y)
    print("loss and logits:", loss, logits)
    print("--- grad: gradients, (logits,)")
    gradient_table(ms.grad)
    print("--- value_and_grad: (loss, logits), gradients")
    gradient_table(ms.value_and_grad)
    print("--- one output or several")
    without_aux()
    print("--- loss scale")
    clipped(scaled_loss())
    print("--- gradient accumulation")
    accumulated()


if __name__ == "__main__":
    main()
