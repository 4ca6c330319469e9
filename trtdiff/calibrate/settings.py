"""What a range scan or a calibration runs, with nothing left open, and what that takes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

import trtdiff
from trtdiff.backends.onnxruntime import OnnxRuntime
from trtdiff.calibrate.cache import COUNT, ERROR, NOISE, RANGE
from trtdiff.calibrate.prompts import NEGATIVE, prompts_for
from trtdiff.calibrate.samples import TIMESTEPS
from trtdiff.digest import code_digest
from trtdiff.errors import UsageError
from trtdiff.export.manifest import ExportManifest
from trtdiff.families import family
from trtdiff.machine import installed
from trtdiff.manifest import RangesSpec, as_json
from trtdiff.passes.eight_bits import EightBits
from trtdiff.recipes.quantization import Method

S = TypeVar("S", bound="ScanSettings")

STEPS = 4
"""Over the whole schedule, for two prompts with and without guidance: 16 executions of the denoiser.

Measured on the demo checkpoint, against 8 prompts of 25 steps: of 308 values of the denoiser none reaches less than
0.55 of the magnitude it reaches there, and half of them 0.95 or more. With 2 steps 1 % reach less than half, with one
step 15 %. The headroom of `mark_islands` is a factor of 2.
"""
DEFAULTS: Mapping[str, Any] = MappingProxyType({"steps": STEPS, "seed": 0})
"""Settings where nobody asks for others; those that are not here are the checkpoint's and its family's own."""
PIXELS = 512 * 512
_LIBRARIES = ("onnx", "onnx-ir", "ml_dtypes", "numpy", "diffusers", "torch", "scipy", "tokenizers", "pillow")
_RESIDENT = 500 << 20
"""Bytes once torch, diffusers and ONNX Runtime are imported (measured: 455 MB)."""
_ACTIVATIONS = {"denoiser": 2500, "vae_decoder": 5000, "vae_encoder": 5000}
"""Bytes a pixel. By PyTorch's own peak SD1.5's UNet holds 521, its VAE decoder 3,073 and encoder 2,560; measured in a
scan with a UNet half as wide: 1,060."""
_WEIGHTS = 1.2
"""Of the widened weights: mapped, and the part that ONNX Runtime lays out anew."""
_FLOPS = 0.2
"""Operations a weight and position; positions are rows times columns of the latent for a denoiser, pixels for a VAE.

SD1.5 at 512 by 512: 0.70e12 instead of the 0.68e12 that the UNet takes, 2.6e12 instead of the VAE decoder's 2.5e12.
"""
_RATE = 1.5e11
"""Operations a second of float32 on two cores (measured: a scan of SD1.5 at 512 by 512 takes 200 s)."""
_VAE = ("vae_decoder", "vae_encoder")
_TOKENS = 770
"""Of a text encoder, in the positions of `_FLOPS`: 77, and two operations a weight for each."""
_MORE = 1.3
"""Memory of a calibration, in times of a scan's: the layers stand in the graph again, on rounded operands."""


@dataclass(frozen=True)
class ScanSettings:
    """The request behind a scan. A picture a prompt, each from a seed of its own, `seed + i`."""

    prompts: tuple[str, ...]
    negative: str
    steps: int
    """Of the checkpoint's own scheduler, over the whole schedule."""
    guidance: float
    seed: int
    height: int
    width: int
    guided_by: str = "branches"
    """As ModelFacts has it: a model that embeds its guidance has no branch for the negative prompt."""

    def __post_init__(self) -> None:
        if not self.prompts or self.steps < 1:
            raise UsageError(f"{len(self.prompts)} prompts, {self.steps} steps: nothing is executed", where="--steps",
                             hint=f"ask for one step at least, better for {SAMPLE_STEPS}")  # fmt: skip
        if not isfinite(self.guidance):
            raise UsageError(f"guidance {self.guidance}", where="--guidance", hint="a number, often 3 to 8; 1 is none")

    @property
    def branches(self) -> int:
        """2 with the negative prompt, 1 where guidance is off (1 or less, as in diffusers)."""
        return 2 if self.guidance > 1 and self.guided_by == "branches" else 1

    def __str__(self) -> str:
        return (
            f"{len(self.prompts)} prompts, {self.steps} steps, guidance {self.guidance:g}, seed {self.seed}, "
            f"{self.height}x{self.width}"
        )


def scan_settings(export: ExportManifest, given: Mapping[str, Any] = DEFAULTS) -> ScanSettings:
    """Fill in what is left open: the checkpoint's own size and guidance, its family's prompts. Raises UsageError."""
    return _filled(export, {**DEFAULTS, **given}, ScanSettings, "a scan")


def _filled(export: ExportManifest, given: Mapping[str, Any], kind: type[S], what: str) -> S:
    facts = export.facts
    own = {
        "prompts": prompts_for(export.family), "negative": NEGATIVE, "guidance": facts.guidance,
        "height": facts.latent.height, "width": facts.latent.width, "guided_by": facts.guided_by,
    }  # fmt: skip
    try:
        made = msgspec.convert({**own, **given}, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"not the settings of {what}: {error}", where=str(dict(given))) from None
    for name, pixels in (("height", made.height), ("width", made.width)):
        if pixels < 1 or pixels % facts.sizes_multiple_of:
            raise UsageError(f"{name} {pixels} is not a multiple of {facts.sizes_multiple_of}", where=f"--{name}",
                             hint=f"the checkpoint's own is {own[name]}")  # fmt: skip
    most = int(export.scheduler.get("num_train_timesteps") or TIMESTEPS)
    if made.steps > most:
        raise UsageError(f"{made.steps} steps, of a model that was trained on {most} timesteps", where="--steps",
                         hint=f"often {SAMPLE_STEPS} to 50")  # fmt: skip
    return made


SAMPLES = 64
"""Of the denoiser, in a calibration."""
SAMPLE_STEPS = 20
BANDS = 8
CALIBRATION: Mapping[str, Any] = MappingProxyType({
    "seed": 0, "samples": SAMPLES, "bands": BANDS, "method": "mse",
    "formats": ("int8", "float8"), "sensitivity": 1,
})  # fmt: skip
"""Settings of a calibration where nobody asks for others; its steps are the family's (`ModelFamily.steps`)."""
IN_A_BUILD: Mapping[str, Any] = MappingProxyType({**CALIBRATION, "samples": 32})
"""Settings of one that a build makes by itself: two pictures, one of each of the family's prompts.

Of as many steps as any other: with 8 the schedulers that people use (Karras' sigmas, LCM, shifted flow matching) leave
some of the 8 bands empty, with the families' numbers of steps none does."""
CALIBRATION_FILE = "calibration.json"
"""Name of a cache in a store entry."""


@dataclass(frozen=True)
class CalibrationSettings(ScanSettings):
    """The request behind a calibration: as many pictures as its samples take, each from a seed of its own.

    Pictures take the prompts in turn; see `calibrate.samples`.
    """

    samples: int = SAMPLES
    """Of the denoiser: one is a picture at a step, both guidance branches."""
    bands: int = BANDS
    """Equal parts of the training timesteps, which get equally many samples."""
    method: Method = "mse"
    """How clips will be chosen, which says what is measured."""
    formats: tuple[EightBits, ...] = ("int8", "float8")
    """Types of 8 bits whose errors, and whose noise in every layer, are measured."""
    sensitivity: int = 1
    """Samples a band that the noise of layers is measured on; 0: it is not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples < 1:
            raise UsageError(f"{self.samples} samples", where="--samples", hint="ask for one a timestep band, or more")
        if self.bands < 1 or self.sensitivity < 0:
            raise UsageError(f"{self.bands} bands, {self.sensitivity} samples a band", where="--bands",
                             hint="one band at least")  # fmt: skip
        if not self.formats:
            raise UsageError("no type of 8 bits", where="--precision", hint="int8, fp8, or both")

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.bands} bands, {len(self.prompts)} prompts, {self.steps} steps, guidance "
            f"{self.guidance:g}, seed {self.seed}, {self.height}x{self.width}, method {self.method}"
        )


@dataclass(frozen=True)
class CalibrationSpec(RangesSpec):
    """Everything that determines a calibration; its `settings` are those of CalibrationSettings."""


def calibration_settings(export: ExportManifest, given: Mapping[str, Any] = CALIBRATION) -> CalibrationSettings:
    """Fill in what is left open, as `scan_settings` does. Raises UsageError."""
    steps = {"steps": family(export.family).steps}
    return _filled(export, {**CALIBRATION, **steps, **given}, CalibrationSettings, "a calibration")


def calibration_spec(export: ExportManifest, given: Mapping[str, Any] = CALIBRATION) -> CalibrationSpec:
    """Give everything that determines a calibration of this export; its settings are what `calibrate_export` takes."""
    settings = asdict(calibration_settings(export, given))
    return CalibrationSpec(**_determines(export, "trtdiff.calibrate.calibration"), settings=as_json(settings))


def ranges_spec(export: ExportManifest, given: Mapping[str, Any] = DEFAULTS) -> RangesSpec:
    """Give everything that determines a scan of this export; its settings are what `scan_ranges` takes."""
    settings = as_json(asdict(scan_settings(export, given)))
    return RangesSpec(**_determines(export, "trtdiff.calibrate.scan"), settings=settings)


def _determines(export: ExportManifest, module: str) -> dict[str, Any]:
    """Give the fields of a spec that do not depend on settings; `module` does the work."""
    toolchain = OnnxRuntime().toolchain()
    passes = [place.partition(":")[0] for place in OnnxRuntime.passes]
    kind = type(family(export.family)).__module__
    return {
        "graphs": {component.name: component.graph_sha256 for component in export.components},
        "weights": {component.name: component.weights for component in export.components},
        "family": export.family,
        "facts": as_json(export.facts),
        "scheduler": export.scheduler,
        "tokenizers": export.tokenizer_sha256,
        "libraries": {**installed(_LIBRARIES), toolchain.backend: toolchain.version},
        "trtdiff": trtdiff.__version__,
        "trtdiff_code": code_digest([module, "trtdiff.export.schedulers", *passes, kind]),
    }


def scan_memory(weights: Mapping[str, int], *, pixels: int = PIXELS) -> int:
    """Estimate the peak bytes of a scan from the bytes of every component's weights in float32.

    Components are open one at a time, text encoders together.
    """
    text = sum(count for name, count in weights.items() if name not in _ACTIVATIONS)
    late = [int(_WEIGHTS * weights.get(name, 0)) + each * pixels for name, each in _ACTIVATIONS.items()]
    return _RESIDENT + max(int(_WEIGHTS * text), *late)


def scan_seconds(weights: Mapping[str, int], settings: ScanSettings | None = None, *, pixels: int = PIXELS) -> float:
    """Estimate how long a scan takes on two cores, from the bytes of every component's weights in float32.

    Without settings, those of `DEFAULTS` with two prompts and guidance.
    """
    pictures, rows = 2, 4 * STEPS
    if settings is not None:
        pictures, pixels = len(settings.prompts), settings.height * settings.width
        rows = pictures * settings.steps * settings.branches
    positions = {"denoiser": rows * pixels / 64, **dict.fromkeys(_VAE, pictures * pixels)}
    flops = sum(_FLOPS * weights.get(name, 0) / 4 * positions[name] for name in positions)
    return 10 + flops / _RATE


def execution_seconds(component: str, weights: int, pixels: int = PIXELS) -> float:
    """Estimate how long one row of a component takes on two cores, from the bytes of its weights in float32."""
    positions = {"denoiser": pixels / 64, **dict.fromkeys(_VAE, pixels)}.get(component, _TOKENS)
    return _FLOPS * weights / 4 * positions / _RATE


def calibration_memory(weights: Mapping[str, int], *, pixels: int = PIXELS) -> int:
    """Estimate the peak bytes of a calibration from the bytes of every component's weights in float32."""
    return int(_MORE * scan_memory(weights, pixels=pixels))


PASS_COST: Mapping[str, float] = MappingProxyType({RANGE: 1.15, ERROR: 2.5, COUNT: 3.0, NOISE: 6.0})
"""What an execution takes in a pass, in times of a plain one."""
_SECOND: Mapping[Method, tuple[str, ...]] = MappingProxyType({"max": (), "mse": (ERROR,), "percentile": (COUNT,)})
"""Method → passes that it needs after the ranges."""
_OPENING = 2.0
"""Seconds until a component is open, for each pass, besides the writing of its weights."""
WRITTEN_PER_SECOND = 2e8
"""Bytes of weights that are written in float32, and laid out by the runtime."""


def passes_of(method: Method, *, noise: bool) -> tuple[str, ...]:
    """Give the passes over the samples, in order."""
    return (RANGE, *_SECOND[method], *([NOISE] if noise else []))


def calibration_seconds(weights: Mapping[str, int], settings: CalibrationSettings) -> float:
    """Estimate how long a calibration takes on two cores, from the bytes of every component's weights in float32."""
    pixels, pictures = settings.height * settings.width, -(-settings.samples // settings.steps)
    whole = 0.0
    for kind in passes_of(settings.method, noise=settings.sensitivity > 0):
        for name, count in weights.items():
            executions = 1 if kind == NOISE else pictures
            if name == "denoiser":
                few, all_steps = settings.bands * settings.sensitivity, settings.branches * pictures * settings.steps
                executions = {NOISE: few, RANGE: all_steps}.get(kind, settings.branches * settings.samples)
            seconds = execution_seconds(name, count, pixels)
            whole += _OPENING + count / WRITTEN_PER_SECOND + PASS_COST[kind] * executions * seconds
    return whole
