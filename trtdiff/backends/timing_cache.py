"""A file of kernel times that TensorRT measured: builds add to it, and later ones need not measure again.

Times hold for one GPU and one version of the library, so the file keeps an entry for each pair:

    trtdiff timing cache 1
    {"entries": [{"gpu": "NVIDIA L4", "capability": "sm89", "version": "10.13.0.35", "size": 1234, "sha256": "…"}]}
    <the library's own bytes of the first entry><of the second>…

Writers hold a lock and read the file again, so that builds at the same time lose nothing of each other's. The file is
whole or absent. The library checks an entry itself and takes none of another device or version.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from trtdiff.errors import ArtefactError
from trtdiff.records import whole_file
from trtdiff.whole import locked

HEADER = b"trtdiff timing cache 1\n"
_AGAIN = "name another file with --timing-cache, or remove it: builds measure again and write it anew"


@dataclass(frozen=True, order=True)
class Key:
    """What times were measured on and with."""

    gpu: str
    capability: str
    version: str

    def __str__(self) -> str:
        return f"TensorRT {self.version} on {self.gpu} ({self.capability})"


@dataclass(frozen=True)
class _Entry:
    gpu: str
    capability: str
    version: str
    size: Annotated[int, msgspec.Meta(ge=0)]
    sha256: str


@dataclass(frozen=True)
class _Index:
    entries: tuple[_Entry, ...]


def read_times(path: Path) -> dict[Key, bytes]:
    """Read every entry; none where there is no file yet. Raises ArtefactError for a damaged or foreign file."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ArtefactError(
            f"the timing cache cannot be read: {error.strerror}", where=str(path), hint=_AGAIN
        ) from None
    if not raw.startswith(HEADER):
        raise ArtefactError("this is no timing cache of trtdiff", where=str(path), hint=_AGAIN)
    index, newline, rest = raw.removeprefix(HEADER).partition(b"\n")
    try:
        entries = msgspec.json.decode(index, type=_Index).entries
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ArtefactError(f"the timing cache is damaged: {error}", where=str(path), hint=_AGAIN) from None
    found, start = {}, 0
    for entry in entries:
        key, content = Key(entry.gpu, entry.capability, entry.version), rest[start : start + entry.size]
        start += entry.size
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise ArtefactError(f"the timing cache is damaged: its entry for {key} is not what was written",
                                where=str(path), hint=_AGAIN)  # fmt: skip
        found[key] = content
    if start != len(rest) or not newline:
        raise ArtefactError("the timing cache is damaged: it ends elsewhere than it says", where=str(path), hint=_AGAIN)
    return found


def write_times(path: Path, times: Mapping[Key, bytes]) -> None:
    """Write the whole file. Raises StorageError."""
    ordered = sorted(times.items())
    entries = tuple(
        _Entry(key.gpu, key.capability, key.version, len(content), hashlib.sha256(content).hexdigest())
        for key, content in ordered
    )
    with whole_file(path.resolve()) as temporary, temporary.open("wb") as file:
        file.write(HEADER + msgspec.json.encode(_Index(entries)) + b"\n")
        for _, content in ordered:
            file.write(content)


def use_times(config: Any, path: Path, key: Key) -> Any:
    """Give a builder's config the times of this key, or an empty cache to fill. Returns the library's cache.

    Raises ArtefactError where the library does not take its own bytes back, and StorageError for a file that cannot be
    written: now, not after minutes of measuring.
    """
    with locked(path, lambda text: None):  # noqa: ARG005 - held for milliseconds
        times = read_times(path)
        write_times(path, times)
    return _opened(config, times, path, key)


def keep_times(config: Any, cache: Any, path: Path, key: Key) -> None:
    """Add what a build measured to the file, beside what others have added meanwhile.

    Raises ArtefactError where the library does not combine the two, or does not give its own.
    """
    with locked(path, lambda text: None):  # noqa: ARG005 - held for milliseconds
        times = read_times(path)
        if key in times:
            others = config.create_timing_cache(times[key])
            if others is None or not cache.combine(others, False):
                raise _not_taken(path, key, times)
        measured = cache.serialize()
        if measured is None:
            raise ArtefactError("TensorRT does not give what it measured", where=str(path), hint="build again")
        write_times(path, {**times, key: bytes(measured)})


def _opened(config: Any, times: Mapping[Key, bytes], path: Path, key: Key) -> Any:
    cache = config.create_timing_cache(times.get(key, b""))
    if cache is None or not config.set_timing_cache(cache, False):
        raise _not_taken(path, key, times)
    return cache


def _not_taken(path: Path, key: Key, times: Mapping[Key, bytes]) -> ArtefactError:
    held = "; ".join(map(str, sorted(times))) or "nothing"
    return ArtefactError(
        f"TensorRT does not take the timing cache's entry for {key}", where=f"{path}, which has {held}", hint=_AGAIN
    )  # fmt: skip
