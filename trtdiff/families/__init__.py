"""The model families trtdiff can compile; a new one is one file and one line here."""

from importlib import import_module

from trtdiff.errors import ArtefactError, CheckpointError
from trtdiff.families.base import ModelFamily

__all__ = ["FAMILIES", "ModelFamily", "family", "family_of_pipeline"]

FAMILIES: dict[str, str] = {
    "stable-diffusion": "trtdiff.families.stable_diffusion:StableDiffusion",
    "stable-diffusion-xl": "trtdiff.families.stable_diffusion_xl:StableDiffusionXL",
    "stable-diffusion-3": "trtdiff.families.stable_diffusion_3:StableDiffusion3",
    "flux": "trtdiff.families.flux:Flux",
    "pixart": "trtdiff.families.pixart:PixArt",
}
"""Name → where its class stands."""


def family(name: str) -> ModelFamily:
    """Give the family of that name."""
    if name not in FAMILIES:
        raise ArtefactError(f"no model family is called {name!r}", hint=f"this version knows: {', '.join(FAMILIES)}")
    module, _, cls = FAMILIES[name].partition(":")
    made: ModelFamily = getattr(import_module(module), cls)()
    return made


def family_of_pipeline(pipeline: str, *, where: str) -> ModelFamily:
    """Give the family that compiles checkpoints of this diffusers pipeline class."""
    every = [family(name) for name in FAMILIES]
    for candidate in every:
        if pipeline in candidate.pipelines:
            return candidate
    known = ", ".join(sorted(name for candidate in every for name in candidate.pipelines))
    raise CheckpointError(f"pipeline class {pipeline!r} is not known", where=where, hint=f"known: {known}")
