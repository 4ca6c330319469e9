"""Casts are written once, behind the maker, under names of their own."""

import pytest

from trtdiff.passes.casts import Casts
from trtdiff.passes.check_graph import check_graph

ir = pytest.importorskip("onnx_ir")


def network(body="a = Tanh (x)  y = Abs (a)"):
    return ir.from_onnx_text(f"""<ir_version: 11, opset_import: ["": 23]>
        net (float[n] x) => (float[n] y) <float[n] a, float[2] w = {{1, 2}}> {{ {body} }}""")


def test_a_cast_is_behind_the_maker_with_all_its_metadata_and_is_made_once():
    model = network()
    maker = model.graph[0]
    maker.metadata_props.update({"module": "block.1", "keep": "asked for"})
    casts = Casts(model.graph)
    made = casts.cast(maker.outputs[0], ir.DataType.FLOAT16)
    assert casts.cast(maker.outputs[0], ir.DataType.FLOAT16) is made
    assert [node.op_type for node in model.graph] == ["Tanh", "Cast", "Abs"]
    assert (made.name, made.dtype, made.shape) == ("a/float16", ir.DataType.FLOAT16, maker.outputs[0].shape)
    assert dict(made.producer().metadata_props) == {"module": "block.1", "keep": "asked for"}
    check_graph(model)


@pytest.mark.parametrize("which", ["x", "w"])
def test_a_cast_of_an_input_or_a_weight_comes_first(which):
    model = network("a = Tanh (x)  b = Add (a, w)  y = Abs (b)")
    model.graph[1].outputs[0].dtype = ir.DataType.FLOAT
    value = model.graph.inputs[0] if which == "x" else model.graph.initializers["w"]
    made = Casts(model.graph).cast(value, ir.DataType.FLOAT16)
    assert model.graph[0] is made.producer()
    check_graph(model)


def test_a_name_that_is_taken_is_lengthened():
    model = network()
    model.graph[1].name = "a/float16"
    model.graph.inputs[0].name = "a/bfloat16"
    casts = Casts(model.graph)
    value = model.graph[0].outputs[0]
    names = [casts.cast(value, dtype).name for dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)]
    assert names == ["a/float16_", "a/bfloat16_"]
    check_graph(model)
