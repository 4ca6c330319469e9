"""Noises drawn ahead by a second thread, so that the denoising loop finds them ready.

A draw takes some 0.2 ms an image at 64 by 64 latents, and waking a thread 0.06 ms. So the thread draws whole blocks,
1, 2, 4 and then 8 noises at a time, one block ahead: it works while the network runs, and is woken once a block.
The order of the draws is that of the steps, whoever draws them.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from trtdiff.types import Array

BLOCK = 8


class NoiseAhead:
    """A context that gives `count` noises, one `take` each. Without any to draw it starts no thread."""

    def __init__(self, draw: Callable[[Array], Array], shape: Sequence[int], count: int) -> None:
        """`draw(out)` fills an array of `shape`, [B, C, h, w], with the next noise."""
        self._draw = draw
        self._left = count
        self._size = 1
        self._blocks = [np.empty((min(count, BLOCK), *shape), np.float32) for _ in range(2)]
        self._current, self._at = self._blocks[0][:0], 0
        self._thread = ThreadPoolExecutor(1) if count else None
        self._coming: Future[Array] | None = None

    def take(self) -> Array:  # [B, C, h, w], valid until the next call
        """Give the next noise."""
        if self._at == len(self._current):
            if self._coming is None:
                raise IndexError("more noises were taken than announced")
            self._current, self._at = self._coming.result(), 0
            self._start()
        self._at += 1
        noise: Array = self._current[self._at - 1]
        return noise

    def _start(self) -> None:
        """Let the thread fill the block that is not in use."""
        size = min(self._size, self._left)
        self._coming = None
        if size and self._thread is not None:
            self._blocks.reverse()
            self._coming = self._thread.submit(self._fill, self._blocks[0][:size])
        self._left -= size
        self._size = min(2 * self._size, BLOCK)

    def _fill(self, block: Array) -> Array:
        for out in block:
            self._draw(out)
        return block

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
