"""Which nodes stay in float32: by name, by what was measured, for waves, and because they lie between."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdiff.calibrate.ranges import ValueRange
from trtdiff.errors import BuildError
from trtdiff.passes.half_precision import half_precision
from trtdiff.passes.half_types import KEEP, LIMITS
from trtdiff.passes.mark_islands import mark_islands
from trtdiff.passes.movers import MOVERS
from trtdiff.passes.round_values import round_values

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")

BIG = ValueRange(1e5, 30.0)
PLAIN = ValueRange(20.0, 1.0)


def make(body, inputs="float[n, 4] x", outputs="float[n, 4] y", **modules):
    """A float32 model from ONNX text; each node has the name of its first output, and the module given for that."""
    model = ir.from_onnx_text(f'<ir_version: 11, opset_import: ["": 23]>\nnet ({inputs}) => ({outputs}) {{ {body} }}')
    for node in model.graph:
        node.name = node.outputs[0].name
        node.metadata_props["module"] = modules.get(node.name, "")
        for value in node.outputs:
            if value.dtype is None:
                value.dtype = ir.DataType.FLOAT
    return model


def mark(model, *, dtype="float16", patterns=(), **ranges):
    """The names of the nodes that stay, and the summary."""
    found = mark_islands(model, dtype=dtype, patterns=dict.fromkeys(patterns, "asked for"), ranges=ranges)
    return {node.name for node in model.graph if KEEP in node.metadata_props}, found


# --- what a type can hold ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "numpy_type"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)])
def test_the_limits_are_those_of_the_types(dtype, numpy_type):
    facts = ml_dtypes.finfo(numpy_type)
    limits = LIMITS[dtype]
    assert (limits.largest, limits.step) == (float(facts.max), float(facts.smallest_subnormal))
    assert limits.roundoff == float(facts.eps) / 2


def test_at_the_least_rms_rounding_costs_as_much_as_the_type_s_largest_relative_error():
    """Measured by rounding a million normal numbers; ten times smaller ones lose ten times as much."""
    least = LIMITS["float16"].least_rms
    for factor in (1.0, 0.1):
        exact = np.random.default_rng(0).standard_normal(1_000_000) * least * factor
        error = np.sqrt(np.mean((exact.astype(np.float16).astype(np.float64) - exact) ** 2)) / (least * factor)
        np.testing.assert_allclose(error, 2.0**-11 / factor, rtol=1e-2)


@pytest.mark.parametrize(
    ("dtype", "amax", "rms", "stays"),
    [
        ("float16", 32752.0, 100.0, False),  # twice that is 65,504
        ("float16", 32753.0, 100.0, True),
        ("float16", 1e-3, 3.6e-5, False),
        ("float16", 1e-3, 3.4e-5, True),
        ("float16", 0.0, 0.0, False),
        ("float16", np.inf, np.inf, False),  # a mask
        ("bfloat16", 1e30, 1e5, False),
        ("bfloat16", 1e-9, 1e-10, False),
        ("bfloat16", 3e38, 1e5, True),
    ],
)
def test_a_value_that_the_type_cannot_hold_keeps_its_maker_and_its_readers(dtype, amax, rms, stays):
    model = make("a = MatMul (x, x)  b = MatMul (a, a)  c = MatMul (b, b)  d = Tanh (b)  y = MatMul (d, c)")
    nodes, found = mark(model, dtype=dtype, b=ValueRange(amax, rms), x=PLAIN, a=PLAIN, c=PLAIN, d=PLAIN)
    assert nodes == ({"b", "c", "d"} if stays else set())
    assert list(found) == (["b"] if stays else [])


def test_the_reason_names_value_figure_and_limit():
    model = make("a = MatMul (x, x)  y = Tanh (a)")
    _, found = mark(model, a=ValueRange(1.3e5, 9.0))
    assert found == {"a": "reaches 1.3e+05; float16 ends at 65504 (2 nodes)"}
    assert {node.metadata_props[KEEP] for node in model.graph} == {"a reaches 1.3e+05; float16 ends at 65504"}
    _, found = mark(make("a = MatMul (x, x)  y = Tanh (a)"), a=ValueRange(1e-3, 1e-6))
    assert found == {"a": "is about 1.0e-06 (rms); below 3.5e-05 float16 loses bits (2 nodes)"}


def test_movers_hand_the_flag_on_until_a_measurement_says_otherwise():
    body = """a = MatMul (x, x)  t = Transpose (a)  u = Unsqueeze (t, axis)  s, r = Split <num_outputs = 2> (u)
              m = MatMul (s, s)  k = Squeeze (r, axis)  y = Tanh (k)"""
    inputs = "float[n, n] x, int64[1] axis"
    assert mark(make(body, inputs), a=BIG)[0] == {"a", "t", "u", "s", "m", "k", "y"}
    assert mark(make(body, inputs), a=BIG, s=PLAIN)[0] == {"a", "t", "u", "s", "k", "y"}
    assert mark(make(body, inputs), a=BIG, u=PLAIN, t=PLAIN)[0] == {"a", "t"}


def test_the_flag_goes_back_to_what_was_moved():
    model = make("a = MatMul (x, x)  b = MatMul (x, x)  t = Transpose (a)  j = Concat <axis = 0> (t, b)  y = Tanh (j)")
    assert mark(model, j=BIG, b=PLAIN)[0] == {"a", "t", "j", "y"}


def test_each_sum_of_a_residual_stream_is_judged_by_its_own_range():
    body = "a = MatMul (x, x)  b = Add (x, a)  c = MatMul (b, b)  d = Add (b, c)  e = MatMul (d, d)  y = Add (d, e)"
    assert mark(make(body), b=BIG, d=PLAIN)[0] == {"b", "c", "d"}  # b's readers; e, which reads d, does not stay


# --- constants and weights --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "dtype", "stays"),
    [
        (1e-8, "float16", True),
        (2.0**-25, "float16", True),  # half of the smallest number: to even, and that is 0
        (np.nextafter(np.float32(2.0**-25), np.float32(1)), "float16", False),
        (1e-5, "float16", False),
        (0.0, "float16", False),
        (1e-8, "bfloat16", False),
    ],
)
@pytest.mark.parametrize("how", ["node", "initializer"])
def test_a_constant_that_rounding_makes_zero_is_read_in_float32_and_so_is_what_is_made_of_it(number, dtype, stays, how):
    model = make("c = Constant <value = float {1}> ()  q = Mul (x, x)  a = Add (q, c)  r = Sqrt (a)  y = Div (x, r)")
    assert (np.float32(number).astype({"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]) == 0) == (
        stays or number == 0
    )
    array = ir.tensor(np.float32(number), name="c")
    constant = model.graph[0]
    constant.attributes["value"] = ir.AttrTensor("value", array)
    if how == "initializer":
        value = ir.Value(name="c0", shape=ir.Shape([]), type=ir.TensorType(ir.DataType.FLOAT), const_value=array)
        model.graph.register_initializer(value)
        ir.convenience.replace_all_uses_with(constant.outputs[0], value)
        model.graph.remove(constant, safe=True)
    nodes, found = mark(model, dtype=dtype, a=PLAIN, q=PLAIN, r=PLAIN)
    assert nodes - {"c"} == ({"a", "r"} if stays else set())
    if stays:
        ((_, words),) = found.items()
        assert f"holds {number:.2g}, which float16 makes 0" in words


def test_a_divisor_that_an_epsilon_keeps_from_zero_stays_above_it():
    import onnxruntime as ort

    model = make("c = Constant <value = float {1e-8}> ()  q = Mul (x, x)  a = Add (q, c)  r = Sqrt (a)  y = Div (x, r)")
    mark(model)
    half_precision(model)
    round_values(model)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"x": np.array([[0, 3, -2, 0.05]], np.float32)})
    np.testing.assert_allclose(got, [[0, 1, -1, 1]], rtol=2**-9)


def with_weight(folder, body, array):
    """A model whose weight `w` lies in a file, in float32."""
    model = make(body, "float[n, 64] x", "float[n, 64] y")
    folder.mkdir(exist_ok=True)
    (folder / "w.bin").write_bytes(array.tobytes())
    (value,) = {value for node in model.graph for value in node.inputs if value.name == "w"}
    value.const_value = ir.ExternalTensor(
        "w.bin", 0, array.nbytes, ir.DataType.FLOAT, shape=ir.Shape(array.shape), name="w", base_dir=folder
    )
    value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(array.shape)
    model.graph.register_initializer(value)
    return model


@pytest.mark.parametrize(
    ("body", "rms", "stays"),
    [
        ("t = Transpose (w)  y = MatMul (x, t)", 3.3e-5, {"t", "y"}),
        ("t = Transpose (w)  y = MatMul (x, t)", 3.7e-5, set()),
        ("t = Tanh (x)  y = MatMul (t, w)", 1e-9, {"y"}),
        ("t = MatMul (x, x)  y = Add (t, w)", 1e-9, set()),
        ("t = Tanh (x)  y = MatMul (t, w)", 0.0, set()),
    ],
)
def test_a_weight_that_is_lost_as_a_whole_is_read_in_float32(tmp_path, body, rms, stays):
    """The limit is 3.5e-5; single elements may vanish, and what is only added may be small."""
    weight = np.random.default_rng(0).standard_normal((64, 64))
    weight *= rms / np.sqrt(np.mean(weight**2))
    nodes, found = mark(with_weight(tmp_path, body, weight.astype(np.float32)))
    assert nodes == stays
    assert list(found) == (["w"] if stays else [])


def test_a_weight_with_one_large_number_at_its_end_is_not_lost(tmp_path):
    weight = np.full((512, 64), 1e-9, np.float32)
    weight[-1, -1] = 1.0  # a root mean square of 5.5e-3
    assert mark(with_weight(tmp_path, "t = Tanh (x)  y = MatMul (t, w)", weight))[0] == set()


# --- by name, and waves -----------------------------------------------------------------------------------------------


def test_modules_are_named_by_pattern_and_a_pattern_that_matches_nothing_shows_near_names():
    model = make("a = MatMul (x, x)  y = MatMul (a, a)", a="mid_block.attentions.0", y="up_blocks.1")
    assert mark(model, patterns=["mid_block.*"]) == ({"a"}, {"mid_block.*": "asked for (1 node)"})
    with pytest.raises(BuildError, match=r"no module matches mid_blok\.attentions\.\*") as caught:
        mark(model, patterns=["mid_blok.attentions.*"])
    assert "mid_block.attentions.0" in caught.value.hint


def test_sines_and_cosines_stay_with_what_leads_to_them():
    body = "a = Mul (t, f)  s = Sin (a)  m = MatMul (x, x)  y = Add (m, s)"
    nodes, found = mark(make(body, "float[n, 4] x, float t, float[n, 4] f", s="time_proj"), dtype="bfloat16")
    assert nodes == {"a", "s"}
    assert list(found) == ["time_proj"]


def test_ranges_of_another_graph_and_ranges_that_are_no_numbers_are_errors():
    model = make("hidden_states = MatMul (x, x)  y = Tanh (hidden_states)")
    with pytest.raises(BuildError, match="the ranges name hidden_state, which") as caught:
        mark(model, hidden_state=PLAIN)
    assert "near it is hidden_states" in caught.value.hint
    with pytest.raises(BuildError, match="NaN already in float32") as caught:
        mark(model, hidden_states=ValueRange(np.nan, np.nan))
    assert "value hidden_states" in caught.value.where


# --- what lies between ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "stays"),
    [
        ("b = Transpose (a)  c = Identity (b)", True),
        ("b = Concat <axis = 0> (x, a)  c = Identity (b)", True),  # x is float32 and comes from outside
        ("m = MatMul (x, x)  b = Concat <axis = 0> (m, a)  c = Identity (b)", True),  # m is cast up, and loses nothing
        ("b = Tanh (a)  c = Add (b, a)", True),
        ("b = Tanh (a)  m = MatMul (x, x)  c = Add (b, m)", False),  # m is a product in half precision
        ("b = MatMul (a, a)  c = Identity (b)", False),
        ("b = Tanh (a)  c = Identity (b)  m = MatMul (b, b)", False),  # m reads b in half precision
        ("b = Identity (a)  c = Identity (b)  m = MatMul (b, b)", True),
    ],
)
def test_nodes_between_islands_join_them(between, stays):
    body = f"a = MatMul (x, x)  {between}  y = MatMul (c, c)"
    nodes, _ = mark(make(body, a="island", y="island"), patterns=["island"])
    assert nodes - {"a", "y"} == ({"b", "c"} if stays else set())


def test_what_only_passes_through_stays_float32():
    nodes, found = mark(make("t = Transpose (x)  y = Transpose (t)  z = MatMul (x, x)", outputs="float[n, 4] y"))
    assert nodes == {"t", "y"}
    assert list(found) == ["t", "y"]


def half_between(model):
    """Values that go from float32 to half and back without a computation in half between."""
    full, wasted = ir.DataType.FLOAT, []
    for cast in model.graph:
        if cast.op_type != "Cast" or cast.outputs[0].dtype != full or cast.inputs[0].is_initializer():
            continue
        waiting = [cast.inputs[0]]
        while waiting:
            node = waiting.pop().producer()
            if node is None:
                continue
            if node.op_type == "Cast" and node.inputs[0].dtype == full:
                wasted.append(cast.inputs[0].name)
            elif node.op_type in MOVERS:
                first, end = MOVERS[node.op_type]
                waiting += node.inputs[first:end]
    return wasted


OPERATORS = {
    "MatMul": 2, "Add": 2, "Mul": 2, "Tanh": 1, "Softmax": 1, "Transpose": 1, "Identity": 1, "Concat": 2, "Where": 2,
}  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_value_is_narrowed_and_widened_without_a_computation_between(data):
    """Random graphs with random islands; what is left in half precision has a reason to be there."""
    names, lines, modules = ["x", "w"], [], {}
    for number in range(data.draw(st.integers(1, 14))):
        operator = data.draw(st.sampled_from(sorted(OPERATORS)))
        inputs = [data.draw(st.sampled_from(names)) for _ in range(OPERATORS[operator])]
        call = {"Concat": "Concat <axis = 0>", "Transpose": "Transpose <perm = [1, 0]>"}.get(operator, operator)
        condition = ["which"] if operator == "Where" else []
        lines.append(f"v{number} = {call} ({', '.join(condition + inputs)})")
        names.append(f"v{number}")
        modules[f"v{number}"] = data.draw(st.sampled_from(["island", "", ""]))
    ends = data.draw(st.lists(st.sampled_from(names[2:]), min_size=1, unique=True))
    outputs = ", ".join(f"float[k, l] {name}" for name in ends)
    model = make("  ".join(lines), "float[a, b] x, float[c, d] w, bool[e, f] which", outputs, **modules)
    mark(model, patterns=["island"] if "island" in modules.values() else [])
    kept = {node.name for node in model.graph if KEEP in node.metadata_props}
    half_precision(model)
    assert half_between(model) == []
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    for node in model.graph:  # and an island computes in float32 alone
        if node.name in kept:
            kinds = {value.dtype for value in (*node.inputs, *node.outputs)} - {ir.DataType.BOOL}
            assert kinds == {ir.DataType.FLOAT}


def test_a_weight_of_an_island_is_read_as_it_is_stored():
    """In float32 through its transpose, where a half reader beside it gets it rounded."""
    model = make("t = Transpose (w)  a = MatMul (x, t)  y = MatMul (a, w)", "float[4, 4] x", a="island")
    weight = ir.tensor(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), name="w")
    value = model.graph[0].inputs[0]
    value.const_value, value.dtype, value.shape = weight, ir.DataType.FLOAT, ir.Shape([4, 4])
    model.graph.register_initializer(value)
    nodes, _ = mark(model, patterns=["island"])
    assert nodes == {"t", "a"}
    half_precision(model)
    stored = {name: value.dtype for name, value in model.graph.initializers.items()}
    assert stored == {"w": ir.DataType.FLOAT, "w.float16": ir.DataType.FLOAT16}
