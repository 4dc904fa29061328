"""What `examples.gradients` prints, each number of which can be checked by hand."""

from examples import gradients

EXPECTED = """\
loss and logits: 1.0 20.0
--- grad: gradients, (logits,)
grad_position=0, weights=None: [[4.0, 6.0, 8.0]], (20.0,)
grad_position=1, weights=None: -2.0, (20.0,)
grad_position=(0, 1), weights=None: ([[4.0, 6.0, 8.0]], -2.0), (20.0,)
grad_position=None, weights=weights: ([[2.0, 4.0, 6.0]],), (20.0,)
grad_position=0, weights=weights: ([[4.0, 6.0, 8.0]], ([[2.0, 4.0, 6.0]],)), (20.0,)
grad_position=(0, 1), weights=weights: (([[4.0, 6.0, 8.0]], -2.0), ([[2.0, 4.0, 6.0]],)), (20.0,)
grad_position=None, weights=None: `grad_position` and `weight` can not be None at the same time.
--- value_and_grad: (loss, logits), gradients
grad_position=0, weights=None: (1.0, 20.0), [[4.0, 6.0, 8.0]]
grad_position=1, weights=None: (1.0, 20.0), -2.0
grad_position=(0, 1), weights=None: (1.0, 20.0), ([[4.0, 6.0, 8.0]], -2.0)
grad_position=None, weights=weights: (1.0, 20.0), ([[2.0, 4.0, 6.0]],)
grad_position=0, weights=weights: (1.0, 20.0), ([[4.0, 6.0, 8.0]], ([[2.0, 4.0, 6.0]],))
grad_position=(0, 1), weights=weights: (1.0, 20.0), (([[4.0, 6.0, 8.0]], -2.0), ([[2.0, 4.0, 6.0]],))
grad_position=None, weights=None: `grad_position` and `weight` can not be None at the same time.
--- one output or several
has_aux=False: [[6.0, 9.0, 12.0]]
loss + logits: [[6.0, 9.0, 12.0]]
--- loss scale
scaled:   1024.0 ([[2048.0, 4096.0, 6144.0]],)
unscaled: 1.0 ([[2.0, 4.0, 6.0]],)
finite:   True
clipped:  [[0.2673, 0.5345, 0.8018]]
--- gradient accumulation
accumulated: ([[2.0, 4.0, 6.0]],)
weight: [[1.8, 2.6, 3.4]] next scale: 2048.0
"""


def test_printed_results(mode, capsys):
    gradients.main()
    assert capsys.readouterr().out == EXPECTED
