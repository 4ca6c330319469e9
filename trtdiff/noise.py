"""PyTorch's CPU normal numbers in numpy: the same seed gives diffusers' own latents and noises without torch.

A `torch.Generator("cpu")` is a Mersenne twister (MT19937) plus one remembered normal. `torch.randn` in float32 reads it
in two ways (ATen/native/cpu/DistributionTemplates.h, `normal_fill`; ATen/core/DistributionsHelper.h):

- 16 elements or more: one 32-bit word each, its low 24 bits a uniform in [0, 1); Box-Muller turns every block of 16
  (the first 8 radii, the last 8 angles) into 16 normals. When the count is no multiple of 16, the last 16 are drawn
  anew.
- fewer than 16: two words make a 53-bit uniform, two uniforms two normals in double precision; the second normal waits
  in the generator for the next short call, however many long calls come between.

Only the last bits differ from PyTorch, whose vectorised logarithm and cosine round differently.
"""

import math
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import numpy as np
import numpy.typing as npt

from trtdiff.errors import UsageError

_BLOCK = 16
_LOWEST, _HIGHEST = -(1 << 63), (1 << 64) - 1


class TorchStream:
    """The stream of `torch.Generator("cpu").manual_seed(seed)`, read by successive `randn` calls.

    Seeds are what PyTorch accepts: -2**63 … 2**64 - 1. Its twister keeps the low 32 bits only, so seeds that are
    equal modulo 2**32 are one stream.
    """

    def __init__(self, seed: SupportsIndex) -> None:
        self.seed = check_seed(seed)
        # numpy's legacy seeding of one integer is Knuth's initialisation of the 624 words, as at::mt19937 does it
        self._words = np.random.RandomState(self.seed & 0xFFFFFFFF)
        self._waiting: float | None = None

    def randn(self, shape: Sequence[int]) -> npt.NDArray[np.float32]:  # [*shape]
        """Give what the next `torch.randn(shape, generator=g)` gives, up to 3e-7 · max(1, |x|), its last bits."""
        count = math.prod(shape)
        return (self._long(count) if count >= _BLOCK else self._short(count)).reshape(shape)

    def _long(self, count: int) -> npt.NDArray[np.float32]:
        blocks, rest = divmod(count, _BLOCK)
        uniform = self._uniform(count)
        out = np.empty(count, np.float32)
        whole = blocks * _BLOCK
        _box_muller(uniform[:whole].reshape(-1, _BLOCK), out[:whole].reshape(-1, _BLOCK))
        if rest:
            _box_muller(self._uniform(_BLOCK)[None], out[-_BLOCK:][None])
        return out

    def _uniform(self, count: int) -> npt.NDArray[np.float32]:  # in [0, 1), multiples of 2**-24
        words = self._words.randint(0, 1 << 32, count, dtype=np.uint32)  # as `bytes`, faster, and without the GIL
        return (words & np.uint32(0xFFFFFF)).astype(np.float32) * np.float32(2**-24)

    def _short(self, count: int) -> npt.NDArray[np.float32]:
        return np.array([self._normal() for _ in range(count)], np.float32)

    def _normal(self) -> float:
        if self._waiting is not None:
            normal, self._waiting = self._waiting, None
            return normal
        high, low, high2, low2 = np.frombuffer(self._words.bytes(16), "<u4").tolist()
        mask = (1 << 53) - 1
        angle = 2 * math.pi * ((high << 32 | low) & mask) * 2.0**-53
        radius = math.sqrt(-2 * math.log1p(-((high2 << 32 | low2) & mask) * 2.0**-53))
        self._waiting = radius * math.sin(angle)
        return radius * math.cos(angle)


def check_seed(seed: SupportsIndex) -> int:
    """Give the seed as an integer that `torch.Generator.manual_seed` accepts, or raise UsageError."""
    try:
        if isinstance(seed, bool | np.bool_):
            raise TypeError  # noqa: TRY301 - True is an index to Python, and a mistake to everybody else
        value = operator.index(seed)
    except TypeError:
        raise UsageError(f"seed {seed!r} is not a whole number", hint="give an integer, e.g. 7") from None
    if not _LOWEST <= value <= _HIGHEST:
        shown = str(value) if value.bit_length() < 100 else f"of {value.bit_length()} bits"
        raise UsageError(f"seed {shown} is out of range", hint="PyTorch's seeds lie in -2**63 … 2**64 - 1")
    return value


def initial_noise(seed: int, image: int, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """Give the N(0, 1) start [1, C, h, w] of image number `image` in a request: its stream is seeded `seed + image`.

    diffusers' counterpart is `generator=[torch.Generator().manual_seed(seed + i) for i in range(batch)]`.
    """
    return TorchStream(check_seed(seed) + image).randn(shape)


def _box_muller(uniform: npt.NDArray[np.float32], out: npt.NDArray[np.float32]) -> None:
    """Fill out [n, 16] from uniform [n, 16]: radii from columns 0 … 7, angles from 8 … 15 (ATen's normal_fill_16)."""
    half = _BLOCK // 2
    radius = np.sqrt(np.float32(-2) * np.log(np.float32(1) - uniform[:, :half]))
    angle = np.float32(2 * np.pi) * uniform[:, half:]
    np.multiply(radius, np.cos(angle), out=out[:, :half])
    np.multiply(radius, np.sin(angle), out=out[:, half:])
