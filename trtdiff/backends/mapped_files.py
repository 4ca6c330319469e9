"""Keep the pages of mapped files from piling up in a process that reads each of them once.

TensorRT maps the graph's weights and copies them as it compiles. The pages that it has read stay in the process until
somebody else needs the memory, and count as its own: as much again as the weights. Dropped, a page that is read once
more comes back from the file.
"""

import ctypes
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_INTERVAL = 0.5
"""Seconds between two looks. Twice as often drops no more."""
_MADV_PAGEOUT = 21
"""Advice of Linux 5.4 and later: write out what is dirty, then drop. Should a mapping be gone, and its addresses be
somebody's memory by now, that memory is safe, which MADV_DONTNEED would clear. As fast, and as much is dropped."""


@contextmanager
def dropping_pages(folder: Path, read: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, drop what this process has mapped of the files in a folder, again and again (Linux).

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
    """Drop once; about how many bytes were in memory. Only mappings that cannot be written: none lose anything.

    Asking each mapping how much of it is in memory (`smaps`) takes a tenth of a build's time; the whole process's
    count, before and after, takes none.
    """
    library, before = ctypes.CDLL(None), _mapped()
    files = {str(file.resolve()) for file in folder.iterdir()}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, *rest = line.split(maxsplit=5)
        if len(rest) == 4 and rest[3] in files and "w" not in rights:
            begin, end = (int(address, 16) for address in addresses.split("-"))
            library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_PAGEOUT)
    return max(0, before - _mapped())


def _mapped() -> int:
    """Bytes of files that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[2]) * mmap.PAGESIZE
