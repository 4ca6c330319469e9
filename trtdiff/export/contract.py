"""The I/O contract, verified on the file as it was written: what a compiler will see, not what was meant.

Checked: ONNX's own rules; operator set; names, types and dimensions of inputs and outputs; that no operator is of a
domain of its own; that every weight is a reference to bytes that are there, inside the folder; that nothing large is
embedded; that every node names its PyTorch module; that no text in the file names this machine.
"""

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from trtdiff.errors import ExportError
from trtdiff.export.graph import MODULE
from trtdiff.export.trace import OPSET
from trtdiff.families.base import ComponentSpec
from trtdiff.types import TensorSpec, names

if TYPE_CHECKING:
    import onnx

LARGEST_EMBEDDED = 65_536
"""Bytes of one constant inside the file."""


def verify_graph(path: Path, spec: ComponentSpec) -> None:
    """Raise ExportError naming what breaks the contract and where in the graph."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    where = f"{path.name}"
    _verify_opset(model, where)
    for kind, values, tensors in (
        ("input", model.graph.input, spec.inputs),
        ("output", model.graph.output, spec.outputs),
    ):
        _verify_ends(kind, list(values), tensors, where)
    _verify_initializers(model, path.parent, where)
    _verify_nodes(model, where)
    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        raise ExportError(f"ONNX's checker refuses the graph: {str(error).splitlines()[0]}", where=where) from None


def _verify_opset(model: "onnx.ModelProto", where: str) -> None:
    found = {entry.domain: entry.version for entry in model.opset_import}
    if found != {"": OPSET}:
        raise ExportError(f"operator sets are {found}, the contract is {OPSET} of ONNX alone", where=where)
    if model.functions:
        raise ExportError(f"functions are left: {names(f.name for f in model.functions)}", where=where)


def _verify_ends(kind: str, values: "list[onnx.ValueInfoProto]", tensors: tuple[TensorSpec, ...], where: str) -> None:
    found, wanted = [value.name for value in values], [tensor.name for tensor in tensors]
    if found != wanted:
        raise ExportError(f"{kind}s are {', '.join(found)}, the contract is {', '.join(wanted)}", where=where)
    for value, tensor in zip(values, tensors, strict=True):
        got = _spec_of(value)
        if got != tensor:
            raise ExportError(f"{kind} is {got}, the contract is {tensor}", where=f"{where}, {kind} {tensor.name}")


def _spec_of(value: "onnx.ValueInfoProto") -> TensorSpec:
    import onnx

    kind = value.type.tensor_type
    dims = tuple(dim.dim_param or int(dim.dim_value) for dim in kind.shape.dim)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).name if kind.elem_type else "unknown"
    return TensorSpec(value.name, dtype, dims)


def _verify_initializers(model: "onnx.ModelProto", folder: Path, where: str) -> None:
    import onnx

    for tensor in model.graph.initializer:
        here = f"{where}, initializer {tensor.name}"
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            if tensor.ByteSize() > LARGEST_EMBEDDED:
                raise ExportError(f"{tensor.ByteSize()} bytes are embedded in the graph", where=here)
            continue
        entry = {item.key: item.value for item in tensor.external_data}
        location = PurePosixPath(entry["location"])
        file = folder / location
        if location.is_absolute() or ".." in location.parts or not file.is_file() or file.is_symlink():
            raise ExportError(f"refers to {location}, which is no file inside of the export folder", where=here)
        end = int(entry["offset"]) + int(entry["length"])
        if end > file.stat().st_size:
            raise ExportError(f"refers to byte {end} of {location}, which has {file.stat().st_size}", where=here)


def _verify_nodes(model: "onnx.ModelProto", where: str) -> None:
    for node in model.graph.node:
        keys = [item.key for item in node.metadata_props]
        if keys != [MODULE] or node.doc_string:
            raise ExportError(f"metadata is {', '.join(keys) or 'missing'}", where=f"{where}, node {node.name}")
    if model.doc_string or model.graph.doc_string or model.metadata_props:
        raise ExportError("the file carries notes that are not ours", where=where)
