"""Keep the pages of mapped files from piling up in a process that reads each of them once.

TensorRT maps the graph's weights and copies them as it compiles. The pages that it has read stay in the process until
somebody else needs the memory, and count as its own: as much again as the weights. Dropped, a page that is read once
more comes back from the file.
"""

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL = 0.2
"""Seconds between two looks; a disk reads a few hundred megabytes in that time."""
_MADV_PAGEOUT = 21
"""Advice of Linux 5.4 and later: write out what is dirty, then drop. Should a mapping be gone, and its addresses be
somebody's memory by now, that memory is safe, which MADV_DONTNEED would clear. As fast, and as much is dropped."""


@contextmanager
def dropping_pages(folder: Path, read: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, drop what this process has mapped of the files of a folder, again and again (Linux).

    `read` is told, in another thread, how many bytes were dropped in all: about what was read so far.
    """
    done = threading.Event()

    def work() -> None:
        total = 0
        while not done.wait(_INTERVAL):
            total += drop_pages(folder)
            read(total)

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
    """Drop once; how many bytes were in memory. Only mappings that cannot be written: none lose anything."""
    library, prefix, dropped = ctypes.CDLL(None), f"{folder.resolve()}/", 0
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):
            ours = len(rest) == 5 and rest[4].startswith(prefix) and "w" not in rest[0]
            begin, end = (int(address, 16) for address in first.split("-")) if ours else (0, 0)
        elif first == "Rss:" and end:
            size = 1024 * int(rest[0])
            if size and not library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT):
                dropped += size
    return dropped
