"""Keep the pages of mapped files from piling up in a process that reads each of them once.

TensorRT maps the graph's weights and copies them as it compiles. The pages that it has read stay in the process until
somebody else needs the memory, and count as its own: as much again as the weights. Dropped, a page that is read once
more comes back from the file.
"""

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL = 0.2
"""Seconds between two looks; a disk reads a few hundred megabytes in that time."""
_MADV_DONTNEED = 4


@contextmanager
def dropping_pages(folder: Path) -> Iterator[None]:
    """While the body runs, drop what this process has mapped of the files of a folder, again and again (Linux)."""
    done = threading.Event()

    def work() -> None:
        while not done.wait(_INTERVAL):
            drop_pages(folder)

    if sys.platform != "linux":
        yield
        return
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def drop_pages(folder: Path) -> int:
    """Drop once; how many bytes of address space that was. Only mappings that cannot be written: none lose anything."""
    library, prefix, dropped = ctypes.CDLL(None), f"{folder.resolve()}/", 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith(prefix) and "w" not in permissions:
            begin, end = (int(address, 16) for address in span.split("-"))
            failed = library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
            dropped += 0 if failed else end - begin
    return dropped
