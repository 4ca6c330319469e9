"""Put the sampler's step and guidance into the graph, so that one execution is one step.

The denoiser's contract before → after (K window slots, G guidance branches, B images):

    sample      [B, C, h, w]          window       [K, B, C, h, w] float32    the latent log's last K slots
    timestep    [B]                   coefficients [K, B]          float32    this step's row, per image
    <condition> [B, …]                timestep     [B]             float32
                                      scale        [B]             float32    latent → model input
                                      <condition>  [G, B, …]       float32
                                      guidance     [G, B]          float32
                                      rescale      [B]             float32    share of the guidance rescale; 0: none
    prediction  [B, C, h, w]          latent       [B, C, h, w]    float32    Σ_k coefficients[k] · window[k]
                                      prediction   [B, C, h, w]    float32    Σ_g guidance[g] · pred[g], rescaled

K and G are dynamic (`window`, `branches`); K = 1, G = 1 and ones are the plain denoiser. A VAE decoder gets the first
half: its latent becomes window and coefficients, and the latent that it decoded is an output too.

Inpainting (`mask=yes`) keeps a known picture where the mask is 0, in both: the latent is Σ_j known_coefficients[j] ·
known[j] there, of the clean latent and the first noise.

                                      mask               [B, 1, h, w]     float32    1: painted anew, 0: kept
                                      known              [2, B, C, h, w]  float32    clean latent, first noise
                                      known_coefficients [2, B]           float32    this step's

The guidance rescale gives the guided prediction of an image the deviation that its last branch has (Lin et al., "Common
Diffusion Noise Schedules and Sample Steps are Flawed", equations 14 to 16), by that share.

The sums are computed in float32 whatever the model computes in. As a matrix product one costs ONNX Runtime 13 µs at
64 by 64 latents with K = 3, B = 1 and 60 µs with K = 9, B = 4; as `Mul` and `ReduceSum` 64 and 1,100 µs, as `Einsum` 50
and 450 µs. A compiler that may compute float32 products in TF32 wants the form `reduce`, which loses no bits to that.
Slots that were never written must be zero, since 0 · NaN is NaN.
"""

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from trtdiff.errors import BuildError
from trtdiff.passes.tape import Tape
from trtdiff.types import Dim

if TYPE_CHECKING:
    import onnx_ir as ir

Sum: TypeAlias = Literal["matmul", "reduce"]
Mask: TypeAlias = Literal["no", "yes"]
WINDOW, BRANCHES = "window", "branches"
ROWS = "rows"
"""The model's own batch inside the graph: images times branches. Another name, since a runtime may take equal names for
equal sizes."""
TINY = 1e-30
"""Least variance that is divided by."""


def denoiser_prologue(model: "ir.Model", *, form: Sum = "matmul", mask: Mask = "no") -> None:
    """Give a denoiser the contract above.

    Requires inputs `sample`, `timestep` and conditions, all batch first, and one output `prediction`.
    Ensures the inputs window, coefficients, those of the mask, timestep, scale, conditions, guidance, rescale and the
    outputs latent, prediction.
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
    begins, latent = _latent(head, latent_dims, form, mask)
    times = _input("timestep", ("batch",))
    scale = _input("scale", ("batch",))
    guidance, rescale = _input("guidance", (BRANCHES, "batch")), _input("rescale", ("batch",))
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
    graph.inputs.extend([*begins, times, scale, *fed, guidance, rescale])

    tail = Tape()
    (rows,) = graph.outputs
    rows.name = "prediction.rows"
    rows = tail.in_float32(rows)
    branches = tail.op("Reshape", rows, tail.op("Concat", grid, tail.op("Shape", rows, start=1), axis=0))
    guided = _weighted_sum(tail, guidance, branches, form, _unnamed(latent_dims))
    prediction = _rescaled(tail, guided, branches, rescale, _output("prediction", latent_dims))
    tail.put_last(graph)
    graph.outputs.clear()
    graph.outputs.extend([latent, prediction])


def decoder_prologue(model: "ir.Model", *, form: Sum = "matmul", mask: Mask = "no") -> None:
    """Let a VAE decoder apply the sampler's last row itself.

    Requires an input `latent`, batch first. Ensures the inputs window and coefficients and those of the mask, and one
    more output, `latent`.
    """
    graph = model.graph
    _require(graph, "latent", outputs=())
    inputs = {value.name: value for value in graph.inputs}
    inner = inputs.pop("latent")
    graph.inputs.clear()
    head = Tape()
    begins, latent = _latent(head, _dims(inner)[1:], form, mask)
    _feed(head, inner, latent)
    head.put_first(graph)
    graph.inputs.extend([*begins, *inputs.values()])
    graph.outputs.append(latent)


# --- the pieces ------------------------------------------------------------------------------------------------------


def _latent(tape: Tape, dims: tuple[Dim, ...], form: Sum, mask: Mask) -> tuple[list["ir.Value"], "ir.Value"]:
    """Give the inputs that the latent is computed from, and the latent."""
    import onnx_ir as ir

    window, coefficients = _input("window", (WINDOW, "batch", *dims)), _input("coefficients", (WINDOW, "batch"))
    latent = _output("latent", dims)
    if mask == "no":
        return [window, coefficients], _weighted_sum(tape, coefficients, window, form, latent)
    where = _input("mask", ("batch", 1, *dims[1:]))
    known, share = _input("known", (2, "batch", *dims)), _input("known_coefficients", (2, "batch"))
    stepped = _weighted_sum(tape, coefficients, window, form, _unnamed(dims))
    kept = _weighted_sum(tape, share, known, form, _unnamed(dims))
    painted = tape.op("Cast", where, to=int(ir.DataType.BOOL))
    return [window, coefficients, where, known, share], tape.op("Where", painted, stepped, kept, output=latent)


def _rescaled(
    tape: Tape, guided: "ir.Value", branches: "ir.Value", share: "ir.Value", output: "ir.Value"
) -> "ir.Value":
    """Give `guided` [B, …] the deviation of the last of `branches` [G, B, …], by a share [B]; 0 changes no bit."""
    rank = len(output.shape or ())
    axes = tape.ints(*range(1, rank))
    last = tape.op("Gather", branches, tape.constant(np.array(-1)), axis=0)
    ratio = tape.op(
        "Div", _variance(tape, last, axes), tape.op("Max", _variance(tape, guided, axes), tape.number(TINY))
    )
    excess = tape.op("Sub", tape.op("Sqrt", ratio), tape.number(1))
    factor = tape.op("Add", tape.op("Mul", tape.op("Unsqueeze", share, axes), excess), tape.number(1))
    return tape.op("Mul", guided, factor, output=output)


def _variance(tape: Tape, values: "ir.Value", axes: "ir.Value") -> "ir.Value":
    centred = tape.op("Sub", values, tape.op("ReduceMean", values, axes))
    return tape.op("ReduceMean", tape.op("Mul", centred, centred), axes)


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


def _unnamed(dims: tuple[Dim, ...]) -> "ir.Value":
    import onnx_ir as ir

    return ir.Value(shape=ir.Shape(("batch", *dims)), type=ir.TensorType(ir.DataType.FLOAT))


def _output(name: str, dims: tuple[Dim, ...]) -> "ir.Value":
    return _input(name, ("batch", *dims))
