"""Every cell compiles for Ascend and GPU, and the graphs hold what they must and nothing that they must not."""

import pytest

from tests.devices import cases

SHARDED = [name for name in cases.CASES if "sharded" in name]
LARGE = ["transformer", "120 parameters", "120 parameters, stock", "120 parameters, everything"]
ALONE = [name for name in cases.CASES if name not in (*SHARDED, *LARGE, "pipeline")]
SHORT = {"Ascend": ["stock", "dynamic", "everything", "infnan", "custom", "dynamic scaler"], "GPU": ["dynamic"]}


@pytest.mark.processes
@pytest.mark.parametrize(("device", "name"), [(device, name) for device, names in SHORT.items() for name in names])
def test_the_usual_cells_compile(compile_cases, device, name):
    graph = compile_cases(SHORT[device], device=device)[name].graph
    assert graph.count("Custom") == 0
    assert device == "GPU" or "Float64" not in graph.dtypes()


@pytest.mark.processes
def test_ascends_own_checks_are_asked(compile_cases):
    compiled = compile_cases(SHORT["Ascend"])
    stock, saturation, infnan = (compiled[name].graph for name in ("stock", "dynamic", "infnan"))
    status = ("NPUGetFloatStatusV2", "NPUClearFloatStatusV2")  # cleared, so that one overflow is not seen twice
    for name in status:
        assert saturation.count(name, where="entry") == stock.count(name) == 1
    assert (infnan.count(*status), infnan.count("AllFinite", where="entry")) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "said"), [("Ascend", "self-test   not run: this is MindSpore's dry run"), ("GPU", "could not be run")]
)
def test_the_doctor_says_where_its_test_can_not_be_run(run_on, device, said):
    done = run_on(device, "-m", "lossscale", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in (f"device      {device}", f"check       that of MindSpore for {device}", said, "all is well"):
        assert part in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize(("device", "level"), [("Ascend", "O0"), ("Ascend", "O1"), ("GPU", "O0")])
def test_every_cell_compiles(compile_cases, device, level, name):
    graph = compile_cases(ALONE, device=device, jit_level=level)[name].graph
    assert graph.count("Custom") == 0
    assert device == "GPU" or "Float64" not in graph.dtypes()


@pytest.mark.slow
@pytest.mark.parametrize(("device", "level"), [("Ascend", "O0"), ("Ascend", "O1"), ("GPU", "O0")])
def test_a_transformer_with_200_parameters_compiles(compile_cases, device, level):
    graph = compile_cases(["transformer"], device=device, jit_level=level)["transformer"].graph
    assert sum("weight" in name or "bias" in name for name in graph.parameters) >= 200


@pytest.mark.slow
def test_no_gradient_costs_an_operator_more_than_in_mindspores_step(compile_cases):
    compiled = compile_cases(LARGE[1:3])
    ours, stock = (compiled[name].graph for name in LARGE[1:3])
    for name in sorted({op.name for op in ours.ops}):
        more = ours.count(name, where="entry") - stock.count(name, where="entry")
        assert more <= 6, f"{more} {name} more for 120 gradients"
    arithmetic = ["Add", "Sub", "Muls", "Select", "Minimum", "Maximum", "GreaterEqual", "LessEqual", "Equal"]
    arithmetic += ["IsFinite", "LogicalAnd", "LogicalNot", "LogicalOr"]
    # For the scale, its limits and four counters that stop at their end, where MindSpore has two.
    assert sum(ours.count(n, where="entry") - stock.count(n, where="entry") for n in arithmetic) <= 18
    assert ours.count("ReduceAll", where="entry") == stock.count("ReduceAll")
    assert ours.count("Cast") <= stock.count("Cast")
