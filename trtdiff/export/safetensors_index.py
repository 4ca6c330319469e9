"""Where every tensor of a safetensors file lies, read from the header alone and believed only after it is checked.

A file is `u64 little-endian header length | JSON header | data`; the header maps a name to `dtype`, `shape` and
`data_offsets` (begin, end) relative to the data, which the tensors cover without gaps or overlaps
(https://github.com/huggingface/safetensors#format).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trtdiff.errors import CheckpointError

HEADER_LIMIT = 100_000_000
"""Largest header in bytes; the format's own reader has the same limit."""

DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "F32": ("float32", 4),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F64": ("float64", 8),
}
"""safetensors' word → numpy's word and bytes an element."""

ITEMSIZE: Mapping[str, int] = dict(DTYPES.values())
"""numpy's word → bytes an element."""

_HINT = "download it again; the copy is incomplete or damaged"


@dataclass(frozen=True)
class TensorRef:
    """One stored tensor, never loaded: which bytes of which file, and what they mean."""

    file: Path
    dtype: str
    """numpy's word, or `bfloat16`, `float8_e4m3fn`, `float8_e5m2`."""
    shape: tuple[int, ...]
    offset: int
    """First byte, counted from the start of the file."""
    nbytes: int
    """Bytes of the tensor's elements: elements times itemsize."""
    strides: tuple[int, ...] | None = None
    """Distances in elements along each dimension where a pickle stores a view that is not row-major."""

    @property
    def aligned(self) -> bool:
        """Whether the bytes can be used where they lie: row-major, and starting at a multiple of the element's size."""
        return self.strides is None and self.offset % ITEMSIZE[self.dtype] == 0


def read_index(path: Path) -> dict[str, TensorRef]:
    """Index a safetensors file by tensor name. Raises CheckpointError for anything the format forbids."""
    try:
        if not path.is_file():  # a folder or a pipe must not be opened, a link to nothing says so below
            path.stat()
            _refuse(path, "is not a file")
        size = path.stat().st_size
        with path.open("rb") as file:
            header, start = _header(file, size, path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name}: {error.strerror}", where=str(path), hint=_HINT) from None
    refs = {}
    for name, entry in header.items():
        if name == "__metadata__":
            _check_metadata(entry, path)
        else:
            refs[name] = _tensor(name, entry, start, path)
    _check_coverage(refs, start, size, path)
    return refs


def read_metadata(path: Path) -> dict[str, str]:
    """Give what a safetensors file says of itself, text to text. The file has been indexed before."""
    with path.open("rb") as file:
        header, _ = _header(file, path.stat().st_size, path)
    return dict(header.get("__metadata__", {}))


def data_bytes(path: Path) -> int:
    """Give how many bytes of a safetensors file are tensors."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    return path.stat().st_size - 8 - length


def _header(file: BinaryIO, size: int, path: Path) -> tuple[dict[str, Any], int]:
    """Read the header's JSON and the offset at which the data begin."""
    prefix = file.read(8)
    if len(prefix) < 8:
        _refuse(path, f"holds {size} bytes, a safetensors file has at least 10")
    if prefix == b"version ":
        _refuse(path, "is a Git LFS pointer, and not the weights", "fetch them: git lfs pull, or download the file")
    length = int.from_bytes(prefix, "little")
    if length > HEADER_LIMIT:
        _refuse(
            path,
            f"announces a header of {length} bytes, more than the format allows ({HEADER_LIMIT})",
            "is it a safetensors file at all? download it again",
        )
    if 8 + length > size:
        _refuse(path, f"announces a header of {length} bytes and holds {size - 8} after the length")
    raw = file.read(length)
    if raw[:1] != b"{":
        _refuse(path, "has a header that is not a JSON object")
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError:
        _refuse(path, "has a header that is nested too deeply")
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        _refuse(path, f"has a header that is not valid JSON: {error}")
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands there twice")
    return made


def _check_metadata(entry: Any, path: Path) -> None:
    if not isinstance(entry, dict) or not all(isinstance(value, str) for value in entry.values()):
        _refuse(path, "has a __metadata__ that does not map text to text")


def _tensor(name: str, entry: Any, start: int, path: Path) -> TensorRef:
    if not name.isprintable():
        _refuse(path, f"names a tensor {name!r}")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        _refuse(path, f"describes tensor {name} without exactly dtype, shape and data_offsets")
    word, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(word, str) or word not in DTYPES:
        _refuse(path, f"gives tensor {name} the type {word!r}", f"known: {', '.join(DTYPES)}")
    if not _naturals(shape):
        _refuse(path, f"gives tensor {name} the shape {shape!r}")
    if not _naturals(offsets) or len(offsets) != 2:
        _refuse(path, f"puts tensor {name} at {offsets!r}")
    dtype, itemsize = DTYPES[word]
    nbytes = math.prod(shape) * itemsize
    begin, end = offsets
    if end - begin != nbytes:
        _refuse(path, f"gives tensor {name} ({dtype} {shape}) {end - begin} bytes, it needs {nbytes}")
    return TensorRef(path, dtype, tuple(shape), start + begin, nbytes)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_coverage(refs: Mapping[str, TensorRef], start: int, size: int, path: Path) -> None:
    """Tensors follow one another from the first byte of the data to the last of the file."""
    position = start
    for name, ref in sorted(refs.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if ref.offset != position:
            what = "overlap" if ref.offset < position else "leave a gap"
            _refuse(path, f"has tensors that {what} at byte {min(ref.offset, position)}, before {name}")
        position += ref.nbytes
    if position != size:
        what = "is cut short" if position > size else "has bytes that belong to no tensor"
        _refuse(path, f"{what}: its header describes {position} bytes, it holds {size}")


def _refuse(path: Path, what: str, hint: str = _HINT) -> NoReturn:
    raise CheckpointError(f"{path.name} {what}", where=str(path), hint=hint)
