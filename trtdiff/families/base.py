"""What a model family is: which components a checkpoint has, and how prompts become conditions.

A family has two sides. The *compile* side describes components and builds them with torch and diffusers, imported
inside its methods. The *runtime* side turns prompts into arrays with numpy and sessions alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from trtdiff.errors import CheckpointError
from trtdiff.types import Array, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.backends.base import Runs
    from trtdiff.tokens import Tokenizer

Config = Mapping[str, Any]
T = TypeVar("T")
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
        from trtdiff.types import DimRange

        step, latent = facts.sizes_multiple_of, facts.latent

        def span(native: int) -> DimRange:
            return DimRange(max(step, native // 2 // step * step), native, 2 * native)

        return ShapeProfile({"batch": DimRange(1, 1, 4), "height": span(latent.height), "width": span(latent.width)})

    # --- runtime side

    @abstractmethod
    def encode(
        self,
        prompts: Sequence[str],
        facts: ModelFacts,
        tokenizers: Mapping[str, "Tokenizer"],
        sessions: Mapping[str, "Runs"],
    ) -> dict[str, Array]:
        """Turn prompts into the denoiser's conditions, by name, each [len(prompts), …] float32."""
