"""A bundle made ready to run: sessions, tokenizers, sampler tables, and what is kept from one request to the next."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from trtdiff.backends import BACKENDS, Session, Toolchain
from trtdiff.backends import backend as backend_called
from trtdiff.backends.blame import Noting
from trtdiff.bundle import BUNDLE_FILE, Bundle, BundleManifest
from trtdiff.errors import ArtefactError, MissingDependency, TrtdiffError, UsageError
from trtdiff.families import family
from trtdiff.families.base import PLAIN, Reading, TextOptions
from trtdiff.loop import DenoisingLoop, check_finite
from trtdiff.machine import usable_cores
from trtdiff.receipt import EngineUse
from trtdiff.sampler_book import SamplerBook
from trtdiff.tokens import Tokenizer
from trtdiff.types import Array

LATE = ("vae_encoder",)
"""Components loaded when first needed."""
REMEMBERED_PROMPTS = 64
"""Encoded prompts kept for later requests."""
REMEMBERED_SHAPES = 4
"""Sets of loop buffers kept for later requests of the same shape."""


class Engines:
    """Everything of a bundle that a run uses. Not thread-safe."""

    def __init__(self, bundle: Bundle, backend: str, threads: int | None) -> None:
        """Load what every run needs. Raises UsageError, ArtefactError, MissingDependency."""
        compiler = backend_called(backend)
        if not bundle.components(backend):
            raise UsageError(f"the bundle {bundle.manifest.name} has no engines for {backend}", where=str(bundle.path),
                             hint=f"it has them for {', '.join(bundle.manifest.engines) or 'nothing'}")  # fmt: skip
        _require_runnable(bundle, backend)
        self.bundle = bundle
        self.manifest: BundleManifest = bundle.manifest
        self.digest = hashlib.sha256((bundle.path / BUNDLE_FILE).read_bytes()).hexdigest()
        self.threads = threads
        self.toolchain: Toolchain = compiler.toolchain()
        self._compiler = compiler
        self.family = family(self.manifest.family)
        facts = self.manifest.facts.tokens
        self.tokenizers = {name: Tokenizer.open(bundle.tokenizer(name), facts[name]) for name in facts}
        self.book = SamplerBook.open(bundle.samplers)
        self._sessions: dict[str, Session] = {}
        self._seconds: dict[str, float] = {}
        self.encode = lru_cache(REMEMBERED_PROMPTS)(self._encode)
        self._loops: OrderedDict[Any, DenoisingLoop] = OrderedDict()
        self.ran = False
        try:
            for component in bundle.components(backend):
                if component not in LATE:
                    self.session(component)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, backend: str | None, threads: int | None) -> Self:
        """Open a bundle folder with a backend, or with the best that it has engines for and this machine can run."""
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads cannot compute anything", hint="give 1 or more, or leave it out")
        if threads is not None and threads > (limit := 4 * usable_cores()):
            raise UsageError(f"{threads} threads on {usable_cores()} cores would wait for each other",
                             hint=f"give at most {limit}, or leave it out")  # fmt: skip
        bundle = Bundle.open(path)
        return cls(bundle, backend or runnable_backend(bundle), threads)

    @property
    def backend(self) -> str:
        """The backend whose engines these are."""
        return self._compiler.name

    @property
    def precision(self) -> str:
        """Precision of these engines."""
        return self.manifest.precision[self._compiler.name]

    @property
    def least_batch(self) -> int:
        """The smallest batch that the engines take."""
        span = self.manifest.profile.dims.get("batch")
        return span.min if span else 1

    def session(self, component: str) -> Session:
        """Give the engine of a component, loaded on first use."""
        if component not in self._sessions:
            began = time.perf_counter()
            folder = self.bundle.engine(self._compiler.name, component)
            self._sessions[component] = self._compiler.load(folder, threads=self.threads)
            self._seconds[component] = time.perf_counter() - began
        return self._sessions[component]

    def used(self) -> dict[str, EngineUse]:
        """Give the key and load time of every engine that is loaded."""
        keys = self.manifest.engines[self._compiler.name]
        return {name: EngineUse(keys[name], seconds) for name, seconds in self._seconds.items()}

    def loop(self, noise: tuple[int, ...], conditions: Mapping[str, Array], window: int) -> DenoisingLoop:
        """Give the buffers for this shape: those of an earlier request, or new ones in place of the longest unused."""
        shapes = {name: values.shape for name, values in conditions.items()}
        key = (noise, tuple(shapes.items()), window)
        if key not in self._loops:
            while len(self._loops) >= REMEMBERED_SHAPES:
                self._loops.popitem(last=False)
            self._loops[key] = DenoisingLoop(self.session("denoiser"), noise, shapes, window)
        self._loops.move_to_end(key)
        return self._loops[key]

    def close(self) -> None:
        """Free everything; closing twice is fine."""
        self._loops.clear()
        self.encode.cache_clear()
        while self._sessions:
            self._sessions.popitem()[1].close()

    def _encode(self, prompt: str | None, how: TextOptions = PLAIN) -> dict[str, Array]:
        """Give the conditions of one prompt by name, each without the batch dimension. `encode` remembers them.

        None is a negative prompt that nobody gave.

        Every prompt is encoded alone, so that its numbers do not depend on what it was asked together with.
        """
        noting = {name: Noting(session) for name, session in self._sessions.items()}
        texts = [prompt] * self.least_batch
        encoded = self.family.encode(texts, Reading(self.manifest.facts, self.tokenizers, noting, how))

        def blame() -> str:
            told = {name: session.first_non_finite() for name, session in noting.items()}
            return "; ".join(f"{name}: {words}" for name, words in told.items() if words)

        for name, values in encoded.items():
            check_finite(values[:1], f"{name} of the prompt {(prompt or '')[:60]!r}", blame)
        return {name: values[0] for name, values in encoded.items()}


def runnable_backend(bundle: Bundle) -> str:
    """Give the best backend that a bundle has engines for and that this machine can run, as BACKENDS orders them.

    Raises MissingDependency, or ArtefactError where it is the engines that do not fit, with the reason of each.
    """
    errors: list[TrtdiffError] = []
    for name in sorted(bundle.manifest.engines, key=lambda name: (*BACKENDS, name).index(name)):
        try:
            _require_runnable(bundle, name)
        except (MissingDependency, ArtefactError, UsageError) as error:
            errors.append(error)
        else:
            return name
    if len(errors) == 1:
        raise errors[0]
    kind = next((type(error) for error in errors if isinstance(error, ArtefactError)), MissingDependency)
    raise kind("this machine can run none of the bundle's engines:" + "".join(f"\n    {e.message}" for e in errors),
               where=str(bundle.path), hint="build for this machine with: trtdiff build --target cpu")  # fmt: skip


def _require_runnable(bundle: Bundle, name: str) -> None:
    """Refuse engines that this machine, or the installed library, cannot run; looks at manifests alone."""
    compiler = backend_called(name)
    if reason := compiler.runnable():
        raise MissingDependency(
            f"engines for {name} do not run here: {reason}", where=str(bundle.path),
            hint="run another backend's engines (--backend), or build for this machine with: trtdiff build --target cpu"
        )  # fmt: skip
    for component in bundle.components(name):
        if reason := compiler.mismatch(bundle.engine_manifest(name, component).spec):
            raise ArtefactError(
                f"the {component} for {name} does not run here: {reason}",
                where=str(bundle.path / BUNDLE_FILE), hint="build again on this machine, or for it"
            )  # fmt: skip
