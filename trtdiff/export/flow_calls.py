"""How the pipelines of flow-matching models call their schedulers: Stable Diffusion 3 and FLUX.

They mix noise and picture with `scale_noise`, start from the noise as it is, and hand nothing to `step` but prediction,
timestep and latent: a scheduler that draws noise would take it from the global generator, and is refused for that.
Where the config asks for dynamic shifting, the schedule depends on the number of image tokens, so that is a part of the
call. Their image-to-image pipelines round a strength to a start in another way than Stable Diffusion's
(`trtdiff.sampler.start_of_strength`).
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trtdiff.export.schedule_call import ScheduleCall, require_kind
from trtdiff.flow import FLUX, STABLE_DIFFUSION_3, shift_exponent


@dataclass(frozen=True)
class FlowCall(ScheduleCall):
    """What the pipelines of these families have in common."""

    image_tokens: int
    """Tokens that the transformer makes of the latent: its area over that of a patch of 2 by 2."""

    @property
    @abstractmethod
    def pipeline(self) -> str:
        """Name in the identity."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Pipeline and size."""
        return {"pipeline": self.pipeline, "image_tokens": self.image_tokens}

    def adopt(self, scheduler: Any) -> None:
        """Change nothing."""
        require_kind(scheduler, flow=True)

    def first_latent(self, scheduler: Any, noise: Any, clean: Any | None, timesteps: Any) -> Any:
        """`prepare_latents` of either pipeline."""
        return noise if clean is None else self.noised(scheduler, clean, noise, timesteps[:1].repeat(len(clean)))

    def noised(self, scheduler: Any, clean: Any, noise: Any, timestep: Any) -> Any:
        """`scale_noise`; schedulers of other families lack it, and so have no image to image here."""
        return scheduler.scale_noise(clean, timestep, noise)

    def model_input(self, scheduler: Any, latent: Any, timestep: Any) -> Any:  # noqa: ARG002 - nothing is scaled
        """Give the latent as it is."""
        return latent

    def step(self, scheduler: Any, prediction: Any, timestep: Any, latent: Any, generator: Any) -> Any:  # noqa: ARG002
        """Take a step without the generator."""
        return scheduler.step(prediction, timestep, latent, return_dict=False)[0]

    def _shift_exponent(self, scheduler: Any) -> float:
        return shift_exponent(scheduler.config, self.pipeline, self.image_tokens)


@dataclass(frozen=True)
class StableDiffusion3Call(FlowCall):
    """StableDiffusion3Pipeline, its image-to-image and its inpainting pipeline (strength 1: from noise, no start)."""

    @property
    def pipeline(self) -> str:
        """Name in the identity."""
        return STABLE_DIFFUSION_3

    def set_timesteps(self, scheduler: Any, steps: int) -> None:
        """Take the scheduler's own sigmas, shifted by image size where its config says so."""
        dynamic = scheduler.config.get("use_dynamic_shifting")
        scheduler.set_timesteps(steps, **({"mu": self._shift_exponent(scheduler)} if dynamic else {}))


@dataclass(frozen=True)
class FluxCall(FlowCall):
    """FluxPipeline, its image-to-image and its inpainting pipeline (strength 1: start 0).

    The pipeline gives its transformer a thousandth of the timestep, which is multiplied again in there; tables hold the
    timestep, as for every family.
    """

    @property
    def pipeline(self) -> str:
        """Name in the identity."""
        return FLUX

    def set_timesteps(self, scheduler: Any, steps: int) -> None:
        """Give sigmas from 1 to 1 / steps, unless the scheduler makes its own flow sigmas; give the shift always."""
        exponent = self._shift_exponent(scheduler)
        if scheduler.config.get("use_flow_sigmas"):
            scheduler.set_timesteps(steps, mu=exponent)
        else:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), mu=exponent)

    def timesteps(self, scheduler: Any, start: int | None) -> Any:
        """Text to image sets the begin index too; image to image knows no flow sigmas of a scheduler's own."""
        if start is not None and scheduler.config.get("use_flow_sigmas"):
            raise ValueError("FluxImg2ImgPipeline gives sigmas, and this scheduler makes its own in FluxPipeline")
        return super().timesteps(scheduler, start or 0)
