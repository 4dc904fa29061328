"""The reader of dumped graphs, on a dump made up here."""

from tests.devices import graphs

DUMP = """\
# IR entry: @1_construct_9
%para1_x: <Tensor[Float32], (4, 8)> : [4, 8]
%para2_scale_sense: <Ref[Tensor[Float32]], (), ref_key=scale_sense, is_parameter>  :  has_default
subgraph @1_construct_9() {
  %0(equiv_a) = PrimFunc_MatMul(%para1_x, %1) {instance name: m}
      : (<Tensor[Float32], (4, 8)>, <Ref[Tensor[Float16]], (8, 2), ref_key=w>) -> (<Tensor[Float32], (4, 2)>)
      # Fullname with scope: (Default/net/MatMul-op0)
  %1(CNode_2) = Switch(%0, @2_branch_3, %2)
      : (<Tensor[Bool], ()>, <Func, NoShape>, <Func, NoShape>) -> (<Func, NoShape>)
      # Fullname with scope: (Default/Switch-op0)
}
subgraph @2_branch_3(%para3_y) {
  %0(CNode_4) = AllReduce(%para3_y)
      : (<Tensor[Float64], (3)>) -> (<Tensor[Float64], (3)>)
      # Fullname with scope: (Default/AllReduce-op0)
}
"""


def test_operators_types_and_branches_are_read():
    graph = graphs.parse(DUMP)
    assert [op.name for op in graph.ops] == ["MatMul", "Switch", "AllReduce"]
    assert graph.ops[0].inputs == (("Float32", "4, 8"), ("Float16", "8, 2"))
    assert graph.ops[0].outputs == (("Float32", "4, 2"),)
    assert graph.ops[0].scope == "Default/net/MatMul-op0"
    assert [graph.count("AllReduce", where=where) for where in ("everywhere", "entry", "branches")] == [1, 0, 1]
    assert graph.dtypes() == {"Float16", "Float32", "Float64"}
    assert set(graph.parameters) == {"x", "scale_sense"}
