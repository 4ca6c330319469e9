"""One request on loaded engines: batch by batch, encode, start, denoise, decode; then the receipt."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from trtdiff import __version__
from trtdiff.backends.blame import first_non_finite
from trtdiff.engines import Engines
from trtdiff.errors import NonFiniteError, ProfileError, UsageError
from trtdiff.families.base import LatentFacts, TextOptions
from trtdiff.images import pixel_digest, save_png, to_images
from trtdiff.latent_log import ENTRY
from trtdiff.loop import Finished, check_finite, run_on_host, slots_of
from trtdiff.machine import peak_memory, this_machine
from trtdiff.masks import grey_warning
from trtdiff.receipt import RECEIPT_SCHEMA, PictureFacts, Receipt, SchedulerUse, StageTime
from trtdiff.request import Request, Shot
from trtdiff.sampler import SamplerTable, start_of_fraction
from trtdiff.starts import HalfDone, Sources, Started
from trtdiff.types import Array
from trtdiff.weighted import chunked

__all__ = ["Execution", "HalfDone", "Picture", "Progress", "finishing_table", "warnings_of"]

Text: TypeAlias = tuple[str | None, TextOptions]
"""A prompt, and how it is read."""
Progress: TypeAlias = Callable[[int, int], None]
"""Called after every execution of the denoiser: how many are done, how many there are."""


@dataclass(frozen=True)
class Picture:
    """One picture that is done."""

    index: int
    """Place in the request: prompt by prompt."""
    image: Image.Image
    latent: Array  # [C, h, w] float32, in the denoiser's space
    parameters: Mapping[str, Any]
    """What it was made with; `save` writes it into the file."""
    facts: PictureFacts

    def save(self, path: str | Path) -> None:
        """Write a PNG that carries its parameters, whole or not at all. Raises StorageError."""
        save_png(self.image, Path(path), self.parameters)


TRAINING_STEPS = 1000
"""Of a scheduler whose config does not say."""


class Execution:
    """The work of one request: its clock, its table, and what it has made so far."""

    def __init__(
        self,
        engines: Engines,
        request: Request,
        progress: Progress | None = None,
        *,
        watcher: Callable[[Array], None] | None = None,
        until: float | None = None,
        half_done: HalfDone | None = None,
    ) -> None:
        """`watcher` is given every call's latent [B, C, h, w], as a view that later calls overwrite.

        `until` ends at that fraction of the way, for `half_done`; `half_done` begins where another one ended.
        """
        self._engines, self._request = engines, request
        for tokenizer in engines.tokenizers:
            engines.session(tokenizer.replace("tokenizer", "text_encoder"))  # raises where the bundle has none
        self._watcher = watcher
        self._until, self._half_done = until, half_done
        self._table = _table_of(engines, request, until, half_done)
        engine_slots = engines.manifest.window
        self._slots = engine_slots or 1 if request.loop == "host" else slots_of(engine_slots, self._table)
        self._guidance = np.array(request.weights, np.float32)
        self._rows = _rows_of(engines, request) if request.weighted else 0
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._sources = Sources(engines, request, self._stage)
        shots = request.shots
        self._batches = [shots[first : first + request.batch] for first in range(0, len(shots), request.batch)]
        self._calls = len(self._batches) * self._table.calls
        self._done = 0
        self._progress = progress
        self._began = time.perf_counter()

    @property
    def batches(self) -> int:
        """How many batches the pictures are made in."""
        return len(self._batches)

    def pictures(self) -> Iterator[Picture]:
        """Make the pictures, each given out as soon as its batch is done."""
        for batch in self._batches:
            yield from self._make(batch)

    def half_done(self) -> HalfDone:
        """Run every batch without decoding, and give the latents that were reached."""
        assert self._until is not None, "made with a fraction to end at"  # noqa: S101
        latents = []
        for batch in self._batches:
            shots = self._filled(batch)
            start = self._sources.start(shots)
            conditions = self._conditions(shots, start)
            last = self._denoise(start, conditions).feeds
            reached = np.einsum("kb,kbchw->bchw", last["coefficients"], last["window"])
            if not np.isfinite(reached).all():
                self._look_again(shots, conditions)
                check_finite(reached, "the latent that was reached")
            latents.append(reached[: len(batch)])
        engines = self._engines
        by = {
            "bundle": engines.manifest.name, "bundle_digest": engines.digest, "precision": engines.precision,
            "scheduler": self._table.name, "steps": self._request.steps, "guidance": self._request.guidance,
            "seconds": time.perf_counter() - self._began,
        }  # fmt: skip
        return HalfDone(np.concatenate(latents), self._until, self._request, engines.manifest.facts.latent, by)

    def _filled(self, batch: Sequence[Shot]) -> list[Shot]:
        """Fill a batch that is smaller than the engines take; what is too much is cut off in the end."""
        return [*batch, *[batch[-1]] * (self._engines.least_batch - len(batch))]

    def receipt(self, pictures: Sequence[Picture]) -> Receipt:
        """Write down what was done."""
        engines, request, manifest = self._engines, self._request, self._engines.manifest
        first, engines.ran = not engines.ran, True
        return Receipt(
            schema=RECEIPT_SCHEMA,
            trtdiff=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            bundle=manifest.name,
            bundle_digest=engines.digest,
            family=manifest.family,
            checkpoint=manifest.checkpoint,
            dtype=manifest.dtype,
            precision=engines.precision,
            backend=engines.toolchain.backend,
            backend_version=engines.toolchain.version,
            device=engines.toolchain.device,
            engines=engines.used(),
            loop=request.loop,
            scheduler=SchedulerUse(
                name=self._table.name,
                class_name=engines.book.samplers[self._table.name].class_name,
                digest=self._table.digest,
                steps=request.steps,
                start=request.start,
                calls=self._table.calls,
                residual=self._table.residual,
            ),
            guidance=request.guidance,
            settings={**self._unusual(), **self._begun()},
            strength=request.strength,
            height=request.height,
            width=request.width,
            batches=tuple(map(len, self._batches)),
            pictures=tuple(picture.facts for picture in pictures),
            stages={name: StageTime.of(seconds) for name, seconds in self._seconds.items()},
            seconds=time.perf_counter() - self._began,
            first_run=first,
            threads=engines.threads,
            peak_memory=peak_memory(),
            machine=this_machine(),
            warnings=warnings_of(engines, request),
        )

    # --- one batch

    def _make(self, batch: Sequence[Shot]) -> Iterator[Picture]:
        shots = self._filled(batch)
        start = self._sources.start(shots, self._half_done)
        conditions = self._conditions(shots, start)
        finished = self._denoise(start, conditions)
        with self._stage("vae_decoder"):
            decoded = self._engines.session("vae_decoder").run(finished.feeds)
        if not (np.isfinite(decoded["latent"]).all() and np.isfinite(decoded["image"]).all()):
            self._blame(shots, conditions, finished.feeds, decoded)
        made = zip(batch, to_images(decoded["image"]), decoded["latent"], strict=False)
        for shot, image, latent in made:
            facts = PictureFacts(
                prompt=shot.prompt,
                negative=shot.negative if self._request.branches == 2 else None,
                seed=shot.seed,
                source=None if shot.source is None else pixel_digest(shot.source),
                mask=None if shot.mask is None else pixel_digest(shot.mask),
                sha256=pixel_digest(image),
            )
            yield Picture(shot.index, image, latent, self._parameters(facts), facts)

    def _denoise(self, start: Started, conditions: Mapping[str, Array], *, watch: bool = False) -> Finished:
        begin, rescale = start.start, self._request.rescale
        if self._request.loop == "host":
            denoiser = self._engines.session("denoiser")
            done = run_on_host(
                denoiser, self._table, begin, conditions, self._guidance, slots=self._slots, rescale=rescale,
                after=self._stepped,
            )  # fmt: skip
        else:
            loop = self._engines.loop(begin.noise.shape, conditions, self._slots // ENTRY)
            after = None if watch else self._stepped
            done = loop.run(self._table, begin, conditions, self._guidance, rescale=rescale, watch=watch, after=after)
        self._seconds["step"].extend(done.seconds)
        return done

    def _conditions(self, shots: Sequence[Shot], start: Started) -> dict[str, Array]:  # each [G, B, …]
        """Encode every distinct prompt once; the negative prompt is branch 0, for which no layer is skipped."""
        skipping = TextOptions(self._request.clip_skip, self._rows)
        rows: list[list[Text]] = [[(shot.prompt, skipping) for shot in shots]]
        if self._request.branches == 2:
            rows.insert(0, [(shot.negative, TextOptions(rows=self._rows)) for shot in shots])
        encoded = {text: self._encode(*text) for text in dict.fromkeys(text for row in rows for text in row)}
        facts, batch = self._engines.manifest.facts, len(shots)
        found = {
            name: np.stack([[encoded[text][name] for text in row] for row in rows])
            for name in next(iter(encoded.values()))
        }
        for name, branches in self._engines.family.conditions(self._request.wish, facts).items():  # [G, …]
            found[name] = np.repeat(branches[:, None], batch, axis=1)
        for name, images in start.channels.items():  # [B, …]
            found[name] = np.repeat(images[None], len(rows), axis=0)
        return {spec.name: found[spec.name] for spec in facts.conditions}

    def _encode(self, text: str | None, how: TextOptions) -> dict[str, Array]:
        before, known = time.perf_counter(), self._engines.encode.cache_info().misses
        encoded = self._engines.encode(text, how)
        if self._engines.encode.cache_info().misses > known:  # a remembered prompt is no measurement
            self._seconds["text_encoder"].append(time.perf_counter() - before)
        return encoded

    # --- what stands around it

    def _stepped(self, latent: Array | None = None) -> None:
        self._done += 1
        if self._watcher is not None and latent is not None:
            self._watcher(latent)
        if self._progress is not None:
            self._progress(self._done, self._calls)

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[name].append(time.perf_counter() - began)

    def _blame(
        self,
        shots: Sequence[Shot],
        conditions: Mapping[str, Array],
        feeds: Mapping[str, Array],
        decoded: Mapping[str, Array],
    ) -> None:
        """Say where the first value was lost: run the same batch again, looking at every prediction."""
        feeds = {name: array.copy() for name, array in feeds.items()}  # the loop writes into them again
        self._look_again(shots, conditions)
        check_finite(decoded["latent"], "the last latent")
        decoder = self._engines.session("vae_decoder")
        check_finite(decoded["image"], "the VAE decoder's picture", lambda: first_non_finite(decoder, feeds))
        raise NonFiniteError(
            "a picture was not finite, and is when it is made again", hint="the engine is not to be trusted"
        )

    def _look_again(self, shots: Sequence[Shot], conditions: Mapping[str, Array]) -> None:
        """Run a batch once more and look at every prediction, which the loop on the host has done already."""
        if self._request.loop == "device":
            self._denoise(self._sources.start(shots, self._half_done), conditions, watch=True)

    def _parameters(self, facts: PictureFacts) -> dict[str, Any]:
        request, manifest = self._request, self._engines.manifest
        return {
            "prompt": facts.prompt,
            "negative": facts.negative,
            "steps": request.steps,
            "scheduler": request.scheduler,
            "guidance": request.guidance,
            "seed": facts.seed,
            "size": f"{request.width}x{request.height}",
            "strength": request.strength,
            "source": facts.source,
            "mask": facts.mask,
            **self._unusual(),
            **self._begun(),
            "bundle": manifest.name,
            "bundle_digest": self._engines.digest,
            "checkpoint": manifest.checkpoint.name,
            "precision": self._engines.precision,
            "backend": self._engines.toolchain.backend,
            "version": f"trtdiff {__version__}",
        }

    def _begun(self) -> dict[str, Any]:
        """Say who began what was finished here."""
        begun = self._half_done
        return {} if begun is None else {"begun": {**begun.by, "at": begun.at}}

    def _unusual(self) -> dict[str, Any]:
        """Give what is not as it is where nobody asks for it."""
        request = self._request
        framing, size = request.framing, (request.height, request.width)
        values = {
            "true_guidance": (request.branch_guidance, request.guidance if request.branches == 2 else 1.0),
            "rescale": (request.rescale, 0.0),
            "clip_skip": (request.clip_skip, 0),
            "weighted": (request.weighted, False),
            "original_size": (framing.original, size),
            "crop": (framing.crop, (0, 0)),
            "target_size": (framing.target, size),
        }
        embedded = self._engines.manifest.facts.guided_by != "branches"
        return {
            name: value
            for name, (value, usual) in values.items()
            if value != usual and (embedded or name != "true_guidance")
        }


def _table_of(engines: Engines, request: Request, until: float | None, half_done: HalfDone | None) -> SamplerTable:
    """Give the table of a request, or the part of it that is run here."""
    if until is not None:
        return _own_table(engines, request).until(until, _training_steps(engines, request))
    if half_done is None:
        return _own_table(engines, request)
    latent = half_done.space
    table = finishing_table(engines, request, half_done.request, latent, half_done.at)
    wanted = (request.pictures, latent.channels, request.height // latent.downscale, request.width // latent.downscale)
    if half_done.latents.shape != wanted:
        raise UsageError(f"what is to be finished are latents {list(half_done.latents.shape)}, not {list(wanted)}",
                         hint="hand on what `begin` gave, as it is")  # fmt: skip
    return table


def finishing_table(engines: Engines, request: Request, begun: Request, space: LatentFacts, at: float) -> SamplerTable:
    """Give the table of a request whose first part another model makes, or has made, of the request `begun`.

    Raises UsageError where the two do not fit: other prompts, seeds or sizes, another latent `space`, a mask.
    """
    own = engines.manifest.facts.latent
    for name in ("channels", "downscale", "scaling", "shift"):
        if getattr(own, name) != getattr(space, name):
            raise UsageError(
                f"{engines.manifest.name} cannot finish these latents: its own have {name} {getattr(own, name):g}, "
                f"these {getattr(space, name):g}", hint="let a model of the same family finish them"
            )  # fmt: skip
    if begun.sources or request.sources:
        raise UsageError("a second model finishes pictures that were begun from text", hint="leave the image out")
    for name in ("prompts", "count", "seed", "height", "width"):
        if getattr(request, name) != getattr(begun, name):
            raise UsageError(
                f"begun were pictures of {name} {getattr(begun, name)!r}, to finish are {getattr(request, name)!r}",
                hint="finish with the same prompts, count, seed, height and width",
            )
    start = start_of_fraction(_own_table(engines, request), at, _training_steps(engines, request))
    tokens = engines.manifest.facts.image_tokens(request.height, request.width)
    return engines.book.table(request.scheduler, request.steps, start, tokens).taken_over()


def _own_table(engines: Engines, request: Request) -> SamplerTable:
    facts = engines.manifest.facts
    table = engines.book.masked_table if request.masks and "inpaint" in facts.modes else engines.book.table
    tokens = facts.image_tokens(request.height, request.width)
    return table(request.scheduler, request.steps, request.start, tokens)


def _training_steps(engines: Engines, request: Request) -> int:
    config = engines.book.samplers[request.scheduler].config["config"]
    return int(config.get("num_train_timesteps", TRAINING_STEPS))


def _rows_of(engines: Engines, request: Request) -> int:
    """Give the rows that the longest prompt needs, and refuse more than the engines take."""
    texts = [*request.prompts, *(request.negatives if request.branches == 2 else ())]
    tokenizers = engines.tokenizers.values()
    rows = max(len(chunked(text or "", tokenizer).ids) for text in texts for tokenizer in tokenizers)
    limit = max(tokenizer.limit for tokenizer in tokenizers)
    span = engines.manifest.profile.dims["context"]
    if rows * limit not in span:
        raise ProfileError(
            f"the longest prompt has {rows} rows of {limit} tokens, the engines take {span} tokens", where="--weighted",
            hint=f"build with --profile context={limit}:{limit}:{rows * limit}, or shorten the prompt"
        )  # fmt: skip
    return rows


def warnings_of(engines: Engines, request: Request) -> tuple[str, ...]:
    """Say what will not be followed as meant: words that text encoders do not see, masks that are none, idle options.

    Raises nothing: what cannot be meant at all was refused before.
    """
    found: list[str] = []
    if request.branches == 1:
        off = f"guidance is {request.branch_guidance:g}"
        found += [f"the negative prompt is not used: {off}"] if any(request.negatives) else []
        found += [f"rescale is not used: {off}"] if request.rescale else []
    texts = [("the prompt", text) for text in request.prompts]
    if request.branches == 2:
        texts += [("the negative prompt", text) for text in request.negatives if text]
    for what, text in () if request.weighted else texts:
        cuts = {name: _short(tokenizer.cut(text)) for name, tokenizer in engines.tokenizers.items()}
        whole = [name for name, cut in cuts.items() if not cut]
        for cut in dict.fromkeys(filter(None, cuts.values())):
            by = [name for name in cuts if cuts[name] == cut]
            but = f" ({_named(whole)} reads all of them)" if whole else ""
            found.append(
                f"{what} {text[:40]!r}… is longer than {engines.tokenizers[by[0]].limit} tokens of {_named(by)}; "
                f"these words were cut: {cut}{but}"
            )
    masks = {id(mask): grey_warning(mask) for mask in request.masks}
    return tuple(dict.fromkeys([*found, *filter(None, masks.values())]))


def _named(several: Sequence[str]) -> str:
    return " and ".join(several)


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
