"""Each recipe of `examples.grad_scaler`, with a scaler and with a disabled one."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from examples import grad_scaler as recipes
from lossscale import GradScaler


def run(recipe, scaler, several):
    nets = [recipes.make_net(seed) for seed in ((1, 2) if several else (1,))]
    optimizers = [nn.SGD(net.trainable_params(), learning_rate=0.01) for net in nets]
    batches = recipes.make_batches(4)
    if several:
        recipe(nets, optimizers, scaler, batches)
    else:
        recipe(nets[0], optimizers[0], scaler, batches)
    return [p.asnumpy() for net in nets for p in net.trainable_params()]


@pytest.mark.parametrize(
    ("recipe", "several"),
    (*((recipe, False) for recipe in recipes.RECIPES.values()), (recipes.several_losses_and_optimizers, True)),
)
def test_recipe_trains_as_without_scaling(mode, recipe, several):
    scaler = GradScaler(2.0**10, growth_interval=1)
    scaled, control = run(recipe, scaler, several), run(recipe, GradScaler(enabled=False), several)
    start = [p.asnumpy() for p in recipes.make_net(1).trainable_params()]
    assert not any(np.array_equal(a, b) for a, b in zip(scaled, start))
    for a, b in zip(scaled, control):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    assert scaler.get_scale() == 2.0 ** (12 if recipe is recipes.accumulation else 14)


@pytest.mark.slow
def test_main_prints_each_recipe(capsys):
    ms.set_seed(1)
    recipes.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [*recipes.RECIPES, "several losses"]
    assert all(float(line.split("loss ")[-1].split(",")[0]) < 5 for line in lines)
