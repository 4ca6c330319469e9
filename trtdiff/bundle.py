"""A bundle: one compiled pipeline as a self-contained, relocatable folder.

    engines/NAME/
      bundle.json
      engines/<key>/{manifest.json, engine/…}    # the same entries as in the store
      samplers.safetensors                       # tables of coefficients
      tokenizers/<name>.json
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from trtdiff.errors import ArtefactError
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.families.base import ModelFacts
from trtdiff.records import read_record
from trtdiff.types import ShapeProfile

BUNDLE_SCHEMA = 1
BUNDLE_FILE = "bundle.json"


@dataclass(frozen=True)
class FileFacts:
    """Size in bytes and sha256 of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class BundleManifest:
    """What `bundle.json` says; every path in it is relative to the bundle."""

    schema: int
    trtdiff: str
    name: str
    family: str
    checkpoint: CheckpointOrigin
    facts: ModelFacts
    precision: str
    profile: ShapeProfile
    engines: Mapping[str, Mapping[str, str]]
    """Backend → component → key of its engine."""
    window: int
    """K of the denoiser's prologue: slots of the latent log that every step reads (0: dynamic)."""
    samplers: tuple[str, ...]
    """Names of the scheduler tables; the first is the checkpoint's own."""
    files: Mapping[str, FileFacts]
    """Every file of the bundle but bundle.json and the engines' own (their manifests hold those)."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle folder."""

    path: Path
    manifest: BundleManifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read and validate `bundle.json`. Raises ArtefactError."""
        file = path / BUNDLE_FILE
        if not file.is_file():
            raise ArtefactError(f"{path} is not a bundle: it has no {BUNDLE_FILE}", where=str(path),
                                hint="make one with: trtdiff build EXPORT -o engines/NAME")  # fmt: skip
        return cls(path, read_record(file, BundleManifest, schema=BUNDLE_SCHEMA))
