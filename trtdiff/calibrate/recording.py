"""What a calibration's loop computed, kept so that it can be replayed without executing a network.

A denoising loop is determined by its prompts' conditions and by the denoiser's predictions. With these on disk, every
later pass over the samples gets the very inputs that the first one saw, and a calibration that was interrupted goes on
where it stood.
"""

from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from trtdiff.records import whole_file
from trtdiff.types import Array

Arrays = Mapping[str, Array]


class Recording:
    """A folder of small files, each whole or absent."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> dict[str, Array] | None:
        """Give what was kept under a name; None where nothing was, or it cannot be read."""
        try:
            with np.load(self._folder / f"{name}.npz", allow_pickle=False) as file:
                return dict(file)
        except (OSError, ValueError, EOFError, KeyError, BadZipFile):
            return None

    def has(self, name: str) -> bool:
        """Whether something is kept under a name."""
        return (self._folder / f"{name}.npz").is_file()

    def put(self, name: str, arrays: Arrays) -> None:
        """Keep arrays under a name. Raises StorageError."""
        with whole_file(self._folder / f"{name}.npz") as temporary, temporary.open("wb") as file:
            np.savez(file, **dict(arrays))  # type: ignore[arg-type] # numpy takes arrays by name
