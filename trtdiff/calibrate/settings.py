"""What a range scan runs, with nothing left open, and what that takes."""

from collections.abc import Mapping
from dataclasses import dataclass

from trtdiff.calibrate.prompts import NEGATIVE, prompts_for
from trtdiff.errors import UsageError
from trtdiff.export.manifest import ExportManifest

STEPS = 4
"""See `ScanSettings.steps`."""
_LIBRARIES = 700 << 20
"""Resident size once torch, diffusers and ONNX Runtime are imported."""
_ACTIVATIONS = 1200
"""Bytes of activations a pixel."""
_WEIGHTS = 1.1
"""Of the widened weights: mapped, and the part that ONNX Runtime lays out anew."""
_FLOPS = 0.2
"""Operations a weight and position: latent rows times columns for a denoiser, pixels for a VAE."""
_RATE = 5e10
"""Operations a second of float32 on two cores."""
_VAE = ("vae_decoder", "vae_encoder")


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

    def __post_init__(self) -> None:
        if not self.prompts or self.steps < 1:
            raise UsageError("a scan needs a prompt and a step", where=f"{self.prompts}, {self.steps} steps")

    @property
    def branches(self) -> int:
        """2 with the negative prompt, 1 where guidance is off (1 or less, as in diffusers)."""
        return 2 if self.guidance > 1 else 1

    def __str__(self) -> str:
        return (
            f"{len(self.prompts)} prompts, {self.steps} steps, guidance {self.guidance:g}, seed {self.seed}, "
            f"{self.height}x{self.width}"
        )


def scan_settings(export: ExportManifest, *, steps: int = STEPS, seed: int = 0) -> ScanSettings:
    """Give what a checkpoint is scanned with when nobody says more: its own size and guidance, its family's prompts."""
    facts = export.facts
    return ScanSettings(
        prompts_for(export.family), NEGATIVE, steps, facts.guidance, seed, facts.latent.height, facts.latent.width
    )


def scan_memory(weights: Mapping[str, int], *, pixels: int = 512 * 512) -> int:
    """Estimate the peak bytes of a scan from the bytes of every component's weights in float32.

    Components are open one at a time, text encoders together.
    """
    late = [weights.get(name, 0) for name in ("denoiser", *_VAE)]
    text = sum(weights.values()) - sum(late)
    return _LIBRARIES + int(_WEIGHTS * max(text, *late)) + _ACTIVATIONS * pixels


def scan_seconds(weights: Mapping[str, int], settings: ScanSettings, *, downscale: int = 8) -> float:
    """Estimate how long a scan takes on two cores, from the bytes of every component's weights in float32."""
    pixels, pictures = settings.height * settings.width, len(settings.prompts)
    rows = {"denoiser": pictures * settings.steps * settings.branches, **dict.fromkeys(_VAE, pictures)}
    positions = {"denoiser": pixels / downscale**2, **dict.fromkeys(_VAE, pixels)}
    flops = sum(_FLOPS * weights.get(name, 0) / 4 * positions[name] * rows[name] for name in positions)
    return 10 + flops / _RATE
