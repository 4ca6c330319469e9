"""What a model family is: which components a checkpoint has, and how prompts become conditions.

A family has two sides. The *compile* side describes components and builds them with torch and diffusers, imported
inside its methods. The *runtime* side turns prompts into arrays with numpy and sessions alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.types import Array, DimRange, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.backends.base import Runs
    from trtdiff.export.schedule_call import ScheduleCall
    from trtdiff.export.schedulers import SchedulerChoice
    from trtdiff.tokens import Tokenizer

Config = Mapping[str, Any]
T = TypeVar("T")
Guidance: TypeAlias = Literal["branches", "embedded", "embedded, branches"]
"""How a model is guided: by a second branch with the negative prompt (classifier-free guidance), by an embedding of the
scale that it was distilled with, or by both, each with a scale of its own."""
Mode: TypeAlias = Literal["text", "image", "inpaint", "inpaint-channels"]
"""How a picture may begin. `inpaint`: the sampler mixes the known picture in. `inpaint-channels`: the denoiser takes
mask and masked picture as channels, and makes nothing without them."""
_WORDS: Mapping[type, str] = {int: "a whole number", float: "a number other than 0", list: "a list"}


@dataclass(frozen=True)
class LatentFacts:
    """The space that is denoised: `pixels = decode(latent / scaling + shift)`, as AutoencoderKL's config says."""

    channels: int
    downscale: int
    """Pixels of image per latent row or column."""
    scaling: float
    shift: float
    height: int
    """Native image height in pixels."""
    width: int


@dataclass(frozen=True)
class TokenFacts:
    """How a tokenizer's ids become a row of fixed length; the begin and end tokens stand in its own file."""

    limit: int
    """Ids in a row, special tokens included; what does not fit is cut."""
    pad: str
    """The token that fills a shorter prompt: `<|endoftext|>` for Stable Diffusion 1.x, `!` for 2.x."""


@dataclass(frozen=True)
class ModelFacts:
    """What the runtime must know of a checkpoint; travels in the bundle as JSON."""

    latent: LatentFacts
    conditions: tuple[TensorSpec, ...]
    """Per-image inputs of the denoiser that come from the prompt, without the guidance-branch dimension."""
    tokens: Mapping[str, TokenFacts]
    """Row length and padding of each tokenizer, by the tokenizer's folder name."""
    guidance: float
    """Guidance scale used when none is asked for."""
    sizes_multiple_of: int
    """Image heights and widths must be a multiple of this many pixels."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Symbolic dimensions of text, and how long they are: `tokens` of a text encoder, `context` of the denoiser."""
    guided_by: Guidance = "branches"
    modes: tuple[Mode, ...] = ("text", "image", "inpaint")
    skips: Literal["more", "fewer"] = "more"
    """How image-to-image rounds the steps that a strength skips: Stable Diffusion's pipelines skip more, those of flow
    matching fewer."""
    clip_layers: int = 0
    """Layers of a CLIP text encoder of which the last may be skipped; 0: none may."""
    weighted: bool = False
    """Whether prompts may have weights, and more rows than one."""
    framed: tuple[str, ...] = ()
    """What the model is told of its picture beside the size: some of `original_size`, `crop`, `target_size`."""
    strengths: tuple[float, float] = (0.8, 1.0)
    """Of image to image and of inpainting where none is asked for: the defaults of diffusers' pipelines."""
    largest: int = 0
    """Most pixels of a side, where positions end somewhere; 0: no end."""
    own: Mapping[str, Any] = field(default_factory=dict)
    """What only the family itself reads."""

    def image_tokens(self, height: int, width: int) -> int:
        """Patches that a transformer cuts a picture of this size into."""
        return (height // self.sizes_multiple_of) * (width // self.sizes_multiple_of)


@dataclass(frozen=True)
class Framing:
    """What a picture is said to be cut out of: SDXL's micro-conditions, [height, width] or [top, left] in pixels."""

    original: tuple[int, int]
    crop: tuple[int, int]
    target: tuple[int, int]
    score: tuple[float, float] = (6.0, 2.5)
    """Aesthetic score asked for, and of the negative branch; only a refiner takes it. diffusers' own defaults."""


@dataclass(frozen=True)
class Wish:
    """What conditions follow from, beside prompts."""

    height: int
    width: int
    guidance: float
    """The scale, for models that embed it."""
    branches: int
    framing: Framing


@dataclass(frozen=True)
class TextOptions:
    """How prompts are read."""

    clip_skip: int = 0
    """Last layers of CLIP that are left out."""
    rows: int = 0
    """0: a prompt is one row, and what does not fit is cut. Else weights and BREAK mean something, and a prompt has so
    many rows (see `trtdiff.weighted`); only families that say `weighted` in their facts know how."""


PLAIN = TextOptions()


@dataclass(frozen=True)
class Reading:
    """What prompts are read with."""

    facts: ModelFacts
    tokenizers: Mapping[str, "Tokenizer"]
    sessions: Mapping[str, "Runs"]
    """Of the text encoders, by name."""
    options: TextOptions = PLAIN


@dataclass(frozen=True)
class Integers:
    """An input takes whole numbers from 0 to below a bound."""

    below: int


@dataclass(frozen=True)
class Uniform:
    """An input takes any number in a range."""

    low: float
    high: float


Values: TypeAlias = Integers | Uniform
TIMESTEPS = Uniform(0, 1000)
WAVES = "waves of timesteps and sizes are computed in float32, whatever the type, as in diffusers"
"""Why what embeds numbers stays in float32: a rounded angle of hundreds of radians is another angle."""


@dataclass(frozen=True)
class ComponentSpec:
    """One network of a checkpoint that becomes one graph; names and dimensions are the contract export verifies."""

    name: str
    """Name of the graph and engine: `denoiser`, `text_encoder`, `vae_decoder`, …"""
    folder: str
    """The checkpoint's folder that holds its config and weights: `unet`, `vae`, …"""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    build: Callable[[Config], "torch.nn.Module"]
    """Make the module from its config, in float32, positional tensors in and a tensor or tuple of them out.

    Runs under fake tensors at export and for real in parity checks; its parameters are named
    `<prefix>.<name in the checkpoint>` with the prefix below.
    """
    prefix: str
    """Attribute of the built module that holds the checkpoint's own module."""
    keep_high: Mapping[str, str] = field(default_factory=dict)
    """Patterns of module paths that stay in float32 in half precision → why: what is known of this kind of network."""
    keep_unmeasured: Mapping[str, str] = field(default_factory=dict)
    """The same, of float16 where no range scan has shown what overflows."""
    values: Mapping[str, Values] = field(default_factory=dict)
    """Input → what it takes, where that is not any number of unit variance."""
    multiple: int = 1
    """Heights and widths are multiples of this many pixels, beside what the dimensions' divisors say."""

    def draw(self, tensor: TensorSpec, shape: Sequence[int], random: np.random.Generator) -> Array:
        """Draw an input of this shape as the network may get it, for comparisons."""
        values = self.values.get(tensor.name)
        drawn: Array
        if isinstance(values, Integers):
            drawn = random.integers(0, values.below, shape)
        elif isinstance(values, Uniform):
            drawn = random.uniform(values.low, values.high, shape)
        else:
            drawn = random.standard_normal(shape)
        return drawn.astype(tensor.dtype)


def padding_of(configs: Mapping[str, Config], tokenizer: str, usual: str) -> str:
    """Give the padding token of a tokenizer's config: a word, or a dictionary that holds it."""
    pad = configs.get(tokenizer, {}).get("pad_token") or usual
    word = pad.get("content") if isinstance(pad, Mapping) else pad
    if not isinstance(word, str):
        raise CheckpointError(f"{tokenizer}'s config says pad_token = {pad!r}; a word is expected",
                              where=f"{tokenizer}/tokenizer_config.json: pad_token",
                              hint="download the file again")  # fmt: skip
    return word


def require_class(configs: Mapping[str, Config], folder: str, *known: str) -> None:
    """Refuse a component of another class than those that are known, by what model_index.json says of it."""
    entry = configs.get("model_index", {}).get(folder)
    name = entry[1] if isinstance(entry, list | tuple) and len(entry) == 2 else known[0]
    if name not in known:
        raise CheckpointError(
            f"the component {folder} is of the class {name}; {' or '.join(known)} is expected",
            where=f"model_index.json: {folder}",
            hint=f"use a checkpoint whose {folder} is of that class",
        )


def field_of(configs: Mapping[str, Config], folder: str, name: str, kind: type[T], default: T | None = None) -> T:
    """Give a field of a component's config, of the type it must have. CheckpointError names file and field."""
    value = configs[folder].get(name, default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, kind) and not isinstance(value, bool) and value not in (0, []):
        return value
    raise CheckpointError(
        f"{folder}'s config says {name} = {value!r}; {_WORDS[kind]} is expected",
        where=f"{folder}/config.json: {name}",
        hint="download the file again, or write what the model was trained with",
    )


class ModelFamily(ABC):
    """Everything that is particular to one kind of checkpoint."""

    name: str
    pipelines: tuple[str, ...]
    """The diffusers pipeline classes whose checkpoints this family compiles."""
    steps: int = 20
    """Of a picture that is calibrated on: enough to reach every part of the usual schedules."""

    # --- compile side

    @abstractmethod
    def facts(self, configs: Mapping[str, Config]) -> ModelFacts:
        """Read what the runtime must know from the configs of the checkpoint's folders.

        A tokenizer folder's config is its tokenizer_config.json, in older ones under its special_tokens_map.json.
        """

    @abstractmethod
    def components(self, configs: Mapping[str, Config]) -> tuple[ComponentSpec, ...]:
        """Describe every component of a checkpoint with these configs, by folder."""

    def profile(self, facts: ModelFacts) -> ShapeProfile:
        """Give the profile built when none is asked for."""
        step, latent = facts.sizes_multiple_of, facts.latent

        def span(native: int) -> DimRange:
            return DimRange(max(step, native // 2 // step * step), native, min(2 * native, facts.largest or 2 * native))

        branches = {
            "branches": DimRange(1, 2, 2),
            "embedded": DimRange(1, 1, 1),
            "embedded, branches": DimRange(1, 1, 2),
        }
        return ShapeProfile(
            {
                "batch": DimRange(1, 1, 4),
                "height": span(latent.height),
                "width": span(latent.width),
                "branches": branches[facts.guided_by],
                **{name: DimRange(length, length, length) for name, length in facts.lengths.items()},
            }
        )

    def schedule_call(self, pipeline: str, image_tokens: int) -> "ScheduleCall":  # noqa: ARG002 - flow matching needs it
        """Give the way in which the checkpoint's pipeline class calls its scheduler, for pictures of so many tokens."""
        from trtdiff.export.schedule_call import StableDiffusionCall

        return StableDiffusionCall(pipeline)

    def schedulers(self) -> "Mapping[str, SchedulerChoice]":
        """Give the schedulers that may be asked for by name."""
        from trtdiff.export.schedulers import SCHEDULERS

        return SCHEDULERS

    def usual_schedulers(self) -> tuple[str, ...]:
        """Give those that are compiled when nobody asks, as far as they can be; the checkpoint's own comes first."""
        from trtdiff.export.schedulers import USUAL

        return USUAL

    def diffusers_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Say the arguments of a text-to-image or image-to-image call in the words of this family's pipelines."""
        return arguments

    def unpacked(self, latents: Array, height: int, width: int) -> Array:  # noqa: ARG002 - FLUX packs them
        """Give the latents that a pipeline's callback sees as [B, C, h, w]."""
        return latents

    # --- runtime side

    @abstractmethod
    def encode(self, texts: Sequence[str | None], reading: Reading) -> dict[str, Array]:
        """Turn prompts into the denoiser's conditions, by name, each [len(texts), …] float32.

        None stands for a negative prompt that nobody gave.
        """

    def conditions(self, wish: Wish, facts: ModelFacts) -> dict[str, Array]:  # noqa: ARG002 - other families need them
        """Give the conditions that follow from sizes and guidance, by name, each [branches, …] float32."""
        return {}
