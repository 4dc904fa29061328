"""Train steps on several ranks are those of one process with all their rows, whichever rank overflows when."""

import mindspore as ms
import numpy as np
import pytest

from tests.distributed import launch, steps
from tests.oracles import DynamicScale

pytestmark = pytest.mark.processes

JOBS = [
    pytest.param(("O0", 2), id="O0-2"),
    pytest.param(("O1", 2), id="O1-2", marks=pytest.mark.slow),
    pytest.param(("PYNATIVE", 2), id="PYNATIVE-2", marks=pytest.mark.slow),
    pytest.param(("O0", 4), id="O0-4", marks=pytest.mark.slow),
    pytest.param(("O1", 4), id="O1-4", marks=pytest.mark.slow),
    pytest.param(("PYNATIVE", 4), id="PYNATIVE-4", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=JOBS)
def job(request, tmp_path_factory):
    """What every rank of one job found, and one process with the rows of all of them."""
    mode, ranks = request.param
    folder = tmp_path_factory.mktemp("steps")
    launch.run("tests.distributed.steps", ranks, folder / "logs", mode, folder, ranks - 1, timeout=400)
    found = [dict(np.load(folder / f"rank_{rank}.npz")) for rank in range(ranks)]
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        alone = steps.sweep(steps.train_cell(), ranks)
        alone.update(steps.all_per_token(ranks, None))
        alone.update(steps.accumulated(steps.train_cell(accumulate_steps=steps.MICRO), ranks, None, ranks - 1))
    finally:
        ms.set_context(mode=before)
    return found, alone


def test_ranks_are_equal_to_the_bit(job):
    found, _ = job
    for name in ("overflows", "scales", "weights", "accumulated", "accumulated_weights", "local_weights"):
        assert all(np.array_equal(rank[name], found[0][name]) for rank in found), name


def test_weights_are_those_of_one_process_with_all_rows(job):
    found, alone = job
    np.testing.assert_allclose(found[0]["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
    assert np.abs(alone["weights"][0] - alone["weights"][1]).max() > 1e-3  # a skipped step is seen


def test_losses_of_the_ranks_average_to_that_of_one_process(job):
    found, alone = job
    clean = alone["overflows"] == 0
    mean = np.mean([rank["losses"] for rank in found], axis=0)
    np.testing.assert_allclose(mean[clean], alone["losses"][clean], rtol=1e-5)


@pytest.mark.parametrize("kind", ["", "local_"])
def test_all_ranks_skip_and_scale_when_one_overflows(job, kind):
    found, _ = job
    for case in range(len(found[0]["overflows"])):
        bad_step = (case - 1) % steps.STEPS if case else None
        rule = DynamicScale(1024.0, window=2)
        scales = [rule.step(step == bad_step) for step in range(steps.STEPS)]
        assert found[0][f"{kind}overflows"][case].tolist() == [step == bad_step for step in range(steps.STEPS)]
        assert found[0][f"{kind}scales"][case].tolist() == scales


def test_gradients_checked_before_the_reduce_train_to_the_same_weights(job):
    found, _ = job
    np.testing.assert_array_equal(found[0]["local_weights"], found[0]["weights"])


def test_accumulated_windows_are_those_of_one_process(job):
    found, alone = job
    np.testing.assert_array_equal(found[0]["accumulated"], alone["accumulated"])
    assert alone["accumulated"][:, 0].tolist() == [0, 0, 0, 1, 0, 0]
    np.testing.assert_allclose(found[0]["accumulated_weights"], alone["accumulated_weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("window", [1, steps.MICRO])
def test_tokens_are_added_up_over_ranks(job, mean, window):
    found, alone = job
    name = f"per_token_{mean}_{window}"
    assert alone[name][-6:].sum() == 1 and (window > 1 or alone[name][-6:].tolist() == [0, 0, 1, 0, 0, 0])
    for rank in found:
        np.testing.assert_allclose(rank[name], alone[name], rtol=1e-5, atol=1e-6)


def test_no_more_collectives_than_needed(job):
    found, _ = job
    if "all_reduces_plain" not in found[0]:
        pytest.skip("graphs are dumped in GRAPH_MODE, on 2 ranks")
    weights = 4
    for rank in found:
        assert rank["all_reduces_plain"].tolist() == [weights]  # inf has spread: no flag is sent
        assert rank["all_reduces_accumulating"].tolist() == [weights]
        assert rank["all_reduces_per_token"].tolist() == [weights + 1]  # one scalar
        assert rank["all_reduces_local"].tolist() == [weights + 1]


def test_ranks_with_different_scales_are_stopped_at_the_first_step(job):
    found, _ = job
    scales = [1024.0 * 2**rank for rank in range(len(found))]
    for rank in found:
        assert f"different values of 'scale_sense': {scales}" in str(rank["different_scales"])


@pytest.mark.parametrize("order", ["before", "after"])
def test_grad_scaler_asks_all_ranks_by_one_flag(job, order):
    found, _ = job
    if f"grad_scaler_{order}" not in found[0]:
        pytest.skip("scalers run on 2 ranks")
    weight = 0.875
    expected = [[0, 1024, 1, weight], [1, 512, 2, weight], [1, 256, 3, weight], [0, 256, 4, 0.75]]
    assert all(rank[f"grad_scaler_{order}"].tolist() == expected for rank in found)


def test_functional_scalers_agree_on_reduced_gradients(job):
    found, _ = job
    if "functional_scaler" not in found[0]:
        pytest.skip("scalers run on 2 ranks")
    expected = [[1, 1024], [0, 512], [0, 256], [1, 256]]
    assert all(rank["functional_scaler"].tolist() == expected for rank in found)
