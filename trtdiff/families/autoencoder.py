"""AutoencoderKL, the VAE of every family here: latents of the denoiser's space to pixels and back.

The VAE's own space is latent / scaling + shift, or with a mean and deviation a channel latent · std / scaling + mean.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trtdiff.errors import CheckpointError
from trtdiff.families.base import ComponentSpec, Config, LatentFacts, field_of, require_class
from trtdiff.types import TensorSpec

if TYPE_CHECKING:
    import torch

SCALING = 0.18215
"""Where a config of the first year does not say."""
OVERFLOWS = {"*": "its config says force_upcast: values are known to leave float16, and no range scan has shown which"}


def latent_facts(configs: Mapping[str, Config], sample_size: Any, *, where: str) -> LatentFacts:
    """Read the latent space from the VAE's config; the native size is `sample_size` latent rows and columns, or one."""
    require_class(configs, "vae", "AutoencoderKL")
    downscale = 2 ** (len(field_of(configs, "vae", "block_out_channels", list)) - 1)
    sides = [sample_size] * 2 if isinstance(sample_size, int) else sample_size
    if not (isinstance(sides, list | tuple) and len(sides) == 2 and all(_positive(side) for side in sides)):
        raise CheckpointError(
            f"the native size is {sample_size!r}; a number of latent rows, or rows and columns, is expected",
            where=where,
            hint="download the file again, or write what the model was trained with",
        )
    return LatentFacts(
        channels=field_of(configs, "vae", "latent_channels", int),
        downscale=downscale,
        scaling=field_of(configs, "vae", "scaling_factor", float, SCALING),
        shift=configs["vae"].get("shift_factor") or 0.0,
        height=sides[0] * downscale,
        width=sides[1] * downscale,
    )


def _positive(side: Any) -> bool:
    return isinstance(side, int) and not isinstance(side, bool) and side > 0


def latent_dims(latent: LatentFacts, channels: int | None = None) -> tuple[int | str, ...]:
    """Give the dimensions [batch, channels, rows, columns] of a latent."""
    rows, columns = f"height/{latent.downscale}", f"width/{latent.downscale}"
    return ("batch", latent.channels if channels is None else channels, rows, columns)


def vae_components(configs: Mapping[str, Config], latent: LatentFacts) -> tuple[ComponentSpec, ...]:
    """Describe decoder and encoder."""
    latents, image = latent_dims(latent), ("batch", 3, "height", "width")
    unmeasured = OVERFLOWS if configs["vae"].get("force_upcast") is True else {}
    return (
        ComponentSpec(
            name="vae_decoder",
            folder="vae",
            inputs=(TensorSpec("latent", "float32", latents),),
            outputs=(TensorSpec("image", "float32", image),),
            build=_decoder,
            prefix="vae",
            keep_unmeasured=unmeasured,
        ),
        ComponentSpec(
            name="vae_encoder",
            folder="vae",
            inputs=(TensorSpec("image", "float32", image),),
            outputs=(TensorSpec("mean", "float32", latents), TensorSpec("std", "float32", latents)),
            build=_encoder,
            prefix="vae",
            keep_unmeasured=unmeasured,
        ),
    )


# --- the modules that are traced -------------------------------------------------------------------------------------


def _vae(config: Config) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_config(dict(config))  # type: ignore[no-untyped-call]


def _affine(config: Config) -> tuple["float | torch.Tensor", "float | torch.Tensor"]:
    """Give factor and offset from the denoiser's space to the VAE's own: `inner = latent · factor + offset`."""
    import torch

    scaling = config.get("scaling_factor", SCALING)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if not mean or not std:
        return 1 / scaling, config.get("shift_factor") or 0.0

    def channels(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32)[None, :, None, None]

    return channels([one / scaling for one in std]), channels(mean)


def _decoder(config: Config) -> "torch.nn.Module":
    import torch

    class Decoder(torch.nn.Module):
        vae: Any

        def __init__(self) -> None:
            super().__init__()
            self.vae = _vae(config)

        def forward(self, latent: torch.Tensor) -> Any:
            factor, offset = _affine(config)
            return self.vae.decode(latent * factor + offset, return_dict=False)[0]

    return Decoder().eval()


def _encoder(config: Config) -> "torch.nn.Module":
    import torch

    class Encoder(torch.nn.Module):
        vae: Any

        def __init__(self) -> None:
            super().__init__()
            self.vae = _vae(config)

        def forward(self, image: torch.Tensor) -> Any:
            """Mean and standard deviation of the latent, in the denoiser's space."""
            factor, offset = _affine(config)
            posterior = self.vae.encode(image, return_dict=False)[0]
            return (posterior.mean - offset) / factor, posterior.std / factor

    return Encoder().eval()
