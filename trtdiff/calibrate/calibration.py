"""The calibration: the checkpoint's own denoising loop in float32, and passes over its samples, each with observers.

    range     largest magnitude and squares of every value, by timestep band; largest magnitude of channels
    error     for method `mse`: what rounding the inputs of layers loses, at several clips around their largest
              magnitude
    count     for method `percentile`: how many elements lie beyond edges of the grid
    noise     what rounding its operands does to the result of every layer, on a few samples a band, of them on the
              guidance branch of the prompt

The first pass runs the loop and records what it computed; the others replay it and execute only the samples. Every pass
sees all components: text encoders, then the denoiser, then the VAE. What was seen is in a cache at any moment, so that
an interruption loses no more than one sample.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.calibrate.cache import (
    CACHE_SCHEMA,
    COUNT,
    ERROR,
    NOISE,
    RANGE,
    Cache,
    Component,
    Data,
    Picture,
    Run,
    model_of,
    require_same,
    require_same_model,
    sealed,
    write_cache,
)
from trtdiff.calibrate.loop import LATE, VAE, Loop, compile_table
from trtdiff.calibrate.measurements import Counts, LayerNoise, Measurement, Ranges, RoundingErrors, finished
from trtdiff.calibrate.opened import Opened
from trtdiff.calibrate.recording import Recording
from trtdiff.calibrate.samples import Sample, bands_of, check_bands, choose_samples, one_a_band, prompts_of
from trtdiff.calibrate.settings import (
    CALIBRATION_FILE,
    PASS_COST,
    WRITTEN_PER_SECOND,
    CalibrationSettings,
    execution_seconds,
    passes_of,
)
from trtdiff.digest import digest
from trtdiff.errors import ArtefactError
from trtdiff.estimate import float32_weights
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.families import family
from trtdiff.machine import installed
from trtdiff.passes.eight_bits import EightBits
from trtdiff.recipes.quantization import Method
from trtdiff.records import read_record

Progress = Callable[[int, int], None]
_LIBRARIES = ("trtdiff", "onnx", "onnx-ir", "numpy", "diffusers", "torch", "tokenizers", "pillow")
SAVE_EVERY = 5.0
"""Seconds between two writings of a cache."""


def calibrate_export(*, export: str, out: str, settings: Mapping[str, Any], progress: Progress) -> dict[str, Any]:
    """Calibrate an export into `out`/calibration.json; `settings` are those of CalibrationSettings.

    `progress` counts what is done, weighted by the time that it takes. The same settings give the same bytes on one
    machine. Raises NonFiniteError where the checkpoint overflows float32 itself, UsageError for settings that cannot
    be meant.
    """
    calibration = Calibration(
        Path(export),
        msgspec.convert(dict(settings), CalibrationSettings),
        Path(out, "calibrating"),
        progress=progress,
    )
    try:
        cache = calibration.run()
    finally:
        calibration.forget()
    write_cache(Path(out, CALIBRATION_FILE), cache)
    run = cache.runs[0]
    return {
        "realised": {
            "samples": run.samples,
            "pictures": len(run.pictures),
            "rows": {name: component.rows for name, component in cache.components.items()},
            "layers": {name: len(component.layers) for name, component in cache.components.items()},
        }
    }


class Calibration:
    """One calibration of one export, on its way."""

    def __init__(
        self,
        export: Path,
        settings: CalibrationSettings,
        work: Path,
        *,
        start: Cache | None = None,
        progress: Progress = lambda done, total: None,  # noqa: ARG005
        save: Callable[[Cache], None] = lambda cache: None,  # noqa: ARG005
    ) -> None:
        """`work` is a folder of ours for the recording and scratch files; `start` an unfinished cache to go on from.

        `save` is given the cache every few seconds, and when `run` ends or is interrupted and has seen something.
        Raises UsageError where a band of the schedule would stay empty, ArtefactError where `start` is of something
        else.
        """
        self._export, self._settings, self._work = export, settings, work
        self._manifest = read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)
        self._graphs = {component.name: export / component.graph for component in self._manifest.components}
        self._weights = float32_weights(export, self._manifest)
        shutil.rmtree(work / _SCRATCH, ignore_errors=True)  # of one that was killed
        self._table = compile_table(self._manifest, settings.steps, work / "table", (settings.height, settings.width))
        bands = bands_of(self._manifest.scheduler, settings.bands)
        check_bands(self._table.timesteps.tolist(), bands, settings.steps,
                    lambda: self._good_steps(bands))  # fmt: skip
        samples = choose_samples(self._table.timesteps.tolist(), bands, settings.samples)
        prompts = prompts_of(settings.prompts, 1 + max(sample.picture for sample in samples))
        self._samples: dict[str, Sequence[Sample]] = {RANGE: samples, ERROR: samples, COUNT: samples}
        self._samples[NOISE] = one_a_band(samples, settings.sensitivity)
        self._versions = {**installed(_LIBRARIES), OnnxRuntime.name: OnnxRuntime().toolchain().version}
        recording = Recording(work / self._key()[:16])
        self._loop = Loop(export, self._manifest, settings, self._table, pictures=prompts, recording=recording)
        self._cache = self._begin(bands, start)
        self._sessions: list[tuple[Opened, Sequence[str]]] = []
        self._save, self._saved = save, time.monotonic()
        self._progress, self._spent, self._total = progress, 0.0, self._expected()

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to do."""
        return self._cache.complete

    @property
    def seconds(self) -> float:
        """About how long what is left takes on two cores."""
        return self._total

    def _key(self) -> str:
        """Digest of all that determines the loop: what a recording belongs to."""
        settings = {name: value for name, value in asdict(self._settings).items() if name not in _BESIDES}
        return digest([asdict(model_of(self._manifest)), msgspec.to_builtins(settings), self._versions])

    def run(self) -> Cache:
        """Carry out what is left, and give the finished cache, not yet sealed to a file."""
        try:
            for kind in () if self.complete else self._kinds():
                for names in self._stages():
                    self._stage(kind, names)
            self._spend(self._total)
        finally:
            self._cache = self.cache()
            self._sessions = []
            if any(count for counts in self._cache.runs[0].done.values() for count in counts.values()):
                self._save(self._cache)
        whole = {name: finished(component) for name, component in self._cache.components.items()}
        self._cache = sealed(replace(self._cache, components=whole))
        self._save(self._cache)
        return self._cache

    def cache(self) -> Cache:
        """Give the cache as it is by now."""
        components, done = dict(self._cache.components), dict(self._cache.runs[0].done)
        for session, keys in self._sessions:
            components[session.component] = session.seen()
            for key in keys:
                done[key] = {**done[key], session.component: session.done}
        return replace(self._cache, components=components, runs=(replace(self._cache.runs[0], done=done),))

    def forget(self) -> None:
        """Remove the working folder."""
        shutil.rmtree(self._work, ignore_errors=True)

    # --- what there is to do

    def _kinds(self) -> tuple[str, ...]:
        """Give the passes, in order."""
        return passes_of(self._settings.method, noise=self._settings.sensitivity > 0)

    def _keys(self, kind: str) -> list[str]:
        """Give the names under which a cache has what a pass has done: one a type of 8 bits where it is about that."""
        return [f"{kind} {name}" for name in self._settings.formats] if kind in {ERROR, NOISE} else [kind]

    def _stages(self) -> list[list[str]]:
        """Give the components that are open together, in the order in which the loop needs them."""
        text = [name for name in self._graphs if name not in LATE]
        return [text, *([name] for name in LATE if name in self._graphs)]

    def _wanted(self, kind: str, component: str) -> int:
        if component == "denoiser":
            return len(self._samples[kind])
        whole = len(self._loop.pictures) if component in VAE else len(self._loop.texts)
        return min(1, whole) if kind == NOISE else whole

    def _begin(self, bands: tuple[tuple[int, int], ...], start: Cache | None) -> Cache:
        """Give an empty cache, or the one to go on from with what is asked for now added to what it wants."""
        settings, manifest = self._settings, self._manifest
        wanted = {
            key: {name: self._wanted(kind, name) for name in self._graphs}
            for kind in self._kinds()
            for key in self._keys(kind)
        }
        data = Data(
            prompts=digest(list(settings.prompts)), prompt_count=len(settings.prompts), negative=settings.negative,
            steps=settings.steps, guidance=settings.guidance, height=settings.height, width=settings.width,
            scheduler=digest(manifest.scheduler), bands=bands,
        )  # fmt: skip
        counts = [sum(sample.band == band for sample in self._samples[RANGE]) for band in range(len(bands))]
        pictures = tuple(Picture(settings.seed + number, prompt) for number, prompt in enumerate(self._loop.pictures))
        run = Run(settings.samples, tuple(counts), pictures, {}, wanted)
        method = settings.method if settings.sensitivity else ""
        fresh = Cache(CACHE_SCHEMA, "", model_of(manifest), data, method, (run,),
                      dict.fromkeys(self._graphs, Component()), self._versions)  # fmt: skip
        if start is not None:
            fresh = _going_on(start, fresh, manifest)
        first = fresh.runs[0]
        zeros = {key: dict.fromkeys(self._graphs, 0) for key in first.wanted}
        return replace(fresh, runs=(replace(first, done={**zeros, **first.done}),))

    def _good_steps(self, bands: Sequence[tuple[int, int]]) -> list[int]:
        """Find step counts, up to 100, that reach every band: by asking the scheduler itself."""
        from trtdiff.calibrate.samples import band_of
        from trtdiff.export.schedulers import MAX_STEPS, make_scheduler

        facts = self._manifest.facts
        size = (self._settings.height, self._settings.width)
        pipeline = self._manifest.checkpoint.pipeline
        call, good = family(self._manifest.family).schedule_call(pipeline, facts.image_tokens(*size)), []
        for steps in range(1, MAX_STEPS + 1):
            scheduler = make_scheduler(self._manifest.scheduler, call=call)
            try:
                call.set_timesteps(scheduler, steps)
                found = {band_of(float(time_), bands) for time_ in call.timesteps(scheduler, None)}
            except Exception:  # noqa: BLE001, S112 - a scheduler refuses a step count in its own way
                continue
            if len(found) == len(bands):
                good.append(steps)
        return good

    # --- doing it

    def _stage(self, kind: str, names: Sequence[str]) -> None:
        """Take a pass through components that are open together; formats that stand equally far go together."""
        if not names:
            return
        groups: dict[int, list[str]] = {}
        for key in self._keys(kind):
            groups.setdefault(self._cache.runs[0].done[key].get(names[0], 0), []).append(key)
        for done, keys in groups.items():
            missing = kind == RANGE and not self._loop.recorded(names[0])
            if done >= self._wanted(kind, names[0]) and not missing:
                continue
            with self._opened(kind, names, keys, done) as sessions:
                if missing or any(session.measures for session in sessions.values()):
                    self._execute(kind, sessions)
                for session in sessions.values():  # where there is nothing to see, that was seen
                    while session.done < self._wanted(kind, session.component):
                        session.count()

    def _execute(self, kind: str, sessions: Mapping[str, Opened]) -> None:
        first = next(iter(sessions.values()))
        done, wanted = first.done, self._wanted(kind, first.component)

        def left(number: int) -> bool:
            return done <= number < wanted

        if first.component == "denoiser":
            places = {(one.picture, one.call): number for number, one in enumerate(self._samples[kind])}
            bands = {(one.picture, one.call): one.band for one in self._samples[kind]}
            few = kind == NOISE
            self._loop.denoise(first, lambda *at: bands[at] if at in places and left(places[at]) else None, few=few)
        elif first.component == "vae_decoder":
            self._loop.decode(first, left)
        elif first.component == "vae_encoder":
            self._loop.encode_images(first, left)
        else:
            self._loop.encode_texts(sessions, left)

    @contextmanager
    def _opened(self, kind: str, names: Sequence[str], keys: Sequence[str], done: int) -> Iterator[dict[str, Opened]]:
        """Open components; on the way out, keep what they saw and let go of their memory and files."""
        sessions: dict[str, Opened] = {}
        scratch = self._work / _SCRATCH
        formats = [name for name in self._settings.formats if f"{kind} {name}" in keys]
        try:
            for name in names:
                seen = self._cache.components[name]
                bands = len(self._cache.data.bands) if name == "denoiser" else 1
                measurement = measurement_of(kind, seen, bands=bands, formats=formats, method=self._settings.method)
                sessions[name] = Opened(
                    name, self._graphs[name], scratch / name, measurement, seen, done=done,
                    after=lambda component: self._executed(kind, component),
                )  # fmt: skip
                self._sessions.append((sessions[name], keys))
                self._spend(self._opening(name))
            yield sessions
        finally:
            self._cache = self.cache()
            self._sessions = []
            for session in sessions.values():
                session.close()
            shutil.rmtree(scratch, ignore_errors=True)

    def _executed(self, kind: str, component: str) -> None:
        self._spend(self._cost(kind, component))
        if time.monotonic() - self._saved > SAVE_EVERY:
            self._save(self.cache())
            self._saved = time.monotonic()

    def _spend(self, seconds: float) -> None:
        self._spent = min(self._spent + seconds, self._total)
        self._progress(int(1000 * self._spent), int(1000 * self._total))

    def _opening(self, component: str) -> float:
        """Estimate the seconds until a component is open: weights are written in float32, the graph is optimized."""
        return 2 + self._weights[component] / WRITTEN_PER_SECOND

    def _cost(self, kind: str, component: str) -> float:
        """Estimate the seconds of one execution."""
        seconds = execution_seconds(component, self._weights[component], self._settings.height * self._settings.width)
        return PASS_COST[kind] * (0.002 + seconds)

    def _expected(self) -> float:
        """Estimate the seconds of all that is left to do."""
        whole, done = 0.0, self._cache.runs[0].done
        for kind in self._kinds():
            for name in self._graphs:
                counts = [done[key].get(name, 0) for key in self._keys(kind)]
                wanted = self._wanted(kind, name)
                branches = self._settings.branches if name == "denoiser" and kind != NOISE else 1
                for count in set(counts) - {wanted}:
                    left = wanted - count
                    whole += self._opening(name)
                    if kind == RANGE and name == "denoiser":  # every step is executed, sample or not
                        left = round(left / wanted * len(self._loop.pictures) * self._table.calls)
                    whole += left * branches * self._cost(kind, name)
        return whole


_SCRATCH = "scratch"
_BESIDES = ("method", "formats", "sensitivity")
"""Settings that the loop does not depend on."""


def measurement_of(
    kind: str, seen: Component, *, bands: int, formats: Sequence[EightBits], method: Method
) -> Measurement:
    """Give what a pass measures of a component of which this much was seen before."""
    if kind == RANGE:
        return Ranges(bands, layers_too=True)
    if kind == ERROR:
        return RoundingErrors(seen, formats)
    return Counts(seen) if kind == COUNT else LayerNoise(seen, formats, method)


def _going_on(start: Cache, fresh: Cache, manifest: ExportManifest) -> Cache:
    """Give an unfinished cache, wanting what a fresh one wants too. Raises ArtefactError where they do not match."""
    hint = "go on with the options that it was begun with, or begin anew with --force"
    require_same_model(start, manifest)
    require_same(asdict(start.data), asdict(fresh.data), "of other data", hint=hint)
    before, now = (cache.versions.get("trtdiff", "") for cache in (start, fresh))
    require_same({"trtdiff": before}, {"trtdiff": now}, "of another version", hint=hint)
    if len(start.runs) != 1:
        raise ArtefactError("the calibration was merged from several, and cannot be added to",
                            where="calibration cache: runs", hint="add to its parts, and merge them again")  # fmt: skip
    (old,), (new,) = start.runs, fresh.runs
    which = ("samples", "bands", "pictures")
    require_same({name: getattr(old, name) for name in which}, {name: getattr(new, name) for name in which},
                 "of other samples", hint=hint)  # fmt: skip
    noisy = [key for key in new.wanted if key.startswith(NOISE)]
    again = noisy and (start.method != fresh.method or any(
        old.wanted.get(key, new.wanted[key]) != new.wanted[key] for key in noisy
    ))  # fmt: skip
    components, done, wanted = dict(start.components), dict(old.done), {**old.wanted, **new.wanted}
    if again:
        components = {name: replace(component, noise={}) for name, component in components.items()}
        done = {key: counts for key, counts in done.items() if not key.startswith(NOISE)}
        wanted = {key: counts for key, counts in wanted.items() if not key.startswith(NOISE) or key in noisy}
    return replace(
        start,
        digest="",
        method=fresh.method if noisy else start.method,
        components=components,
        runs=(replace(old, done=done, wanted=wanted),),
        versions=fresh.versions,
    )
