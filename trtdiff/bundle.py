"""A bundle: one compiled pipeline as a self-contained, relocatable folder.

    engines/NAME/
      bundle.json
      engines/<key>/{manifest.json, engine/…}    # the same entries as in the store
      samplers.safetensors                       # tables of coefficients
      tokenizers/<name>.json

Opening one looks at every file's presence and size. Asking for an engine checks the sha256 of its files against the
memo of `trtdiff.digest`, so their bytes are read once on a machine and again only if a file changed;
`verify(fresh=True)` reads everything.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.families.base import ModelFacts
from trtdiff.files import FileFacts, check_files
from trtdiff.manifest import MANIFEST_FILE, Manifest, read_manifest
from trtdiff.records import read_record
from trtdiff.types import ShapeProfile, Tolerance

BUNDLE_SCHEMA = 3
BUNDLE_FILE = "bundle.json"
ENGINES_FOLDER = "engines"
SAMPLERS_FILE = "samplers.safetensors"
_AGAIN = "build again, with the same command: what is damaged is made anew"


@dataclass(frozen=True)
class BundleManifest:
    """What `bundle.json` says; every path in it is relative to the bundle."""

    schema: int
    trtdiff: str
    name: str
    family: str
    checkpoint: CheckpointOrigin
    facts: ModelFacts
    dtype: str
    """Type in which the export stored weights: the checkpoint's own (`stored`), or the one that was asked for."""
    precision: Mapping[str, str]
    """Backend → precision of its engines."""
    profile: ShapeProfile
    engines: Mapping[str, Mapping[str, str]]
    """Backend → component → key of its engine."""
    window: int
    """K of the denoiser's prologue: slots of the latent log that every step reads (0: dynamic)."""
    samplers: tuple[str, ...]
    """Names of the scheduler tables; the first is the checkpoint's own."""
    tokenizers: Mapping[str, str]
    """Tokenizer name → file."""
    files: Mapping[str, FileFacts]
    """Every file of the bundle but bundle.json and the engines' own, which their manifests hold."""
    made_from: Mapping[str, Any]
    """Everything that determined the bundle, by piece: what the next build compares itself with."""
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    """Backend → what is promised of its engines, where the precision is a recipe of somebody's own."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle folder."""

    path: Path
    manifest: BundleManifest

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read `bundle.json` and find every file it names. Raises ArtefactError."""
        path = Path(path)
        file = path / BUNDLE_FILE
        if not path.exists():
            raise UsageError(f"there is no bundle {path}", where=str(path.absolute().parent), hint="check the name")
        if not file.is_file():
            raise ArtefactError(f"{path} is not a bundle: it has no {BUNDLE_FILE}", where=str(path),
                                hint="make one with: trtdiff build EXPORT -o engines/NAME")  # fmt: skip
        bundle = cls(path, read_record(file, BundleManifest, schema=BUNDLE_SCHEMA))
        bundle._check_sense()
        check_files(path, bundle.manifest.files, hint=_AGAIN, sizes=True)
        for backend, component in bundle._every_engine():
            entry = bundle._entry(backend, component)
            check_files(entry, bundle.engine_manifest(backend, component).files, hint=_AGAIN, sizes=True)
        return bundle

    def _check_sense(self) -> None:
        """Refuse a manifest whose fields have the right types and cannot be meant."""
        manifest, file = self.manifest, str(self.path / BUNDLE_FILE)
        keys = [key for engines in manifest.engines.values() for key in engines.values()]
        faults = {
            "engines: there are none": not keys,
            "precision: not every backend has one": manifest.precision.keys() != manifest.engines.keys(),
            "engines: a key is not 32 hexadecimal digits": not all(re.fullmatch(r"[0-9a-f]{32}", key) for key in keys),
            "samplers: there are none": not manifest.samplers,
            "window: it is negative": manifest.window < 0,
            "facts: a size is not positive": min(
                manifest.facts.sizes_multiple_of, manifest.facts.latent.downscale, manifest.facts.latent.channels
            ) < 1,
        }  # fmt: skip
        for fault, found in faults.items():
            if found:
                raise ArtefactError(f"{BUNDLE_FILE} is not what this version writes: {fault}", where=file, hint=_AGAIN)

    def components(self, backend: str) -> tuple[str, ...]:
        """Components that this bundle has engines for, with that backend."""
        return tuple(self.manifest.engines.get(backend, {}))

    def engine_manifest(self, backend: str, component: str) -> Manifest:
        """How one engine was made: its bindings, what determined it, its files."""
        entry = self._entry(backend, component)
        self._file(f"{ENGINES_FOLDER}/{entry.name}/{MANIFEST_FILE}")
        return read_manifest(entry / MANIFEST_FILE)

    def engine(self, backend: str, component: str) -> Path:
        """Give an engine's folder, for `Backend.load`; its files are checked first."""
        entry = self._entry(backend, component)
        check_files(entry, self.engine_manifest(backend, component).files, hint=_AGAIN)
        return entry / "engine"

    def tokenizer(self, name: str) -> Path:
        """Give a tokenizer's file, checked."""
        if name not in self.manifest.tokenizers:
            raise ArtefactError(f"the bundle has no tokenizer {name!r}", where=str(self.path),
                                hint=f"it has {', '.join(self.manifest.tokenizers) or 'none'}")  # fmt: skip
        return self._file(self.manifest.tokenizers[name])

    @property
    def samplers(self) -> Path:
        """The file of sampler tables, checked."""
        return self._file(SAMPLERS_FILE)

    def verify(self, *, fresh: bool = False) -> None:
        """Check every file; `fresh` reads all bytes again instead of trusting the memo. Raises ArtefactError."""
        check_files(self.path, self.manifest.files, hint=_AGAIN, fresh=fresh)
        for backend, component in self._every_engine():
            files = self.engine_manifest(backend, component).files
            check_files(self._entry(backend, component), files, hint=_AGAIN, fresh=fresh)

    def _file(self, name: str) -> Path:
        if name not in self.manifest.files:
            raise ArtefactError(f"the bundle lists no {name}", where=str(self.path / BUNDLE_FILE), hint=_AGAIN)
        check_files(self.path, {name: self.manifest.files[name]}, hint=_AGAIN)
        return self.path / name

    def _every_engine(self) -> Iterator[tuple[str, str]]:
        return ((backend, component) for backend, keys in self.manifest.engines.items() for component in keys)

    def _entry(self, backend: str, component: str) -> Path:
        engines = self.manifest.engines
        if backend not in engines:
            raise UsageError(f"the bundle has no engines for {backend}", where=str(self.path),
                             hint=f"it has them for {', '.join(engines) or 'nothing'}")  # fmt: skip
        if component not in engines[backend]:
            raise ArtefactError(f"the bundle has no {component}", where=str(self.path),
                                hint=f"it has {', '.join(engines[backend])}")  # fmt: skip
        return self.path / ENGINES_FOLDER / engines[backend][component]
