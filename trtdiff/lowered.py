"""Read an exported graph, and write a lowered one: its ONNX file and, a tensor at a time, a file of its weights.

Runtimes map that file; its data begin at a page boundary. Where no pass touched any weight, the file is copied whole,
or only referred to where the graph is read once and forgotten.
Small tensors (shapes, axes, scalars) stay in the graph, where shape inference sees them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from trtdiff.digest import file_digest, remember
from trtdiff.errors import BuildError, MissingDependency
from trtdiff.files import copy_file

if TYPE_CHECKING:
    import onnx_ir as ir

GRAPH = "graph.onnx"
WEIGHTS = "weights.safetensors"
INLINE = 1024
"""Bytes up to which a tensor stays in the graph file."""
_PAGE = 4096
_WORTH_WHOLE = 0.95
"""Share of a weight file that must be in use for it to be copied whole (its sha256 is then known already)."""
_TYPES = {
    "FLOAT": "F32", "FLOAT16": "F16", "BFLOAT16": "BF16", "DOUBLE": "F64", "BOOL": "BOOL", "FLOAT8E4M3FN": "F8_E4M3",
    "FLOAT8E5M2": "F8_E5M2", "INT8": "I8", "INT16": "I16", "INT32": "I32", "INT64": "I64", "UINT8": "U8",
    "UINT16": "U16", "UINT32": "U32", "UINT64": "U64",
}  # fmt: skip


def read_graph(graph: Path) -> "ir.Model":
    """Read an exported graph; its weights stay where they are. Raises BuildError, MissingDependency."""
    try:
        import onnx_ir as ir
    except ImportError:
        raise MissingDependency("reading a graph needs onnx-ir", hint="pip install 'trtdiff[compile]'") from None
    try:
        return ir.load(graph)
    except Exception as error:  # protobuf and onnx-ir raise classes of their own for a damaged file
        raise BuildError(f"the graph cannot be read: {error}", where=str(graph), hint="export again") from error


def write_graph(
    model: "ir.Model", folder: Path, *, keep: bool = True, progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write `model` into the empty `folder`; afterwards its weights refer to the new file. Returns the ONNX file.

    What is not to `keep` is read once and forgotten: it is not synced to the disk, and weights that no pass touched are
    a symbolic link to where they lie. `progress(done, total)` counts bytes of weights.
    """
    import onnx_ir as ir

    values = []
    for value in model.graph.initializers.values():
        tensor = _tensor(value)
        if tensor.nbytes > INLINE:
            values.append(value)
        else:
            value.const_value = ir.Tensor(tensor.numpy().copy(), name=value.name, dtype=tensor.dtype)
    target = folder / WEIGHTS
    if values:
        offsets = _whole(values, target, keep=keep) or _write(values, target, keep=keep, progress=progress)
        for value in values:
            tensor = _tensor(value)
            value.const_value = ir.ExternalTensor(
                WEIGHTS, offsets[id(value)], tensor.nbytes, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()),
                name=str(value.name), base_dir=folder,
            )  # fmt: skip
    graph = folder / GRAPH
    ir.save(model, graph)
    return graph


def _write(
    values: list["ir.Value"], target: Path, *, keep: bool, progress: Callable[[int, int], None] | None
) -> dict[int, int]:
    header: dict[str, Any] = {}
    end = 0
    for value in values:
        tensor = _tensor(value)
        if tensor.dtype.name not in _TYPES:
            raise BuildError(f"weights of type {tensor.dtype.name} cannot be stored", where=f"weight {value.name}")
        span = [end, end + tensor.nbytes]
        header[str(value.name)] = {
            "dtype": _TYPES[tensor.dtype.name],
            "shape": tensor.shape.numpy(),
            "data_offsets": span,
        }
        end = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    start = -(-(8 + len(text)) // _PAGE) * _PAGE
    hasher = hashlib.sha256()
    with target.open("xb") as file:
        preamble = (start - 8).to_bytes(8, "little") + text.ljust(start - 8)
        file.write(preamble)
        hasher.update(preamble)
        for value in values:
            for piece in _pieces(_tensor(value)):
                file.write(piece)
                if keep:
                    hasher.update(piece)
            if progress is not None:
                progress(header[str(value.name)]["data_offsets"][1], end)
        if keep:
            file.flush()
            os.fsync(file.fileno())
    if keep:
        remember(target, hasher.hexdigest())
    return {id(value): start + header[str(value.name)]["data_offsets"][0] for value in values}


def _pieces(tensor: "ir.TensorProtocol") -> Iterator[bytes | memoryview]:
    """Give a tensor's bytes, little-endian, and let go of them."""
    import onnx_ir as ir

    if isinstance(tensor, ir.ExternalTensor):
        with Path(tensor.path).open("rb") as file:
            yield from _read(file, tensor.offset or 0, tensor.nbytes)
    else:
        yield np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def _read(file: IO[bytes], offset: int, left: int) -> Iterator[bytes]:
    file.seek(offset)
    while left:
        piece = file.read(min(left, 1 << 24))
        if not piece:
            raise _too_short(Path(file.name))
        left -= len(piece)
        yield piece


def _whole(values: list["ir.Value"], target: Path, *, keep: bool) -> dict[int, int] | None:
    """Take the weight file as it is, where all weights are in one and no pass has touched them; else None."""
    import onnx_ir as ir

    offsets, files, used, end = {}, set(), 0, 0
    for value in values:
        tensor = _tensor(value)
        if not isinstance(tensor, ir.ExternalTensor):
            return None
        files.add(Path(tensor.path))
        offsets[id(value)] = tensor.offset or 0
        used += tensor.nbytes
        end = max(end, offsets[id(value)] + tensor.nbytes)
    (source, *others) = files
    size = source.stat().st_size
    if others or used < _WORTH_WHOLE * size:
        return None
    if end > size:
        raise _too_short(source)
    if not keep:
        with suppress(OSError):  # Windows gives the right to link to few
            target.symlink_to(source.resolve())
            return offsets
    copy_file(source, target, sha256=file_digest(source))
    return offsets


def _too_short(file: Path) -> BuildError:
    return BuildError("a weight file is shorter than the graph says", where=str(file), hint="export again")


def _tensor(value: "ir.Value") -> "ir.TensorProtocol":
    if value.const_value is None:
        raise BuildError("an initializer has no value", where=f"weight {value.name}", hint="export again")
    return value.const_value
