"""The latent log: every latent, prediction and noise of a denoising loop in one append-only array of slots.

    [0 … 0, clean, 0, start noise | x_0, pred_0, noise_0 | x_1, pred_1, noise_1 | …]
            └──── entry -1 ─────┘

Three slots are an entry. Before call i the *window* is the K = 3 m slots right before x_i, oldest first: one contiguous
view. Call i writes x_i and pred_i to the next two slots, and the host writes noise_i to the third where the sampler
draws one: an output never lies in the window that is bound as input. When no entry is left, the window is copied to the
front and the log goes on from there.

Capacity: at least 2 K slots, so that this copy never overlaps itself. `slots_for` gives LAP entries more than a window
(or m, if that is more), so a copy of K slots falls due once in LAP calls.
"""

from typing import Any, NamedTuple

from trtdiff.errors import UsageError
from trtdiff.types import Array

ENTRY = 3
"""Slots an entry: latent, prediction, noise."""
LAP = 16
"""Entries written between two copies of the window to the front."""


def slots_for(window: int) -> int:
    """Give the slots to allocate for a window of `window` entries."""
    return ENTRY * (window + max(window, LAP))


class _Views(NamedTuple):
    window: Array
    latent: Array
    prediction: Array
    noise: Array


class LatentLog:
    """A cursor over `array` [slots, B, C, h, w] float32, which it fills with zeros and then owns.

    The array may come from a backend's allocator: anything that slices and assigns as numpy does. All views are made
    once, here; `window`, `latent`, `prediction`, `noise` and `advance` allocate nothing.
    """

    def __init__(self, array: Any, window: int) -> None:
        slots = array.shape[0]
        if window < 1 or slots % ENTRY or slots < 2 * ENTRY * window:
            raise UsageError(
                f"a latent log of {slots} slots cannot hold a window of {window} entries",
                hint=f"give {slots_for(window)} slots, and never fewer than {2 * ENTRY * window}, in threes",
            )
        self.array = array
        self.width = ENTRY * window
        """K: slots in the window."""
        starts = range(0, slots - self.width - ENTRY + 1, ENTRY)
        self._views = [
            _Views(array[s : s + self.width], *array[s + self.width : s + self.width + ENTRY]) for s in starts
        ]
        self._last = array[slots - self.width : slots]
        self._at = 0
        array[:] = 0

    @property
    def offset(self) -> int:
        """Slot where the window begins: what a backend adds to the buffer's address."""
        return ENTRY * self._at

    @property
    def window(self) -> Array:  # [K, B, C, h, w]
        """The last K slots before the next entry: the denoiser's input, and the decoder's after the last call."""
        return self._views[self._at].window

    @property
    def latent(self) -> Array:  # [B, C, h, w]
        """Slot of the next x_i."""
        return self._views[self._at].latent

    @property
    def prediction(self) -> Array:  # [B, C, h, w]
        """Slot of the next pred_i."""
        return self._views[self._at].prediction

    @property
    def noise(self) -> Array:  # [B, C, h, w]
        """Slot of the next noise_i."""
        return self._views[self._at].noise

    def start(self, noise: Array, clean: Array | None = None) -> None:
        """Begin a loop: write entry -1, the N(0, 1) draw and, for image-to-image, the clean latents [B, C, h, w]."""
        self._at = 0
        self.array[:] = 0
        self.array[self.width - 1] = noise
        if clean is not None:
            self.array[self.width - ENTRY] = clean

    def join(self, image: int, noise: Array, clean: Array | None = None) -> None:
        """Let one image [C, h, w] begin here, between the others' steps: the newest entry becomes its entry -1."""
        window = self.window
        window[-ENTRY:, image] = 0
        window[-1, image] = noise
        if clean is not None:
            window[-ENTRY, image] = clean

    def advance(self) -> None:
        """Close the entry: slide the window forward by three slots, or start a new lap at the front."""
        self._at += 1
        if self._at == len(self._views):
            self.array[: self.width] = self._last
            self._at = 0
