"""Component by component: the same random inputs through an engine and through diffusers' module.

The denoiser's and the VAE decoder's engines begin with the sampler's prologue (latent = Σ coefficients · window), and
the denoiser's ends with the guidance sum; what these must compute is written out here in numpy, around the bare module.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trtdiff.backends import Session
from trtdiff.backends.blame import first_non_finite
from trtdiff.errors import ArtefactError
from trtdiff.families.base import ComponentSpec, ModelFacts
from trtdiff.parity.compare import ParityResult, compare_tensors
from trtdiff.types import Array

Module = Callable[[Mapping[str, Array]], dict[str, Array]]
"""The reference: inputs of a ComponentSpec by name → its outputs by name."""

TRAINING_STEPS = 1000
"""Timesteps are drawn below this, as in training."""
GUIDANCE = 4.0
"""Weighs the branches as a usual request does; the prediction is then a difference of two, which magnifies errors."""


@dataclass(frozen=True)
class Case:
    """One component at one shape."""

    spec: ComponentSpec
    facts: ModelFacts
    sizes: Mapping[str, int]
    """By symbolic dimension: batch, height, width, tokens, window, branches."""
    seed: int = 0

    @property
    def at(self) -> str:
        """The sizes that this component has, in words."""
        used = dict.fromkeys(name for item in (*self.spec.inputs, *self.spec.outputs) for name in item.symbols)
        return ", ".join(f"{name} {self.sizes[name]}" for name in used)


def check_component(case: Case, session: Session, reference: Module, tolerance: float) -> list[ParityResult]:
    """Compare every output of one component at one shape; one that is not finite says in which layer it began."""
    feeds, expected = _case(case, {spec.name for spec in session.inputs}, reference)
    got = session.run(feeds)
    if missing := sorted(set(expected) - set(got)):
        raise ArtefactError(
            f"the engine of {case.spec.name} has no output {', '.join(missing)}", hint="build the bundle again"
        )
    broken = {name for name in expected if not np.isfinite(got[name]).all()}
    origin = first_non_finite(session, feeds) if broken else ""
    results = [
        compare_tensors(f"{case.spec.name}.{name}", case.at, got[name], expected[name], tolerance)
        for name in sorted(expected)
    ]
    return [
        replace(result, problem=f"{result.problem}; {origin}") if name in broken else result
        for name, result in zip(sorted(expected), results, strict=True)
    ]


def _case(case: Case, engine_inputs: set[str], reference: Module) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draw the engine's inputs, and compute what must come out."""
    rng = np.random.default_rng(case.seed)
    plain = {item.name: case.spec.draw(item, item.shape(case.sizes), rng) for item in case.spec.inputs}
    if "window" not in engine_inputs:
        return plain, reference(plain)
    inner = next(item.name for item in case.spec.inputs if item.name in {"sample", "latent"})
    feeds, latent = _prologue(plain.pop(inner), case.sizes["window"], rng, masked="known" in engine_inputs)
    if "guidance" not in engine_inputs:
        return feeds, {**reference({inner: latent, **plain}), "latent": latent}
    return _guided(case, feeds, latent, rng, reference)


def _prologue(like: Array, slots: int, rng: np.random.Generator, *, masked: bool) -> tuple[dict[str, Array], Array]:
    """Draw a window and coefficients, and a mask, for a latent [B, C, h, w] of unit variance; give that latent too."""
    window = rng.standard_normal((slots, *like.shape), np.float32)
    coefficients = rng.standard_normal((slots, len(like)), np.float32)
    coefficients /= np.linalg.norm(coefficients, axis=0)
    latent = np.einsum("kb,kbchw->bchw", coefficients.astype(np.float64), window.astype(np.float64))
    feeds = {"window": window, "coefficients": coefficients}
    if masked:
        mask = rng.integers(0, 2, (len(like), 1, *like.shape[2:])).astype(np.float32)
        known = rng.standard_normal((2, *like.shape), np.float32)
        share = rng.standard_normal((2, len(like)), np.float32)
        share /= np.linalg.norm(share, axis=0)
        kept = np.einsum("jb,jbchw->bchw", share.astype(np.float64), known.astype(np.float64))
        latent = np.where(mask, latent, kept)
        feeds |= {"mask": mask, "known": known, "known_coefficients": share}
    return feeds, latent.astype(np.float32)


def _guided(
    case: Case, feeds: dict[str, Array], latent: Array, rng: np.random.Generator, reference: Module
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Add what the denoiser's engine takes besides: per-image scale and timestep, branches of conditions, guidance."""
    batch, branches = len(latent), case.sizes["branches"]
    scale = rng.uniform(0.1, 1.0, batch).astype(np.float32)
    timestep = rng.integers(0, TRAINING_STEPS, batch).astype(np.float32)
    rescale = rng.uniform(0, 1, batch).astype(np.float32)
    conditions = {
        spec.name: case.spec.draw(spec, (branches, *spec.shape(case.sizes)), rng) for spec in case.facts.conditions
    }
    guidance = np.repeat(
        np.array([[1 - GUIDANCE], [GUIDANCE]] if branches == 2 else [[1.0]], np.float32), batch, axis=1
    )
    model_input = (latent * scale[:, None, None, None]).astype(np.float32)
    prediction = np.zeros_like(latent, np.float64)
    for branch in range(branches):
        own = {name: values[branch] for name, values in conditions.items()}
        made = reference({"sample": model_input, "timestep": timestep, **own})["prediction"]
        prediction += guidance[branch][:, None, None, None].astype(np.float64) * made
    deviations = [values.std(axis=(1, 2, 3), dtype=np.float64) for values in (made, prediction)]
    prediction *= (1 + rescale * (deviations[0] / deviations[1] - 1))[:, None, None, None]
    feeds |= {"scale": scale, "timestep": timestep, "guidance": guidance, "rescale": rescale, **conditions}
    return feeds, {"latent": latent, "prediction": prediction.astype(np.float32)}
