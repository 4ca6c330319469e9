"""Put a component's weights beside its graph, where ONNX may refer to them.

ONNX external data must lie in the model's own folder, in files that are neither symbolic nor hard links: so a
checkpoint's safetensors files are copied there (a reflink, costing nothing, where the file system has them). Only
where the stored bytes cannot be used as they are, because another type is wanted, or they lie in a pickle, or are not
aligned, is one new safetensors file written, tensor by tensor.

So it is where a file holds more than this component, as a checkpoint in one file does: each component gets a file with
just its own tensors. One shared copy of all of it would carry what nobody needs (averaged weights double some files),
and its digest would stand for every component, so that a fine-tune of the UNet alone would compile the VAE anew.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trtdiff.digest import file_digest, remember
from trtdiff.errors import CheckpointError, StorageError, UsageError
from trtdiff.export.convert import converted_dtype, planned_bytes, write_converted
from trtdiff.export.renames import near_names, same_elements, stored_name
from trtdiff.export.safetensors_index import TensorRef, data_bytes
from trtdiff.records import whole_file
from trtdiff.types import names

WANTED = ("stored", "float32", "float16", "bfloat16")
Progress = Callable[[int], None]

_STEP = 1 << 26  # bytes copied between two calls of progress
_SPARE = 1 << 20  # bytes left free on the disk, for the graph


def place_weights(
    tensors: Mapping[str, TensorRef],
    needed: Mapping[str, tuple[int, ...]],
    out: Path,
    stem: str,
    *,
    dtype: str = "stored",
    progress: Progress | None = None,
) -> dict[str, TensorRef]:
    """Put what a component needs into `out/weights/` and give references there, by the needed names and shapes.

    `needed` holds every parameter and persistent buffer of the module with its shape; what else the checkpoint has is
    ignored. With `dtype="stored"` whole files are copied (`<stem>.safetensors`, or `<stem>-00001-of-00002.safetensors`
    …) where all that is in them stands in `tensors`; else, and with another type, the needed ones are written into one
    `<stem>.safetensors`, floats in the type that is asked for, and integers as they are. Call it once for a
    folder, with the union of what its graphs need: a second call replaces the files. The files' digests are known to
    `trtdiff.digest.file_digest` afterwards without reading them again. `progress` is told bytes written.

    Raises CheckpointError for a tensor that is missing, has another shape or does not fit the type; StorageError where
    the disk has no room.
    """
    if dtype not in WANTED:
        raise UsageError(f"weights cannot be stored as {dtype!r}", hint=f"one of: {', '.join(WANTED)}")
    found = find_needed(tensors, needed)
    _check_convertible(found, dtype)
    folder = out / "weights"
    if _usable(found, dtype, tensors):
        return _copied(found, folder, stem, progress)
    _check_room(folder, planned_bytes(found, dtype))
    return write_converted(found, folder / f"{stem}.safetensors", dtype=dtype, progress=progress)


def placement_bytes(tensors: Mapping[str, TensorRef], needed: Mapping[str, tuple[int, ...]], dtype: str) -> int:
    """Bytes that `place_weights` would write, and tell `progress` of."""
    found = find_needed(tensors, needed)
    if _usable(found, dtype, tensors):
        return sum(file.stat().st_size for file in {ref.file for ref in found.values()})
    return planned_bytes(found, dtype)


def find_needed(tensors: Mapping[str, TensorRef], needed: Mapping[str, tuple[int, ...]]) -> dict[str, TensorRef]:
    """Give each needed tensor's stored reference in the needed shape, through the table of old names."""
    found: dict[str, TensorRef] = {}
    missing = []
    for name, shape in needed.items():
        stored = stored_name(name, tensors)
        if stored is None:
            missing.append(name)
            continue
        ref = tensors[stored]
        if not same_elements(ref.shape, shape):
            raise CheckpointError(
                f"tensor {stored} has shape {list(ref.shape)}, the model needs {list(shape)}",
                where=str(ref.file),
                hint="the config does not belong to these weights; get both from the same checkpoint",
            )
        found[name] = _reshaped(ref, tuple(shape))
    if missing:
        _refuse_missing(missing, tensors)
    return found


def _reshaped(ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    """Give the same elements another shape that differs in dimensions of 1."""
    if ref.shape == shape:
        return ref
    strides = None
    if ref.strides is not None:
        real = iter([step for n, step in zip(ref.shape, ref.strides, strict=True) if n != 1])
        strides = tuple(1 if n == 1 else next(real) for n in shape)
    return TensorRef(ref.file, ref.dtype, shape, ref.offset, ref.nbytes, strides)


def _refuse_missing(missing: list[str], tensors: Mapping[str, TensorRef]) -> None:
    near = near_names(missing[0], tensors)
    files = sorted({str(ref.file) for ref in tensors.values()})
    raise CheckpointError(
        f"{len(missing)} needed tensors are missing: {names(missing, 4)}"
        if len(missing) > 1
        else f"tensor {missing[0]} is missing",
        where=names(files, 2) or "a component without weights",
        hint=f"near names in the file: {', '.join(near)}"
        if near
        else "the config does not belong to these weights; get both from the same checkpoint",
    )


def _check_convertible(found: Mapping[str, TensorRef], dtype: str) -> None:
    scaled = [name for name, ref in found.items() if ref.dtype.startswith("float8")]
    if scaled and dtype != "stored":
        ref = found[scaled[0]]
        raise CheckpointError(
            f"{len(scaled)} tensors are {ref.dtype}, which cannot become {dtype} without scales: {names(scaled, 2)}",
            where=str(ref.file),
            hint="use the checkpoint's 16-bit or 32-bit files",
        )


def _usable(found: Mapping[str, TensorRef], dtype: str, tensors: Mapping[str, TensorRef]) -> bool:
    """Whether the stored files can serve as they are."""
    return all(
        ref.file.suffix == ".safetensors" and ref.aligned and converted_dtype(ref, dtype) == ref.dtype
        for ref in found.values()
    ) and all(_is_all_of(tensors, file) for file in {ref.file for ref in found.values()})


def _is_all_of(tensors: Mapping[str, TensorRef], file: Path) -> bool:
    """Whether a safetensors file holds nothing but these tensors."""
    places = {(ref.offset, ref.nbytes) for ref in tensors.values() if ref.file == file}
    return sum(nbytes for _, nbytes in places) == data_bytes(file)


def _copied(found: Mapping[str, TensorRef], folder: Path, stem: str, progress: Progress | None) -> dict[str, TensorRef]:
    files = sorted({ref.file for ref in found.values()})
    _check_room(folder, sum(file.stat().st_size for file in files))
    places = {}
    for number, file in enumerate(files, 1):
        part = "" if len(files) == 1 else f"-{number:05d}-of-{len(files):05d}"
        places[file] = folder / f"{stem}{part}.safetensors"
        _copy(file, places[file], progress)
    return {
        name: TensorRef(places[ref.file], ref.dtype, ref.shape, ref.offset, ref.nbytes) for name, ref in found.items()
    }


def _copy(source: Path, target: Path, progress: Progress | None) -> None:
    """Copy a file inside the kernel, and let the copy inherit the source's digest.

    Hashing needs the bytes in this process, copying does not: hashing while copying would turn a reflink into a read
    and a write of everything. So the source is hashed once in its life (remembered, and every later export of it
    reads nothing), and the copy, made by the kernel and of the same length, is given that digest. A source that changes
    on the way is noticed by its size and time.
    """
    try:
        before = source.stat()
        known = file_digest(source)
        with source.open("rb") as reader, whole_file(target) as temporary, temporary.open("wb") as writer:
            copied = _copy_bytes(reader.fileno(), writer.fileno(), before.st_size, progress)
            after = source.stat()
            if copied != after.st_size or after.st_mtime_ns != before.st_mtime_ns:
                raise CheckpointError(
                    f"{source.name} changed while it was copied",
                    where=str(source),
                    hint="wait until its download is complete, then export again",
                )
    except OSError as error:
        raise CheckpointError(f"cannot read {source.name}: {error.strerror}", where=str(source)) from None
    remember(target, known)


def _copy_bytes(reader: int, writer: int, size: int, progress: Progress | None) -> int:
    """Copy `size` bytes from the start of one descriptor to another; gives how many there were. Holes stay holes."""
    end, in_kernel = 0, hasattr(os, "copy_file_range")
    for start, stop in _spans_of_data(reader, size):
        if progress is not None and start > end:
            progress(start - end)
        at = start
        while at < stop:
            count = min(_STEP, stop - at)
            if in_kernel:
                try:
                    step = os.copy_file_range(reader, writer, count, at, at)
                except OSError as error:
                    if error.errno not in {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM}:
                        raise
                    in_kernel = False
                    continue
                if not step and not at:  # some file systems answer 0 for what they cannot do
                    in_kernel = False
                    continue
            else:
                step = _write_all(writer, os.pread(reader, min(count, 1 << 22), at), at)
            if not step:
                return at
            at += step
            if progress is not None:
                progress(step)
        end = stop
    os.ftruncate(writer, size)
    return size


def _spans_of_data(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Give what is not a hole, from where to where; everything on a file system that knows no holes."""
    at = 0
    while at < size:
        try:
            at = os.lseek(file, at, os.SEEK_DATA)
            end = min(os.lseek(file, at, os.SEEK_HOLE), size)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole from here on
                return
            end = size
        if at < size:
            yield at, end
        at = end


def _write_all(writer: int, chunk: bytes, at: int) -> int:
    done = 0
    while done < len(chunk):
        done += os.pwrite(writer, memoryview(chunk)[done:], at + done)
    return done


def _check_room(folder: Path, nbytes: int) -> None:
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(there).free
    if nbytes + _SPARE > free:
        raise StorageError(
            f"the weights need {nbytes / 1e6:.1f} MB, the disk has {free / 1e6:.1f} MB free",
            where=str(folder),
            hint="free some space or choose another folder; nothing was written",
        )
