"""The report and the picture, from numbers made up here."""

import pytest

from benchmarks import report


def row(ratio):
    """Return a summary of one variant."""
    return {"ms": 2.0 * ratio, "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.02}


@pytest.fixture
def results():
    """Return results of one workload."""
    failed = {"error": "RuntimeError: no kernel"}
    branch = row(1.01)
    ours = {"net": {"plain": row(1.0), "order and branch": branch, "stock": failed, "ours": row(1.03)}}
    ours["net O2"] = {"plain": row(1.0), "fixed": row(1.2), "ours": row(1.5)}
    return {
        "date": "2000-01-01",
        "machine": "an abacus",
        "load before": 0.1,
        "rounds": 40,
        "versions": {"mindspore": "2.10.0"},
        "MindSpore GRAPH": ours,
        "PyTorch": {"net": {"plain": row(1.0), "GradScaler": row(1.06)}},
        "Flax": {"net": {"plain": row(1.0), "DynamicScale": row(1.5)}},
        "Kernel": {"1 x 1": {"plain": {**row(1.0), "ms": 0.00067}, "unscale": row(5.0)}},
    }


def test_the_full_step_and_the_scale_series_have_sections_where_they_were_measured(results):
    assert "## Full step" not in report.markdown(results)
    results["Full step"] = {"MindSpore GRAPH": {"net": {"plain": row(1.0), "ours": row(1.12)}}}
    results["Scale series"] = {"count": 200, "length": 12, "different": 3}
    text = report.markdown(results)
    assert "| net | 2.00 | 1.12 [1.11 1.14] |" in text.split("## Full step")[1]
    assert "at most 0.85" in text
    assert "200 random series of 12 iterations" in text
    assert "in 3 of them" in text


def test_goals_name_what_misses_them(results):
    times = {"plain": 2.0, "ours": 2.4, "stock": 9.0}
    results["Cold"] = {
        "first call, net": {name: {"first_call_s": time, "peak_mib": 100} for name, time in times.items()}
    }
    text = report.markdown(results)
    assert "| float32, of order and branch | 1.05 | 1 of 1 |  |" in text
    assert "| O2, of a fixed scale | 1.05 | 0 of 1 | net O2 (1.25) |" in text
    assert "| First call | 1.15 | 0 of 1 | net (1.20) |" in text


def test_a_variant_that_fails_is_named_and_short_times_keep_their_digits(results):
    text = report.markdown(results)
    assert "| net | 2.00 | 1.01 [1.00 1.03] | does not run | 1.03 [1.02 1.05] |  |" in text
    assert "| 1 x 1 | 0.00067 |" in text


def test_the_picture_leaves_out_what_does_not_run(results, tmp_path):
    pytest.importorskip("matplotlib", reason="`make bench` draws in the environment of the peers")
    from benchmarks import chart

    chart.draw(results, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_a_fused_optimizer_is_measured_against_the_larger_plain_step(results):
    results["Optimizers"] = {
        "net SGD": {"plain": row(1.0), "fused plain": row(1.1), "ours, fused": row(1.1)},
        "net Adam": {"plain": row(1.0), "fused plain": row(0.9), "ours, fused": row(0.9)},
    }
    text = report.markdown(results)
    assert "| SGD and Momentum, fused, of the larger plain step | 1.00 | 1 of 1 |  |" in text
    assert "| Adam kinds, fused, of stock's plain step | 0.80 | 0 of 1 | net Adam (0.90) |" in text


def test_what_else_was_measured_is_reported(results):
    results |= {"Imports": {"mindspore": 2.0, "lossscale": 2.1}, "Convolutions": [40.0, 4.0], "others": 0.031}
    results["Compile times"] = {"50": {"amp": 0.1, "lossscale": 0.12}}
    text = report.markdown(results)
    for words in ("with `lossscale` 2.10 s", "40.0 ms as MindSpore", "other programs took 3%", "| 50 | 0.10 | 0.12 |"):
        assert words in text
