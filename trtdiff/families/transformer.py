"""Transformers as denoisers, and flow matching: what SD3, FLUX and PixArt have in common."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from trtdiff.families.autoencoder import latent_dims
from trtdiff.families.base import TIMESTEPS, WAVES, ComponentSpec, Config, ModelFacts, ModelFamily, Values
from trtdiff.types import TensorSpec

if TYPE_CHECKING:
    import torch

    from trtdiff.export.schedulers import SchedulerChoice


def denoiser(
    facts: ModelFacts,
    build: Callable[[Config], "torch.nn.Module"],
    *,
    waves: Sequence[str],
    values: Mapping[str, Values] | None = None,
) -> ComponentSpec:
    """Describe one; `waves` are the modules that turn numbers into waves, `values` is what conditions take."""
    dims = latent_dims(facts.latent)
    return ComponentSpec(
        name="denoiser",
        folder="transformer",
        inputs=(
            TensorSpec("sample", "float32", dims),
            TensorSpec("timestep", "float32", ("batch",)),
            *facts.conditions,
        ),
        outputs=(TensorSpec("prediction", "float32", dims),),
        build=build,
        prefix="transformer",
        keep_high=dict.fromkeys(waves, WAVES),
        values={"timestep": TIMESTEPS, **(values or {})},
        multiple=facts.sizes_multiple_of,
    )


class FlowFamily(ModelFamily):
    """A family of models that predict a flow."""

    steps = 28
    """With 20, the schedule of FLUX dev at its native size has no timestep below 142; 28 are its pipeline's default."""

    def schedulers(self) -> "Mapping[str, SchedulerChoice]":
        """Give those for models that predict a flow."""
        from trtdiff.export.schedulers import FLOW_SCHEDULERS

        return FLOW_SCHEDULERS

    def usual_schedulers(self) -> tuple[str, ...]:
        """Give the checkpoint's own, and two of higher order."""
        from trtdiff.export.schedulers import USUAL_FLOW

        return USUAL_FLOW
