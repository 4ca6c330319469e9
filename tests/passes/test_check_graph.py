"""A broken graph is noticed, and the error names what is broken."""

import numpy as np
import pytest

from trtdiff import lowering
from trtdiff.errors import BuildError, ExportError
from trtdiff.passes.base import SMALL, run_passes
from trtdiff.passes.check_graph import check_graph
from trtdiff.passes.derived import derived_weight

ir = pytest.importorskip("onnx_ir")

NETWORK = """<ir_version: 11, opset_import: ["": 23]>
net (float[n, 4] x, float[n, 4] z) => (float[n, 4] y) <float[4] w = {1, 2, 3, 4}, float[n, 4] a, float[n, 4] b>
{ a = Add (x, w)  b = Mul (a, z)  y = Tanh (b) }"""


def network():
    model = ir.from_onnx_text(NETWORK)
    for node in model.graph:
        node.name, node.metadata_props["module"] = f"node of {node.outputs[0].name}", "net.block"
    return model


def refused(model, match):
    with pytest.raises(BuildError, match=match) as caught:
        check_graph(model)
    return caught.value


def test_a_whole_graph_passes():
    check_graph(network())


def test_a_value_without_a_type():
    model = network()
    model.graph[1].outputs[0].type = None
    error = refused(model, "value b has no type")
    assert "node Mul node of b; module net.block" in error.where


def test_a_node_in_front_of_what_it_reads():
    model = network()
    last = model.graph[2]
    model.graph.remove(last)
    model.graph.insert_before(model.graph[0], last)
    assert "node Tanh node of y" in refused(model, "input b is made later, by Mul node of b").where


def test_an_input_that_is_nowhere():
    model = network()
    model.graph[0].replace_input_with(0, ir.Value(name="lost", type=ir.TensorType(ir.DataType.FLOAT)))
    assert "node Add node of a" in refused(model, "input lost is neither an input").where


def test_an_input_of_a_node_that_was_removed():
    model = network()
    model.graph.remove(model.graph[0])
    refused(model, "input a is made by Add node of a, which is no longer in the graph")


def test_an_output_that_nobody_makes():
    model = network()
    model.graph.outputs[0] = ir.Value(name="nothing", type=ir.TensorType(ir.DataType.FLOAT))
    refused(model, "output nothing is made by no node")


def test_two_values_of_one_name():
    model = network()
    model.graph[1].outputs[0].name = "a"
    refused(model, "two values are called a")


def test_two_nodes_of_one_name():
    model = network()
    model.graph[2].name = "node of a"
    assert "node Tanh node of a" in refused(model, "two nodes are called node of a").where
    for node in model.graph:
        node.name = ""
    check_graph(model)  # what has no name is no conflict


CONTROL = {
    "If": """<ir_version: 11, opset_import: ["": 23]>
        net (bool c, float[n] x) => (float[n] y)
        { y = If <then_branch = yes () => (float[n] a) { a = Abs (x) }, else_branch = no () => (float[n] b)
          { b = Neg (x) }> (c) }""",
    "Loop": """<ir_version: 11, opset_import: ["": 23]>
        net (int64 m, bool c, float[n] x) => (float[n] y)
        { y = Loop <body = step (int64 i, bool go, float[n] a) => (bool on, float[n] b) { on = Identity (go)
          b = Abs (a) }> (m, c, x) }""",
}


@pytest.mark.parametrize("kind", CONTROL)
def test_a_node_with_a_graph_inside(kind):
    model = ir.from_onnx_text(CONTROL[kind])
    model.graph[0].name = "choice"
    error = refused(model, f"{kind} has a graph inside")
    assert f"node {kind} choice" in error.where
    assert "control flow" in error.hint


def test_a_pass_that_breaks_a_graph_still_without_types_is_named():
    model = network()
    for node in model.graph:
        node.outputs[0].type = None

    def renames(model):
        model.graph[0].name = model.graph[1].name
        return 1

    with pytest.raises(ExportError, match="pass renames failed: two nodes are called node of b"):
        run_passes(model, [renames])


@pytest.mark.parametrize("end", ["input", "output"])
def test_a_pass_that_changes_inputs_or_outputs_is_an_error(monkeypatch, end):
    """But for the prologues, which are there for that."""

    def careless(model):
        values = model.graph.inputs if end == "input" else model.graph.outputs
        values[0].name = "other"

    monkeypatch.setattr(lowering, "named", lambda place: careless)
    with pytest.raises(BuildError, match=f"the pass careless changed inputs or outputs: {end} 0 other") as caught:
        lowering._apply("here:careless", network(), "net.onnx")
    assert "net.onnx" in caught.value.where
    lowering._apply(lowering.PROLOGUES["denoiser"], network(), "net.onnx")


def test_types_that_differ_and_types_that_may_not_be():
    model = network()
    model.graph.inputs[1].dtype = ir.DataType.FLOAT16
    error = refused(model, r"B of Mul is float16 \(z\), and must be float32")
    assert "a: float32, z: float16" in error.where
    model = network()
    for value in (*model.graph.inputs, model.graph[0].outputs[0], model.graph[1].outputs[0]):
        value.dtype = ir.DataType.INT64
    model.graph.initializers["w"].dtype = ir.DataType.INT64
    model.graph.initializers["w"].const_value = ir.tensor(np.arange(4), name="w")
    refused(model, r"input of Tanh may not be int64 \(b\)")


def test_an_output_s_type_is_checked_too():
    model = network()
    model.graph[2].outputs[0].dtype = ir.DataType.FLOAT16
    refused(model, r"output of Tanh is float16 \(y\), and must be float32")


@pytest.mark.parametrize("size", [SMALL, SMALL + 1])
def test_a_weight_in_memory(size):
    model = ir.from_onnx_text(f"""<ir_version: 11, opset_import: ["": 23]>
        net (float[{size}] x) => (float[{size}] y) <float[{size}] w> {{ y = Add (x, w) }}""")
    value = model.graph[0].inputs[1]
    value.const_value = ir.tensor(np.zeros(size, np.float32), name="w")
    model.graph.register_initializer(value)
    if size <= SMALL:
        check_graph(model)
        return
    refused(model, f"weight w is in memory, {size} elements of float32")
    lazy = derived_weight(value, "v", lambda array: array, dtype=ir.DataType.FLOAT, shape=(size,))
    model.graph[0].replace_input_with(1, lazy)
    del model.graph.initializers["w"]
    check_graph(model)


def test_a_constant_node_in_memory():
    model = network()
    constant = ir.node("Constant", [], {"value": ir.tensor(np.zeros(SMALL + 1, np.float32))}, name="table")
    constant.outputs[0].name, constant.outputs[0].dtype = "table", ir.DataType.FLOAT
    model.graph.insert_before(model.graph[0], constant)
    assert "node Constant table" in refused(model, f"a constant of {SMALL + 1} elements is in memory").where


def test_a_weight_that_is_called_what_it_is_not():
    model = network()
    model.graph.initializers["w"].dtype = ir.DataType.FLOAT16
    refused(model, "weight w is called float16 and stored as float32")


def test_a_domain_without_an_opset():
    model = network()
    model.graph[2].domain = "com.example"
    assert "node Tanh" in refused(model, "domain com.example has no opset").where
    model.opset_imports["com.example"] = 1
    check_graph(model)  # an operator that ONNX does not know may have any types
