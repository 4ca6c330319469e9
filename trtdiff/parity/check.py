"""The whole proof: every component at several shapes, the trajectory step by step, and the pictures."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from trtdiff.backends import backend as backend_named
from trtdiff.checkpoint import Checkpoint
from trtdiff.engines import Engines
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.execution import Execution
from trtdiff.families import family
from trtdiff.families.base import ComponentSpec
from trtdiff.latent_log import ENTRY
from trtdiff.machine import available_memory
from trtdiff.parity.compare import ParityResult
from trtdiff.parity.components import Case, check_component
from trtdiff.parity.pictures import check_pictures, compiled_request
from trtdiff.parity.plan import Cost, cost
from trtdiff.parity.reference import PictureRequest, Reference, require_pytorch
from trtdiff.types import Point, Tolerance

POINTS: tuple[Point, ...] = ("min", "opt", "max")
PROMPTS = ("a handwritten seven, red ink on a yellow page", "a photograph of a lighthouse in a storm")
"""Pictures are made of these where no prompt is given: two, so that a batch is compared."""
MARGIN = 1.5
"""Memory is refused where the estimate times this is not there: allocators and libraries take their own."""


def parse_points(text: str) -> tuple[Point, ...]:
    """Read `min,opt,max` or a part of it."""
    asked = [word.strip() for word in text.split(",") if word.strip()]
    if unknown := [word for word in asked if word not in POINTS]:
        raise UsageError(
            f"no shape is called {', '.join(unknown)}", where="--shapes", hint=f"known: {', '.join(POINTS)}"
        )
    if not asked:
        raise UsageError("no shape to compare at", where="--shapes", hint=f"known: {', '.join(POINTS)}")
    return tuple(point for point in POINTS if point in asked)


@dataclass(frozen=True)
class Planned:
    """One component at one shape, before it is run."""

    case: Case
    point: Point
    cost: Cost
    calls: int
    """Calls of the bare module on the reference's side; the engine does as much in one."""
    scores: bool
    """Whether the engine holds whole matrices of attention scores."""

    @property
    def peak_bytes(self) -> int:
        """Memory above the weights; the engine's side runs all branches at once."""
        return self.calls * (self.cost.activation_bytes + self.scores * self.cost.attention_bytes)

    @property
    def flops(self) -> int:
        """Work of both sides."""
        return 2 * self.calls * self.cost.flops


@dataclass(frozen=True)
class Report:
    """What `check` found."""

    bundle: str
    checkpoint: str
    backend: str
    points: tuple[Point, ...]
    request: str
    """What the pictures were made with."""
    results: tuple[ParityResult, ...]
    dtype: str = "stored"
    """Type that the reference's weights were rounded to, as the export was asked to; `stored`: none."""
    noisiest: Mapping[str, tuple[tuple[str, float, float], ...]] = field(default_factory=dict)
    """Component → layers in 8 bits that lose most, worst first: module, decibels, share of the multiply-adds."""

    @property
    def passed(self) -> bool:
        """Something was compared, and all of it was within the tolerance."""
        return bool(self.results) and all(result.passed for result in self.results)

    def json(self) -> dict[str, Any]:
        """Give the report as JSON-like values; a difference that has no number is null."""
        rows = [
            {
                **asdict(result),
                "needed": result.needed if math.isfinite(result.needed) else None,
                "passed": result.passed,
            }
            for result in self.results
        ]
        return {
            "bundle": self.bundle,
            "checkpoint": self.checkpoint,
            "backend": self.backend,
            "weights": self.dtype,
            "shapes": list(self.points),
            "pictures": self.request,
            "passed": self.passed,
            "verdict": self.verdict,
            "noisiest": {name: [list(row) for row in rows] for name, rows in self.noisiest.items()},
            "results": rows,
        }

    @property
    def verdict(self) -> str:
        """One line; says which shapes were left out."""
        worst = [result for result in self.results if not result.passed]
        left = [point for point in POINTS if point not in self.points]
        scope = f"at the {', '.join(self.points)} shapes" + (f" only ({', '.join(left)} not checked)" if left else "")
        if not any(result.name.startswith("image to image") for result in self.results):
            scope += ", image to image not checked"
        if self.dtype in {"float16", "bfloat16"}:
            scope += f", PyTorch's weights rounded to {self.dtype} as the export's are"
        if self.passed:
            return f"parity holds {scope}: {len(self.results)} comparisons"
        return f"parity FAILED {scope}: {len(worst)} of {len(self.results)} comparisons are outside the tolerance"


class Check:
    """A bundle against the checkpoint it was made from."""

    def __init__(self, bundle: Path, checkpoint: Checkpoint, *, backend: str | None = None) -> None:
        """Open both. Raises ArtefactError where the bundle was made from another checkpoint, MissingDependency."""
        require_pytorch()
        self.engines = Engines.open(bundle, backend, None)
        self.checkpoint = checkpoint
        self.manifest = self.engines.manifest
        self.family = family(self.manifest.family)
        theirs, ours = checkpoint.origin().digest, self.manifest.checkpoint.digest
        if theirs != ours:
            self.engines.close()
            raise ArtefactError(
                f"the bundle was made from another checkpoint: its digest is {ours[:12]}…, this one's {theirs[:12]}…",
                where=f"{bundle}/bundle.json: checkpoint.digest",
                hint="compare with the checkpoint it was made from, or export and build this one",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.engines.close()

    def specs(self) -> list[ComponentSpec]:
        """Components that the bundle has engines for."""
        have = self.engines.bundle.components(self.engines.toolchain.backend)
        return [spec for spec in self.family.components(self.checkpoint.configs) if spec.name in have]

    def request(
        self,
        *,
        prompts: Sequence[str] = (),
        negative: str = "",
        steps: int = 20,
        guidance: float | None = None,
        seed: int = 0,
        scheduler: str | None = None,
    ) -> PictureRequest:
        """Say which pictures are compared. Raises UsageError for what the bundle cannot run, before anything is run."""
        facts, opt = self.manifest.facts, self.manifest.profile.sizes("opt")
        request = PictureRequest(
            prompts=tuple(prompts) or PROMPTS,
            negative=negative,
            seed=seed,
            steps=steps,
            guidance=facts.guidance if guidance is None else guidance,
            height=opt["height"],
            width=opt["width"],
            scheduler=scheduler or self.manifest.samplers[0],
        )
        Execution(self.engines, compiled_request(self.engines, request))
        return request

    def source(self, request: PictureRequest) -> Image.Image | None:
        """Give the picture that image-to-image starts from; None where the bundle has no step for it to take."""
        if "vae_encoder" not in {spec.name for spec in self.specs()}:
            return None
        image = _source(request)
        try:
            Execution(self.engines, compiled_request(self.engines, request, image))
        except UsageError:
            return None
        return image

    def plan(self, points: Sequence[Point], *, batch: int | None = None) -> list[Planned]:
        """Count what every comparison will take, largest shape first; `batch` in place of the profile's."""
        planned = []
        scores = not backend_named(self.engines.toolchain.backend).fuses_attention
        for point in sorted(points, key=POINTS.index, reverse=True):
            profile = self.manifest.profile
            most = profile.sizes("max")["branches"]  # where there are two, the difference magnifies errors
            sizes = {**profile.sizes(point), "window": self.manifest.window or ENTRY, "branches": most}
            sizes |= {} if batch is None else {"batch": batch}
            for spec in self.specs():
                case = Case(spec, self.manifest.facts, sizes)
                calls = sizes["branches"] if spec.name == "denoiser" else 1
                needs = cost(spec, self.checkpoint.configs[spec.folder], sizes)
                planned.append(Planned(case, point, needs, calls, scores))
        return planned

    def picture_flops(self, request: PictureRequest) -> int:
        """Count the arithmetic of the pictures, both sides, with and without an image to start from."""
        flops = {item.case.spec.name: item.flops for item in self.plan(("opt",), batch=len(request.prompts))}
        steps = request.steps * (1 + request.strength * ("vae_encoder" in flops))
        return int(sum(flops.values()) + steps * flops.get("denoiser", 0))

    def refuse_beyond_memory(self, planned: Sequence[Planned], request: PictureRequest) -> None:
        """Raise UsageError where the machine lacks the memory for the largest comparison, pictures among them."""
        pictures = self.plan(("opt",), batch=len(request.prompts))
        largest = max([*planned, *pictures], key=lambda item: item.peak_bytes)
        needed = int(largest.peak_bytes * MARGIN) + 2 * self._weights()
        if needed > (there := available_memory()):
            raise UsageError(
                f"comparing at the {largest.point} shape takes about {needed / 1e9:.1f} GB, "
                f"{there / 1e9:.1f} GB are available",
                where=f"{largest.case.spec.name} at {largest.case.at}",
                hint="leave that shape out (--shapes opt), or build with a smaller profile",
            )

    def run(
        self,
        planned: Sequence[Planned],
        request: PictureRequest,
        tolerance: Tolerance,
        *,
        done: Callable[[ParityResult], None] = lambda _result: None,
    ) -> Report:
        """Compare; `done` is told every result as it comes."""
        reference = Reference(self.checkpoint, self.manifest.dtype)
        results = []
        for result in self._results(reference, planned, request, tolerance):
            results.append(result)
            done(result)
        points = tuple(point for point in POINTS if any(item.point == point for item in planned))
        backend = self.engines.toolchain.backend
        return Report(
            self.manifest.name, self.checkpoint.name, backend, points, str(request), tuple(results),
            self.manifest.dtype, self._noisiest(backend)
        )  # fmt: skip

    def _noisiest(self, backend: str) -> dict[str, tuple[tuple[str, float, float], ...]]:
        """Give what the engines' manifests say of their layers in 8 bits."""
        found = {}
        for spec in self.specs():
            realised = self.engines.bundle.engine_manifest(backend, spec.name).realised
            rows = dict(realised.get("quantization", {})).get("noisiest", ())
            if rows:
                found[spec.name] = tuple((row["module"], row["decibels"], row["share"]) for row in rows)
        return found

    def _results(
        self, reference: Reference, planned: Sequence[Planned], request: PictureRequest, tolerance: Tolerance
    ) -> Iterator[ParityResult]:
        for item in sorted(planned, key=lambda item: POINTS.index(item.point)):  # what is wrong everywhere shows early
            session = self.engines.session(item.case.spec.name)

            def module(feeds: Mapping[str, Any], spec: ComponentSpec = item.case.spec) -> dict[str, Any]:
                return reference.component(spec, feeds)

            yield from check_component(item.case, session, module, tolerance.component(item.case.spec.name))
        yield from check_pictures(self.engines, reference, request, tolerance)
        if (image := self.source(request)) is not None:
            yield from check_pictures(self.engines, reference, request, tolerance, image)

    def _weights(self) -> int:
        """Bytes of all weights in float32."""
        seen = {spec.folder for spec in self.specs()}
        tensors = [ref for folder in seen for ref in self.checkpoint.tensors(folder).values()]
        return sum(4 * int(np.prod(ref.shape)) for ref in tensors)


def _source(request: PictureRequest) -> Image.Image:
    """Draw a picture to start from: smooth colours and an edge."""
    rows, columns = np.mgrid[0 : request.height, 0 : request.width]
    red, green = rows * 255 // max(1, request.height - 1), columns * 255 // max(1, request.width - 1)
    disc = (rows - request.height / 2) ** 2 + (columns - request.width / 2) ** 2 < (request.height / 4) ** 2
    return Image.fromarray(np.stack([red, green, disc * 200], axis=-1).astype(np.uint8))
