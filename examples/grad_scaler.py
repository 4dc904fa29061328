"""PyTorch's recipes for automatic mixed precision, one function each, in MindSpore with `lossscale.GradScaler`.

Run it: ``python -m examples.grad_scaler``. Gradients are explicit in MindSpore: a forward function returns the scaled
loss first, `mindspore.value_and_grad` gives the gradients, and the scaler's methods take and return them.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from lossscale import GradScaler

loss_fn = nn.MSELoss()


def loss_of(net, x, y):
    """The loss in float32, also where the network computes in float16."""
    return loss_fn(net(x).astype(ms.float32), y)


def typical_use(net, optimizer, scaler, batches):
    def forward(x, y):
        loss = loss_of(net, x, y)
        return scaler.scale(loss), loss

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    for x, y in batches:
        (_, loss), grads = grad_fn(x, y)
        scaler.step(optimizer, grads)  # unscales, and skips the update if there are inf or nan
        scaler.update()
    return loss


def clipping(net, optimizer, scaler, batches, max_norm=1.0):
    def forward(x, y):
        loss = loss_of(net, x, y)
        return scaler.scale(loss), loss

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    for x, y in batches:
        (_, loss), grads = grad_fn(x, y)
        grads = scaler.unscale_(optimizer, grads)  # max_norm is meant for true gradients
        grads = ops.clip_by_global_norm(grads, max_norm)
        scaler.step(optimizer, grads)
        scaler.update()
    return loss


def gradient_penalty(net, optimizer, scaler, batches):
    """Add the norm of the gradient to the loss: its gradient is of second order."""

    def scaled_loss(x, y):
        return scaler.scale(loss_of(net, x, y))

    scaled_grad_fn = ms.grad(scaled_loss, None, optimizer.parameters)

    def forward(x, y):
        scaled_grads = scaled_grad_fn(x, y)
        inv_scale = 1.0 / scaler.get_scale()  # no optimizer gets these, so plain division
        square_sum = Tensor(0.0, ms.float32)
        for grad in scaled_grads:
            square_sum = square_sum + ops.square(grad * inv_scale).sum()
        loss = loss_of(net, x, y) + ops.sqrt(square_sum)
        return scaler.scale(loss), loss

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    for x, y in batches:
        (_, loss), grads = grad_fn(x, y)
        scaler.step(optimizer, grads)
        scaler.update()
    return loss


def accumulation(net, optimizer, scaler, batches, steps=2):
    """Add up scaled gradients; unscale, update the weights and the scale only after the last micro-batch."""

    def forward(x, y):
        loss = loss_of(net, x, y) / steps
        return scaler.scale(loss), loss

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    total = None
    for number, (x, y) in enumerate(batches, 1):
        (_, loss), grads = grad_fn(x, y)
        total = grads if total is None else tuple([old + new for old, new in zip(total, grads)])
        if number % steps == 0:
            scaler.step(optimizer, total)
            scaler.update()
            total = None
    return loss


def several_losses_and_optimizers(nets, optimizers, scaler, batches):
    """One scaler for all: each optimizer skips for itself, `update` comes once, after all have stepped."""
    net0, net1 = nets
    optimizer0, optimizer1 = optimizers
    parameters = ms.ParameterTuple([*optimizer0.parameters, *optimizer1.parameters])
    boundary = len(optimizer0.parameters)

    def forward(x, y):
        output0, output1 = net0(x).astype(ms.float32), net1(x).astype(ms.float32)
        loss0 = loss_fn(2 * output0 + 3 * output1, y)
        loss1 = loss_fn(3 * output0 - 5 * output1, y)
        scaled0, scaled1 = scaler.scale((loss0, loss1))
        return scaled0 + scaled1, loss0, loss1

    grad_fn = ms.value_and_grad(forward, None, parameters, has_aux=True)
    for x, y in batches:
        (_, loss0, loss1), grads = grad_fn(x, y)
        grads0, grads1 = grads[:boundary], grads[boundary:]
        grads0 = scaler.unscale_(optimizer0, grads0)  # only where one wants to see or change them
        scaler.step(optimizer0, grads0)
        scaler.step(optimizer1, grads1)
        scaler.update()
    return loss0 + loss1


RECIPES = {
    "typical use": typical_use,
    "clipping": clipping,
    "gradient penalty": gradient_penalty,
    "accumulation": accumulation,
}


def make_net(seed=1):
    """A small network with float32 parameters; the caller chooses what it computes in."""
    ms.set_seed(seed)
    net = nn.SequentialCell(nn.Dense(8, 16), nn.Tanh(), nn.Dense(16, 1))
    net.update_parameters_name(f"net{seed}.")  # two networks in one gradient function need distinct names
    return net


def make_batches(count=20):
    """Batches of a linear function with a little noise."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(8, 1))
    for _ in range(count):
        x = rng.normal(size=(32, 8))
        y = x @ weight + 0.01 * rng.normal(size=(32, 1))
        yield Tensor(x, ms.float32), Tensor(y, ms.float32)


def main():
    for name, recipe in RECIPES.items():
        net = make_net().to_float(ms.float16)
        optimizer = nn.SGD(net.trainable_params(), learning_rate=0.05)
        scaler = GradScaler(init_scale=2.0**16, growth_interval=10)
        loss = recipe(net, optimizer, scaler, make_batches())
        print(f"{name}: loss {float(loss):.4f}, scale {scaler.get_scale():g}, skipped {scaler.total_skips}")
    nets = [make_net(seed).to_float(ms.float16) for seed in (1, 2)]
    optimizers = [nn.SGD(net.trainable_params(), learning_rate=0.005) for net in nets]
    scaler = GradScaler(init_scale=2.0**16, growth_interval=10)
    loss = several_losses_and_optimizers(nets, optimizers, scaler, make_batches())
    print(f"several losses: loss {float(loss):.4f}, scale {scaler.get_scale():g}, skipped {scaler.total_skips}")


if __name__ == "__main__":
    main()
