"""Write chosen tensors into one new safetensors file, a few megabytes in memory at a time."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trtdiff.digest import remember
from trtdiff.errors import CheckpointError
from trtdiff.export.safetensors_index import DTYPES, ITEMSIZE, TensorRef
from trtdiff.records import whole_file
from trtdiff.types import Array

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""Types that can be converted into one another; integers are written as they are."""

_ALIGN = 64
_CHUNK = 1 << 21  # elements
_WORDS = {numpy: word for word, (numpy, _) in DTYPES.items()}


def converted_dtype(ref: TensorRef, dtype: str) -> str:
    """Give the type that a tensor gets when `dtype` is asked for: floats change, `stored` and integers stay."""
    return dtype if dtype != "stored" and ref.dtype in FLOATS else ref.dtype


def write_converted(
    tensors: Mapping[str, TensorRef], path: Path, *, dtype: str, progress: Callable[[int], None] | None = None
) -> dict[str, TensorRef]:
    """Write tensors as `path` in the given type, header first, and give their references there.

    Tensors that share their bytes (tied weights) are written once. The largest elements come first, so that every
    tensor stays aligned to its element. The digest is taken while writing and remembered. Rounding is to nearest
    even. Raises CheckpointError for a number that the type cannot hold, StorageError for a disk that is full.
    """
    header, placed = _plan(tensors, path, dtype)
    hasher = sha256(header)
    with whole_file(path) as temporary, temporary.open("wb") as out:
        out.write(header)
        position = len(header)
        if progress is not None:
            progress(position)
        for name, ref in sorted(placed.items(), key=lambda item: item[1].offset):
            if ref.offset < position or not ref.nbytes:
                continue  # tied to a tensor that stands there already, or empty
            for part in _converted(name, tensors[name], ref.dtype):
                raw = part.data.cast("B") if part.size else b""
                hasher.update(raw)
                out.write(raw)
                position += len(raw)
                if progress is not None:
                    progress(len(raw))
    remember(path, hasher.hexdigest())
    return placed


def planned_bytes(tensors: Mapping[str, TensorRef], dtype: str) -> int:
    """Size of the file that `write_converted` would write."""
    header, placed = _plan(tensors, Path(), dtype)
    return max((ref.offset + ref.nbytes for ref in placed.values()), default=len(header))


def _plan(tensors: Mapping[str, TensorRef], path: Path, dtype: str) -> tuple[bytes, dict[str, TensorRef]]:
    """Lay the tensors out and make the header, length and padding included."""
    once: dict[tuple[object, ...], str] = {}
    for name, ref in tensors.items():
        once.setdefault(_bytes_of(ref), name)
    order = sorted(once.values(), key=lambda name: (-ITEMSIZE[converted_dtype(tensors[name], dtype)], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for name in order:
        ref = tensors[name]
        word = converted_dtype(ref, dtype)
        nbytes = math.prod(ref.shape) * ITEMSIZE[word]
        begins[name] = position
        offsets = [position, position + nbytes]
        entries[name] = {"dtype": _WORDS[word], "shape": list(ref.shape), "data_offsets": offsets}
        position += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    start = 8 + len(text)
    placed = {}
    for name, ref in tensors.items():
        word = converted_dtype(ref, dtype)
        begin = begins[once[_bytes_of(ref)]]
        placed[name] = TensorRef(path, word, ref.shape, start + begin, math.prod(ref.shape) * ITEMSIZE[word])
    return len(text).to_bytes(8, "little") + text, placed


def _bytes_of(ref: TensorRef) -> tuple[object, ...]:
    return (ref.file, ref.offset, ref.nbytes, ref.dtype, ref.strides, ref.shape if ref.strides else None)


def _converted(name: str, ref: TensorRef, dtype: str) -> Iterator[Array]:
    """Give a tensor's elements in order and in the new type, a chunk at a time."""
    for chunk in _chunks(name, ref):
        yield chunk if dtype == ref.dtype else _cast(chunk, ref.dtype, dtype, name, ref)


def _chunks(name: str, ref: TensorRef) -> Iterator[Array]:
    """Give a tensor's elements in row-major order as stored; bfloat16 and float8 as bit patterns."""
    kind = _numpy_type(ref.dtype)
    if ref.strides is not None:
        span = 1 + sum((n - 1) * step for n, step in zip(ref.shape, ref.strides, strict=True))
        flat = np.memmap(ref.file, kind, "r", ref.offset, (span,))
        steps = [step * kind.itemsize for step in ref.strides]
        yield np.ascontiguousarray(np.lib.stride_tricks.as_strided(flat, ref.shape, steps, writeable=False))
        return
    left = math.prod(ref.shape)
    with ref.file.open("rb") as file:
        file.seek(ref.offset)
        while left:
            chunk = np.fromfile(file, kind, min(left, _CHUNK))
            if not chunk.size:
                raise CheckpointError(
                    f"{ref.file.name} ended inside tensor {name}",
                    where=str(ref.file),
                    hint="was it changed meanwhile? export again",
                )
            left -= chunk.size
            yield chunk


def _numpy_type(dtype: str) -> np.dtype[np.generic]:
    if dtype == "bfloat16":
        return np.dtype("<u2")
    return np.dtype("u1") if dtype.startswith("float8") else np.dtype(dtype).newbyteorder("<")


def _cast(chunk: Array, old: str, new: str, name: str, ref: TensorRef) -> Array:
    """Round to nearest even by way of float32, as PyTorch does; a number that becomes infinite is refused."""
    single = (chunk.astype(np.uint32) << 16).view(np.float32) if old == "bfloat16" else _narrow(chunk, np.float32)
    if new == "bfloat16":
        result = to_bfloat16(single)
        infinite = (result & 0x7FFF) == 0x7F80
    else:
        result = _narrow(single, np.dtype(new))
        infinite = np.isinf(result)
    if infinite.any():
        source = single if old == "bfloat16" else chunk
        lost = infinite & np.isfinite(source)
        if lost.any():
            worst = float(np.abs(source[lost].astype(np.float64)).max())
            raise CheckpointError(
                f"{new} cannot hold tensor {name}: it has {int(lost.sum())} numbers up to {worst:.6g}",
                where=str(ref.file),
                hint="keep this component in float32, or convert to bfloat16",
            )
    return result


def _narrow(chunk: Array, kind: npt.DTypeLike) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        return chunk.astype(kind)


def to_bfloat16(single: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = single.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)
