"""Put the sampler's step and guidance into the graph, so that one execution is one step.

The denoiser's contract before → after (K window slots, G guidance branches, B images):

    sample      [B, C, h, w]          window       [K, B, C, h, w] float32    the latent log's last K slots
    timestep    [B]                   coefficients [K, B]          float32    this step's row, per image
    <condition> [B, …]                timestep     [B]             float32
                                      scale        [B]             float32    latent → model input
                                      <condition>  [G, B, …]       float32
                                      guidance     [G, B]          float32
    prediction  [B, C, h, w]          latent       [B, C, h, w]    float32    Σ_k coefficients[k] · window[k]
                                      prediction   [B, C, h, w]    float32    Σ_g guidance[g] · pred[g]

K and G are dynamic (`window`, `branches`); K = 1, G = 1 and ones are the plain denoiser. A VAE decoder gets the first
half: its latent becomes window and coefficients, and the latent that it decoded is an output too.

The sums are computed in float32 whatever the model computes in. As a matrix product one costs ONNX Runtime 13 µs at
64 by 64 latents with K = 3, B = 1 and 60 µs with K = 9, B = 4; as `Mul` and `ReduceSum` 64 and 1,100 µs, as `Einsum` 50
and 450 µs. A compiler that may compute float32 products in TF32 wants the form `reduce`, which loses no bits to that.
Slots that were never written must be zero, since 0 · NaN is NaN.
"""

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from trtdiff.errors import BuildError
from trtdiff.passes.tape import Tape
from trtdiff.types import Dim

if TYPE_CHECKING:
    import onnx_ir as ir

Sum: TypeAlias = Literal["matmul", "reduce"]
WINDOW, BRANCHES = "window", "branches"
ROWS = "rows"
"""The model's own batch inside the graph: images times branches. Another name, since a runtime may take equal names for
equal sizes."""


def denoiser_prologue(model: "ir.Model", *, form: Sum = "matmul") -> None:
    """Give a denoiser the contract above.

    Requires inputs `sample`, `timestep` and conditions, all batch first, and one output `prediction`.
    Ensures the inputs window, coefficients, timestep, scale, conditions, guidance and the outputs latent, prediction.
    """
    graph = model.graph
    _require(graph, "sample", "timestep", outputs=("prediction",))
    _rename_batch(model)
    values = {value.name: value for value in graph.inputs}
    sample, timestep = values.pop("sample"), values.pop("timestep")
    conditions = list(values.values())
    graph.inputs.clear()

    head = Tape()
    latent_dims = _dims(sample)[1:]
    window, coefficients, latent = _window(head, latent_dims, form)
    times = _input("timestep", ("batch",))
    scale = _input("scale", ("batch",))
    guidance = _input("guidance", (BRANCHES, "batch"))
    grid = head.op("Shape", guidance)  # [G, B]

    axes = head.ints(*range(2, 2 + len(latent_dims)))
    factor = head.op("Unsqueeze", head.op("Expand", scale, grid), axes)  # [G, B, 1, …]: the product repeats the latent
    _feed(head, sample, _rows(head, head.op("Mul", latent, factor)))
    _feed(head, timestep, head.op("Reshape", head.op("Expand", times, grid), head.ints(-1)))
    fed = []
    for condition in conditions:
        given = _input(str(condition.name), (BRANCHES, "batch", *_dims(condition)[1:]))
        fed.append(given)
        _feed(head, condition, _rows(head, given))
    head.put_first(graph)
    graph.inputs.extend([window, coefficients, times, scale, *fed, guidance])

    tail = Tape()
    (rows,) = graph.outputs
    rows.name = "prediction.rows"
    rows = tail.in_float32(rows)
    branches = tail.op("Reshape", rows, tail.op("Concat", grid, tail.op("Shape", rows, start=1), axis=0))
    prediction = _weighted_sum(tail, guidance, branches, form, _output("prediction", latent_dims))
    tail.put_last(graph)
    graph.outputs.clear()
    graph.outputs.extend([latent, prediction])


def decoder_prologue(model: "ir.Model", *, form: Sum = "matmul") -> None:
    """Let a VAE decoder apply the sampler's last row itself.

    Requires an input `latent`, batch first. Ensures the inputs window and coefficients, and one more output, `latent`.
    """
    graph = model.graph
    _require(graph, "latent", outputs=())
    inputs = {value.name: value for value in graph.inputs}
    inner = inputs.pop("latent")
    graph.inputs.clear()
    head = Tape()
    window, coefficients, latent = _window(head, _dims(inner)[1:], form)
    _feed(head, inner, latent)
    head.put_first(graph)
    graph.inputs.extend([window, coefficients, *inputs.values()])
    graph.outputs.append(latent)


# --- the pieces ------------------------------------------------------------------------------------------------------


def _window(tape: Tape, dims: tuple[Dim, ...], form: Sum) -> tuple["ir.Value", "ir.Value", "ir.Value"]:
    window = _input("window", (WINDOW, "batch", *dims))
    coefficients = _input("coefficients", (WINDOW, "batch"))
    return window, coefficients, _weighted_sum(tape, coefficients, window, form, _output("latent", dims))


def _weighted_sum(tape: Tape, weights: "ir.Value", values: "ir.Value", form: Sum, output: "ir.Value") -> "ir.Value":
    """Σ_k weights[k, b] · values[k, b, …] → [B, …]."""
    if form == "reduce":
        rank = len(output.shape or ()) + 1
        weighted = tape.op("Mul", values, tape.op("Unsqueeze", weights, tape.ints(*range(2, rank))))
        return tape.op("ReduceSum", weighted, tape.ints(0), output=output, keepdims=0)
    flat = tape.op("Reshape", values, tape.ints(0, 0, -1))  # [K, B, N]
    columns = tape.op("Transpose", flat, perm=[1, 0, 2])  # [B, K, N]; with one image or one slot, the same memory
    rows = tape.op("Unsqueeze", tape.op("Transpose", weights, perm=[1, 0]), tape.ints(1))  # [B, 1, K]
    return tape.op("Reshape", tape.op("MatMul", rows, columns), tape.op("Shape", values, start=1), output=output)


def _rows(tape: Tape, value: "ir.Value") -> "ir.Value":
    """[G, B, …] → [G · B, …]."""
    return tape.op("Reshape", value, tape.op("Concat", tape.ints(-1), tape.op("Shape", value, start=2), axis=0))


def _feed(tape: Tape, inner: "ir.Value", given: "ir.Value") -> None:
    """Let what used to be an input be computed: `given`, in the type the model takes."""
    import onnx_ir as ir

    if inner.dtype not in {None, ir.DataType.FLOAT}:
        given = tape.op("Cast", given, to=int(inner.dtype))
    ir.convenience.replace_all_uses_with(inner, given)


def _require(graph: "ir.Graph", *inputs: str, outputs: tuple[str, ...]) -> None:
    found = [value.name for value in graph.inputs]
    if missing := [name for name in inputs if name not in found]:
        raise BuildError(f"the graph has no input {', '.join(missing)}", where=f"graph {graph.name}",
                         hint=f"it has {', '.join(map(str, found))}")  # fmt: skip
    ends = tuple(value.name for value in graph.outputs)
    if outputs and ends != outputs:
        raise BuildError(f"the graph's outputs are {ends}, not {outputs}", where=f"graph {graph.name}")


def _rename_batch(model: "ir.Model") -> None:
    """`batch` inside the model counts rows from now on, in every shape that says so."""
    import onnx_ir as ir

    word = re.compile(r"\bbatch\b")
    values = [*model.graph.inputs, *(value for node in model.graph.all_nodes() for value in node.outputs)]
    for value in values:
        if value.shape is not None:
            dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
            value.shape = ir.Shape([word.sub(ROWS, dim) if isinstance(dim, str) else dim for dim in dims])


def _dims(value: "ir.Value") -> tuple[Dim, ...]:
    return tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape or ())


def _input(name: str, dims: tuple[Dim, ...]) -> "ir.Value":
    import onnx_ir as ir

    return ir.Input(name, shape=ir.Shape(dims), type=ir.TensorType(ir.DataType.FLOAT))


def _output(name: str, dims: tuple[Dim, ...]) -> "ir.Value":
    return _input(name, ("batch", *dims))
