"""A subclass may give its own attributes any name; methods that were renamed are refused when the class is made."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from lossscale import EMA, ClipByGlobalNorm, DynamicLossScaleUpdateCell, TrainOneStepWithLossScaleCell
from tests.nets import GradientsAsGiven

NAMES = """
learning_rate step update reduce unchanged skips gradients clip_grad ema accumulate_steps places outputs accumulator
record report zero weights_decay loss_scale scale clip average unscaling narrow_parameters flags drop_overflow_update
scale_every_call fused_optimizer options counter rate divisor window norm micro_step totals grad_scale status reduced
skip_above folds_clip check_here bare_output sparse_gradients inputs_with_scale
""".split()  # noqa: SIM905


class UsesEveryName(TrainOneStepWithLossScaleCell):
    def __init__(self, kind, *args, **options):
        super().__init__(*args, **options)
        for number, name in enumerate(NAMES):
            value = number
            if kind == "Parameter":
                value = Parameter(Tensor(number, ms.int32), name=f"own_{name}", requires_grad=False)
            elif kind == "Cell":
                value = nn.Dense(1, 1)
                value.update_parameters_name(f"own_{name}.")
            setattr(self, name, value)


def train(make):
    net = GradientsAsGiven([np.zeros(2, np.float32)])
    step = make(
        net,
        nn.SGD(list(net.w), 1.0),
        DynamicLossScaleUpdateCell(8.0, 2, 100),
        accumulate_steps=2,
        clip_grad=ClipByGlobalNorm(100.0),
        ema=EMA(0.5),
        outputs=("overflow", "grad_norm"),
    )
    for _ in range(2):
        overflow, norm = step(Tensor(np.float32([3, 4])))
    assert (bool(overflow), float(norm)) == (False, 5.0)
    np.testing.assert_allclose(net.w[0].asnumpy(), [-3, -4])
    np.testing.assert_allclose(step.step_options.ema.shadows[0].asnumpy(), [-1.5, -2])
    return step


@pytest.mark.parametrize("kind", ["Parameter", "Cell", "number"])
def test_a_subclass_may_use_any_name(mode, kind):
    step = train(lambda *args, **options: UsesEveryName(kind, *args, **options))
    assert step.step_options.accumulate_steps == 2
    owned = step.accumulate_steps
    assert owned == NAMES.index("accumulate_steps") if kind == "number" else isinstance(owned, (Parameter, nn.Cell))


def test_options_can_be_read():
    step = train(TrainOneStepWithLossScaleCell)
    assert (step.accumulate_steps, step.drop_overflow_update) == (2, True)
    assert step.outputs == ("overflow", "grad_norm")
    assert (step.clip_grad, step.ema) == (step.step_options.clip_grad, step.step_options.ema)
    assert not step.in_window() and not step.scale_every_call


@pytest.mark.parametrize(
    ("name", "method", "new"),
    [
        ("reduce", lambda self, grads: grads, "reduce_gradients"),
        ("skips", lambda self, overflow, norm: overflow, "skips_update"),
        ("step", lambda self, grads: True, "apply_update"),
        (
            "unscale_and_check",
            lambda self, grads, totals, divisor: grads,
            r"unscale_and_check\(self, scaled, divisor\)",
        ),
    ],
)
def test_a_method_under_an_old_name_is_refused(name, method, new):
    with pytest.raises(TypeError, match=f"'Old' overrides '{name}'.*{new}"):
        type("Old", (TrainOneStepWithLossScaleCell,), {name: method})


def test_a_method_of_another_shape_is_nobodys_business():
    type("Fine", (TrainOneStepWithLossScaleCell,), {"step": lambda self, x, y, z: x, "update": lambda self: 1})
