"""How a pipeline calls its scheduler: the part of sampling that belongs to the model family, not to the scheduler.

A diffusers pipeline decides what it passes to `set_timesteps`, how the first latent is made and which arguments `step`
gets, and it even rewrites fields of the scheduler's config. `ScheduleCall` holds these decisions; `diffusers_loop` is
then the denoising loop itself, the same for every family.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from trtdiff.errors import SamplerError


class ScheduleCall(ABC):
    """A pipeline's own way with schedulers. Tensors and schedulers are torch's and diffusers'."""

    @property
    @abstractmethod
    def identity(self) -> Mapping[str, Any]:
        """JSON-like value that says which call this is; part of every table's digest."""

    @abstractmethod
    def adopt(self, scheduler: Any) -> None:
        """Change the config of the scheduler that the pipeline is built with, as the pipeline's constructor does.

        Raises SamplerError for one that is made for another kind of model.
        """

    @abstractmethod
    def set_timesteps(self, scheduler: Any, steps: int) -> None:
        """Prepare the scheduler for this many steps."""

    def timesteps(self, scheduler: Any, start: int | None) -> Any:  # [calls]
        """Give the timesteps of the loop, one a model call; a start (image to image) skips that many steps.

        As `get_timesteps` of the image-to-image pipelines; text to image leaves the begin index unset.
        """
        if start is None:
            return scheduler.timesteps
        begin = start * scheduler.order
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(begin)
        return scheduler.timesteps[begin:]

    @abstractmethod
    def first_latent(self, scheduler: Any, noise: Any, clean: Any | None, timesteps: Any) -> Any:
        """Make x_0 from the N(0, 1) draw and, for image to image, the clean latent."""

    @abstractmethod
    def noised(self, scheduler: Any, clean: Any, noise: Any, timestep: Any) -> Any:
        """Add noise to a clean latent, as much as belongs to a timestep ([1] or [B]) at this point of the loop."""

    @abstractmethod
    def model_input(self, scheduler: Any, latent: Any, timestep: Any) -> Any:
        """Scale a latent for the model."""

    @abstractmethod
    def step(self, scheduler: Any, prediction: Any, timestep: Any, latent: Any, generator: Any) -> Any:
        """Take one step."""


_FIRST_YEAR = {"steps_offset": 1, "clip_sample": False}
REWRITES: Mapping[str, Mapping[str, Any]] = {
    "StableDiffusionPipeline": _FIRST_YEAR,
    "StableDiffusionImg2ImgPipeline": _FIRST_YEAR,
    "StableDiffusionInpaintPipeline": {"steps_offset": 1, "skip_prk_steps": True},
}
"""Pipeline class → fields of a scheduler's config that its constructor sets, where the config has them."""


@dataclass(frozen=True)
class StableDiffusionCall(ScheduleCall):
    """Stable Diffusion 1 and 2: StableDiffusionPipeline, its image-to-image and inpainting pipelines, and LCM's."""

    pipeline: str = "StableDiffusionPipeline"
    """The checkpoint's class: each has a constructor of its own."""
    eta: float = 0.0
    """The pipeline's `eta`, passed to every scheduler whose step takes one (DDIM, TCD)."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name and options."""
        return {"pipeline": self.pipeline, "eta": self.eta}

    def adopt(self, scheduler: Any) -> None:
        """Do as the constructor does with configs of the first year (`REWRITES`)."""
        require_kind(scheduler, flow=False)
        known = dict(scheduler.config)
        config = known | {
            field: value
            for field, value in REWRITES.get(self.pipeline, {}).items()
            if field in known and (known[field] is (not value) if isinstance(value, bool) else known[field] != value)
        }
        if config != known:
            scheduler._internal_dict = type(scheduler.config)(config)  # noqa: SLF001 - the pipeline does it in these words

    def set_timesteps(self, scheduler: Any, steps: int) -> None:
        """`retrieve_timesteps` without custom timesteps or sigmas."""
        scheduler.set_timesteps(steps)

    def first_latent(self, scheduler: Any, noise: Any, clean: Any | None, timesteps: Any) -> Any:
        """`prepare_latents` of either pipeline."""
        if clean is None:
            return noise * scheduler.init_noise_sigma
        return self.noised(scheduler, clean, noise, timesteps[:1].repeat(len(clean)))

    def noised(self, scheduler: Any, clean: Any, noise: Any, timestep: Any) -> Any:
        """`add_noise`; several schedulers go by the step that they are at, not by the timestep."""
        return scheduler.add_noise(clean, noise, timestep)

    def model_input(self, scheduler: Any, latent: Any, timestep: Any) -> Any:
        """`scale_model_input`, which a few schedulers lack."""
        scale = getattr(scheduler, "scale_model_input", None)
        return latent if scale is None else scale(latent, timestep)

    def step(self, scheduler: Any, prediction: Any, timestep: Any, latent: Any, generator: Any) -> Any:
        """Take the step's first result."""
        return self._results(scheduler, prediction, timestep, latent, generator)[0]

    def _results(self, scheduler: Any, prediction: Any, timestep: Any, latent: Any, generator: Any) -> tuple[Any, ...]:
        """`prepare_extra_step_kwargs`: eta and the generator go to steps that take them."""
        offered = {"eta": self.eta, "generator": generator}
        extra = {name: value for name, value in offered.items() if name in _parameters(type(scheduler).step)}
        results: tuple[Any, ...] = scheduler.step(prediction, timestep, latent, **extra, return_dict=False)
        return results


@dataclass(frozen=True)
class StableDiffusionXLCall(StableDiffusionCall):
    """StableDiffusionXLPipeline and its image-to-image pipeline: as Stable Diffusion, with the scheduler as it came."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name and options; all of the family's pipelines are one here."""
        return {"pipeline": "stable-diffusion-xl", "eta": self.eta}

    def adopt(self, scheduler: Any) -> None:
        """Change nothing."""
        require_kind(scheduler, flow=False)


@dataclass(frozen=True)
class PixArtCall(StableDiffusionXLCall):
    """PixArtAlphaPipeline and PixArtSigmaPipeline.

    Diffusers has no image to image for PixArt; starts are what Stable Diffusion's pipeline would make of them.
    """

    @property
    def identity(self) -> Mapping[str, Any]:
        """Name and options."""
        return {"pipeline": "pixart", "eta": self.eta}

    def timesteps(self, scheduler: Any, start: int | None) -> Any:
        """Text to image sets the begin index too."""
        if start is None and hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(0)
        return super().timesteps(scheduler, start)

    def step(self, scheduler: Any, prediction: Any, timestep: Any, latent: Any, generator: Any) -> Any:
        """Take the estimate of the clean latent where there is one step; schedulers that give none cannot do it."""
        if scheduler.num_inference_steps > 1:
            return super().step(scheduler, prediction, timestep, latent, generator)
        return self._results(scheduler, prediction, timestep, latent, generator)[1]


def require_kind(scheduler: Any, *, flow: bool) -> None:
    """Refuse a scheduler of flow matching for a model that predicts noise, and the other way round."""
    kind, predicts = type(scheduler).__name__, scheduler.config.get("prediction_type")
    if (kind.startswith("FlowMatch") or predicts == "flow_prediction") is flow:
        return
    wrong = f"{kind} is for flow matching, and this model predicts noise or velocity"
    if flow:
        wrong = f"{kind} is for models that predict noise or velocity ({predicts}), and this one is of flow matching"
    raise SamplerError(
        wrong, where=f"scheduler class {kind}", hint="put the scheduler there that the model was trained with"
    )


@cache
def _parameters(step: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(step).parameters)


def diffusers_loop(
    scheduler: Any,
    call: ScheduleCall,
    *,
    steps: int,
    start: int | None,
    predict: Callable[[Any, Any, int], Any],
    noise: Any,
    clean: Any | None,
    generator: Any,
    mask: Any | None = None,
) -> Any:  # [B, C, h, w]
    """Run diffusers' own denoising loop: the reference that tables are held against.

    `predict(model_input, model's timestep, call index)` is the model; `noise` and `clean` are torch tensors
    [B, C, h, w]. With a `mask` [B, 1, h, w] it is the loop of the inpainting pipelines for models that know nothing of
    masks: 1 where the model paints, 0 where the clean latent stays. No start means strength 1 there: pure noise, from
    step 0.
    """
    call.set_timesteps(scheduler, steps)
    timesteps = call.timesteps(scheduler, 0 if start is None and mask is not None else start)
    latent = call.first_latent(scheduler, noise, clean if start is not None else None, timesteps)
    for index, timestep in enumerate(timesteps):
        prediction = predict(call.model_input(scheduler, latent, timestep), timestep, index)
        latent = call.step(scheduler, prediction, timestep, latent, generator)
        if mask is not None:
            known = clean
            if index < len(timesteps) - 1:
                known = call.noised(scheduler, clean, noise, timesteps[index + 1 : index + 2])
            latent = (1 - mask) * known + mask * latent
    return latent
