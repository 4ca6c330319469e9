"""Where every tensor of a PyTorch `.bin` file lies, without loading its data and without running what it contains.

The pickle is read by `torch.load(weights_only=True)`, which calls nothing but tensor constructors, under fake tensors,
which record each storage's offset in the file instead of reading it
(https://docs.pytorch.org/docs/stable/notes/serialization.html). Tied weights come out as two names for the same bytes.
"""

import math
import re
import warnings
import zipfile
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from trtdiff.digest import cache_folder, file_digest
from trtdiff.errors import CheckpointError, MissingDependency
from trtdiff.export.safetensors_index import ITEMSIZE, TensorRef
from trtdiff.records import whole_file

_SAFER = "get this checkpoint's .safetensors files, or convert it where you trust it"
_CALLS = re.compile(r"GLOBAL\s+(?P<name>[\w.]+)")


def read_pickle_index(path: Path) -> dict[str, TensorRef]:
    """Index a `.bin` file by tensor name; entries that are not tensors are left out.

    Raises CheckpointError for a pickle that asks for anything but tensors, and for a damaged file.
    """
    if not path.is_file():
        _refuse(path, "is not a file")
    if not _is_archive(path):
        path = _as_archive(path)
    loaded = _load(path, offsets_only=True)
    while isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]  # training code saves more than weights
    if not isinstance(loaded, dict):
        _refuse(path, "does not hold a dictionary of tensors")
    _check_archive(path)
    size = path.stat().st_size
    refs = {}
    for name, tensor in loaded.items():
        if isinstance(name, str) and hasattr(tensor, "untyped_storage"):
            refs[name] = _tensor(name, tensor, path, size)
    if not refs:
        _refuse(path, "holds no tensors")
    return refs


def _is_archive(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"PK\x03\x04"
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")


def _as_archive(path: Path) -> Path:
    """Save a file in PyTorch's format from before 1.6, which has no offsets, in today's; once, in the user's cache."""
    try:
        target = cache_folder() / "pickles" / f"{file_digest(path)}.bin"
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    if not target.is_file():
        loaded = _load(path, offsets_only=False)
        import torch

        with whole_file(target) as temporary:
            torch.save(loaded, temporary)
    return target


def _load(path: Path, *, offsets_only: bool) -> Any:
    """Unpickle with nothing but tensor constructors; tensors have no data but an offset where `offsets_only`."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise MissingDependency(
            "reading .bin weights needs PyTorch",
            where=str(path),
            hint="pip install 'trtdiff[compile]', or use a .safetensors checkpoint",
        ) from None
    try:
        with warnings.catch_warnings(), FakeTensorMode() if offsets_only else nullcontext():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises whatever its bytes make of it
        if asked := _CALLS.search(str(error)):
            raise CheckpointError(
                f"{path.name} is a pickle that wants to run {asked['name']}: refused, nothing was run",
                where=str(path),
                hint=_SAFER,
            ) from None
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        _refuse(path, f"is not a readable PyTorch file: {reason.partition('. ')[0][:200]}")


def _check_archive(path: Path) -> None:
    """Offsets into a zip archive mean tensors only where its members are stored as they are, in this byte order."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            orders = [archive.read(member) for member in members if member.filename.endswith("/byteorder")]
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        _refuse(path, f"is a damaged archive: {error}")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        _refuse(path, "is a compressed archive", "load and save it again with torch.save")
    if any(order != b"little" for order in orders):
        _refuse(path, "was written by a big-endian machine", "load and save it again on this machine")


def _tensor(name: str, tensor: Any, path: Path, size: int) -> TensorRef:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        _refuse(path, f"gives tensor {name} the type {dtype}", f"known: {', '.join(ITEMSIZE)}")
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        _refuse(path, f"holds tensor {name} as {tensor.layout}, which has no bytes of its own", _SAFER)
    base = getattr(storage, "_checkpoint_offset", None)
    if base is None:
        _refuse(path, f"holds tensor {name} in a form whose place in the file is not known", _SAFER)
    shape, strides, itemsize = tuple(tensor.shape), tuple(tensor.stride()), ITEMSIZE[dtype]
    numel = math.prod(shape)
    first = tensor.storage_offset() * itemsize
    last = (
        first + itemsize * (1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))) if numel else first
    )
    if last > storage.nbytes() or base + last > size:
        _refuse(path, f"puts tensor {name} beyond its end")
    plain = tensor.is_contiguous()
    return TensorRef(path, dtype, shape, base + first, numel * itemsize, None if plain else strides)


def _refuse(path: Path, what: str, hint: str = "download it again; the copy is incomplete or damaged") -> NoReturn:
    raise CheckpointError(f"{path.name} {what}", where=str(path), hint=hint)
