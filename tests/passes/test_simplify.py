"""Every rule of the passes that exported graphs go through: what they change, and that the values stay."""

import numpy as np
import pytest

from trtdiff.errors import ExportError
from trtdiff.passes.base import run_passes
from trtdiff.passes.drop_neutral import drop_neutral
from trtdiff.passes.drop_noops import drop_noops
from trtdiff.passes.fold_constants import EVALUATE, fold_constants
from trtdiff.passes.gather_constants import gather_constants
from trtdiff.passes.merge_equal import merge_equal
from trtdiff.passes.remove_unused import remove_unused
from trtdiff.passes.simplify import simplify
from trtdiff.passes.straighten_shapes import straighten_shapes

ir = pytest.importorskip("onnx_ir")
ONE_SIZE = """s = Shape <start = 0, end = 1> (x) q = Squeeze (s) r = Reshape (q, m) c = Concat <axis = 0> (r, o, o)
              y = Expand (x, c)"""
TWO_SIZES = """s = Shape <start = 0, end = 2> (x) q = Squeeze (s) r = Reshape (q, m) c = Concat <axis = 0> (r, o)
               y = Expand (x, c)"""
X = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)


def graph(body, *, ends="float[B, 3, W] x", outputs="float[B, 3, W] y", values=""):
    values = f"<{values}>" if values else ""
    return ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 23]>\ng ({ends}) => ({outputs}) {values}\n{{ {body} }}'
    )


def run(model, feed=X):
    import onnx
    from onnx.reference import ReferenceEvaluator

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return ReferenceEvaluator(proto).run(None, {model.graph.inputs[0].name: feed})


def kinds(model):
    return [node.op_type for node in model.graph]


def same_values(before, after):
    return all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("body", "values", "left"),
    [
        ("a = Identity (x) y = Relu (a)", "", ["Relu"]),
        ("a = Relu (x) y = Identity (a)", "", ["Relu"]),
        ("y = Identity (x)", "", ["Identity"]),
        ("a = Concat <axis = 0> (x) y = Relu (a)", "", ["Relu"]),
        ("a = Dropout (x) y = Relu (a)", "", ["Relu"]),
        ("a = Cast <to = 1> (x) y = Relu (a)", "", ["Relu"]),
        ("a = Cast <to = 11> (x) b = Cast <to = 1> (a) y = Relu (b)", "", ["Cast", "Cast", "Relu"]),
        ("a = Transpose <perm = [0, 1, 2]> (x) y = Relu (a)", "", ["Relu"]),
        ("a = Transpose <perm = [1, 0, 2]> (x) b = Transpose <perm = [1, 0, 2]> (a) y = Relu (b)", "",
         ["Transpose", "Transpose", "Relu"]),
        ("a = Slice (x, zero, end, one, one) y = Relu (a)",
         "int64[1] zero = {0}, int64[1] end = {9223372036854775807}, int64[1] one = {1}", ["Relu"]),
        ("a = Slice (x, zero, end, one, step) y = Relu (a)",
         "int64[1] zero = {0}, int64[1] end = {9223372036854775807}, int64[1] one = {1}, int64[1] step = {2}",
         ["Slice", "Relu"]),
        ("a = Reshape (x, same) y = Relu (a)", "int64[3] same = {0, 0, 0}, float[B, 3, W] a", ["Relu"]),
        ("a = Reshape (x, same) y = Relu (a)", "int64[3] same = {0, 0, -1}, float[B, 3, V] a", ["Reshape", "Relu"]),
    ],
)  # fmt: skip
def test_drop_noops(body, values, left):
    model = graph(body, values=values) if "step" not in values else graph(
        body, values=values, outputs="float[B, V, W] y"
    )  # fmt: skip
    before = run(model)
    dropped = drop_noops(model)
    assert kinds(model) == left
    assert (dropped > 0) == (len(left) == 1 and left != ["Identity"])
    assert same_values(before, run(model))
    assert [value.name for value in model.graph.outputs] == ["y"]


@pytest.mark.parametrize(
    ("operation", "constant", "gone"),
    [
        ("Mul (x, c)", "float c = {1}", True),
        ("Mul (c, x)", "float[1] c = {1}", True),
        ("Div (x, c)", "float c = {1}", True),
        ("Div (c, x)", "float c = {1}", False),
        ("Add (x, c)", "float c = {0}", True),
        ("Sub (x, c)", "float c = {0}", True),
        ("Sub (c, x)", "float c = {0}", False),
        ("Add (x, c)", "float c = {1}", False),
        ("Mul (x, c)", "float[1, 1, 1, 1] c = {1}", False),  # would take a dimension away
    ],
)
def test_drop_neutral(operation, constant, gone):
    rank = "[1, B, 3, W]" if "1, 1, 1" in constant else "[B, 3, W]"
    model = graph(f"a = {operation} y = Relu (a)", values=constant, outputs=f"float{rank} y")
    before = run(model)
    assert drop_neutral(model) == gone
    assert kinds(model) == (["Relu"] if gone else [operation[:3], "Relu"])
    assert same_values(before, run(model))


def test_gather_constants_keeps_each_value_once():
    model = graph(
        "a = Constant <value_ints = [1, 1, 1]> () b = Constant <value = int64[3] {1, 1, 1}> ()"
        " c = Tile (x, a) d = Tile (c, b) e = Tile (d, f) y = Relu (e)",
        values="int64[3] f = {1, 1, 1}",
    )
    before = run(model)
    assert gather_constants(model) == 2
    assert len(model.graph.initializers) == 1
    assert "Constant" not in kinds(model)
    assert same_values(before, run(model))


def test_gather_constants_tells_types_and_shapes_apart():
    model = graph("b = Cast <to = 7> (two) c = Mul (b, one) y = Tile (x, c)",
                  values="int32[3] two = {1, 1, 1}, int64 one = {1}, int64[1] also = {1}")  # fmt: skip
    assert gather_constants(model) == 0


def test_fold_constants_computes_timestep_frequencies():
    """exp(-ln(10000) · k / 4), k = 0 … 3, as diffusers' sinusoids have them."""
    model = graph(
        "k = Range (zero, four, one) a = Mul (k, minus_log) b = Div (a, four) c = Exp (b) y = Mul (x, c)",
        values="float zero = {0}, float one = {1}, float four = {4}, float minus_log = {-9.2103404}",
    )
    assert fold_constants(model) == 4
    assert kinds(model) == ["Mul"]
    folded = next(value for value in model.graph.initializers.values() if value.name == "c")
    assert np.allclose(folded.const_value.numpy(), 10000.0 ** (-np.arange(4) / 4), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "values"),
    [
        ("s = Shape <start = 1, end = 2> (x) y = Tile (x, r) z = Identity (s)", "int64[3] r = {1, 1, 1}"),
        ("s = Shape (x) y = Relu (x)", ""),
        ("a = Concat <axis = 0> (n) b = Reshape (a, m) c = Squeeze (b, n) s = Unsqueeze (c, n) y = Expand (x, o)",
         "int64[1] m = {1}, int64[1] n = {0}, int64[3] o = {1, 1, 1}"),
        ("q = Div (m, n) y = Tile (x, q)", "int64[3] m = {-7, 7, 6}, int64[3] n = {-7, 5, 4}"),
    ],
)  # fmt: skip
def test_fold_constants_keeps_the_values(body, values):
    model = graph(body, values=values)
    before = run(model)
    fold_constants(model)
    remove_unused(model)
    assert same_values(before, run(model))
    assert not set(kinds(model)) & set(EVALUATE) - {"Mul"}


def test_division_of_integers_truncates_as_onnx_says():
    divide = EVALUATE["Div"]
    a, b = np.array([-7, 7, -8], np.int64), np.array([2, -2, 2], np.int64)
    assert divide([a, b], {}).tolist() == [-3, -3, -4]


def test_weights_are_neither_read_nor_folded(tmp_path):
    (tmp_path / "w.bin").write_bytes(np.ones(4, np.float32).tobytes())
    model = graph(
        "t = Mul (w, w) y = Mul (x, t)", ends="float[B, 3, 4] x", outputs="float[B, 3, 4] y", values="float[4] t"
    )
    weight = ir.ExternalTensor("w.bin", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path)
    for node in model.graph:
        for value in node.inputs:
            if value.name == "w":
                value.const_value = weight
                model.graph.register_initializer(value)
                break
    assert fold_constants(model) == gather_constants(model) == 0


def test_merge_equal_asks_once():
    model = graph("""a = Shape <start = 0, end = 1> (x) b = Shape <start = 0, end = 1> (x) c = Shape <start = 2> (x)
                     d = Concat <axis = 0> (a, b, c) e = ReduceProd <keepdims = 0> (d) f = Cast <to = 1> (e)
                     y = Mul (x, f)""")
    before = run(model)
    assert merge_equal(model) == 1
    assert kinds(model).count("Shape") == 2
    assert same_values(before, run(model))


def test_remove_unused_takes_optional_outputs_and_dead_nodes():
    model = graph(
        "a = Exp (x) v, i = TopK (x, k) y = Relu (x) b, m = Dropout (x) c = Sin (b)", values="int64[1] k = {1}"
    )
    assert remove_unused(model) == 5
    assert kinds(model) == ["Relu"]


@pytest.mark.parametrize(
    ("body", "values", "left"),
    [
        (ONE_SIZE, "int64[1] m = {-1}, int64[1] o = {1}", ["Shape", "Concat", "Expand"]),
        (TWO_SIZES, "int64[1] m = {-1}, int64[1] o = {1}", ["Shape", "Squeeze", "Reshape", "Concat", "Expand"]),
        ("a = CastLike (one, x) y = Mul (x, a)", "int64 one = {2}", ["Cast", "Mul"]),
        ("a = Transpose <perm = [1, 2, 0]> (x) y = Transpose <perm = [2, 0, 1]> (a)", "", ["Transpose", "Transpose"]),
        ("a = Transpose <perm = [1, 2, 0]> (x) b = Transpose <perm = [2, 0, 1]> (a) y = Relu (b)", "",
         ["Transpose", "Relu"]),
    ],
)  # fmt: skip
def test_straighten_shapes(body, values, left):
    model = graph(body, values=values)
    before = run(model)
    straighten_shapes(model)
    remove_unused(model)
    assert kinds(model) == left
    assert same_values(before, run(model))


def test_the_passes_reach_a_fixpoint():
    model = graph(
        """s = Shape <start = 1, end = 2> (x) q = Squeeze (s) r = Reshape (q, m) t = Identity (r)
           c = Concat <axis = 0> (o, t, o) e = Expand (x, c) k = Constant <value_float = 1.0> ()
           f = Div (e, k) y = Relu (f)""",
        values="int64[1] m = {-1}, int64[1] o = {1}, float[B, 3, W] e",
    )
    before = run(model)
    simplify(model)
    assert kinds(model) == ["Relu"]
    assert same_values(before, run(model))
    assert not any(simplify(model).values())


def test_a_failing_pass_is_named_with_those_before_it():
    def broken(model):
        raise ValueError("unknown form")

    with pytest.raises(ExportError, match="pass broken failed: unknown form") as caught:
        run_passes(graph("y = Relu (x)"), (drop_noops, broken))
    assert "after drop_noops" in caught.value.where
