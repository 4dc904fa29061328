"""Many ranks, simulated: what is sent, where in the graph, and how state is laid out over shards."""

import pytest

from tests.devices.graphs import COLLECTIVES

DATA_PARALLEL = ["stock", "dynamic", "clip by global norm", "accumulate", "everything"]
SHARDED = ["sharded, stock", "sharded", "sharded, clip", "sharded, clip by norm", "sharded, every norm"]
SHARDED += ["sharded, accumulate", "sharded, sums without norms", "pipeline"]
NOT_SHARDED = ["not sharded", "not sharded, clip", "not sharded, every norm", "not sharded, accumulate"]
GRADIENTS = 4


def collectives(graph, where="everywhere"):
    return graph.count(*COLLECTIVES, where=where)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, 1024])
def test_data_parallel_sends_each_gradient_and_one_flag(compile_cases, ranks):
    compiled = compile_cases(DATA_PARALLEL, ranks=ranks, parallel="data_parallel")
    for name in ("stock", "dynamic", "clip by global norm"):
        assert (collectives(compiled[name].graph), collectives(compiled[name].graph, "entry")) == (GRADIENTS + 1,) * 2
    for name in ("accumulate", "everything"):  # none outside the branch that ends a window
        assert (collectives(compiled[name].graph), collectives(compiled[name].graph, "entry")) == (GRADIENTS + 1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"optimizer_parallel": True}], ids=["", "optimizer parallel"])
def test_shards_send_what_mindspore_sends_and_the_norm(compile_cases, options):
    compiled = compile_cases(SHARDED, ranks=8, parallel="semi_auto_parallel", **options)
    stock = collectives(compiled["sharded, stock"].graph)
    assert collectives(compiled["sharded"].graph) == collectives(compiled["sharded, accumulate"].graph) == stock
    for name in ("sharded, clip", "sharded, clip by norm", "sharded, every norm"):
        assert collectives(compiled[name].graph) == stock + 1


@pytest.mark.slow
def test_the_norm_of_shards_is_summed_over_devices_once_for_each_part(compile_cases):
    compiled = compile_cases(SHARDED, ranks=8, parallel="semi_auto_parallel")
    base = compiled["sharded"].graph
    for name in ("sharded, clip", "sharded, clip by norm", "sharded, every norm"):
        graph = compiled[name].graph
        # A sum of squares for each of two weights, divided by the devices that hold the same part, in one AllReduce.
        sent = [op for op in graph.ops if op.name == "AllReduce" and op.inputs[0] == ("Float32", "2")]
        assert len(sent) == 1
        assert graph.count("ExpandDims") == graph.count("RealDiv") - base.count("RealDiv") == 2


@pytest.mark.slow
def test_state_is_laid_out_as_the_weights_and_the_scale_is_on_every_device(compile_cases):
    parameters = compile_cases(SHARDED, ranks=8, parallel="semi_auto_parallel")["sharded, accumulate"].graph.parameters
    for weight, shape in (("first", "(16, 8)"), ("second", "(8, 16)")):  # of (16, 32) and (32, 16), over 4 devices
        for name in (weight, f"accu_grads.{weight}", f"moments.{weight}", f"ema.{weight}"):
            assert f"Tensor[Float32]], {shape}" in parameters[name], name
    for name in ("scale_sense", "accu_step", "current_iterator_step", "last_overflow_iterator_step"):
        assert ", ()," in parameters[name], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [("sharded, sums without norms", "not for sums of them"), ("pipeline", "build_train_network")],
)
def test_what_mindspore_can_not_do_over_shards_is_refused(compile_cases, name, words):
    error = compile_cases(SHARDED, ranks=8, parallel="semi_auto_parallel")[name].error
    assert words in error


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_SHARDED)
def test_auto_parallel_compiles(compile_cases, name):
    assert compile_cases(NOT_SHARDED, ranks=8, parallel="auto_parallel")[name].graph.ops
