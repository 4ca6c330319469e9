"""Flow matching in closed form: the sampler table of FlowMatchEulerDiscreteScheduler for any size of picture.

Models like FLUX shift their schedule by the number of image tokens, so that tables for every size would be too many to
store. But this scheduler is Euler's method on x' = prediction over sigmas that follow from its config alone:

    x_0     = (1 - sigma_s) · clean + sigma_s · noise      or the noise, without a start s
    x_{i+1} = x_i + (sigma_{i+1} - sigma_i) · pred_i
    known_i = (1 - sigma_i, sigma_i)

Diffusers computes sigmas partly in float32, and in another order for each pipeline; the same operations are done here
in the same types, so that tables agree to the last bit. `trtdiff.export.closed_form` proves it when a bundle is made.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from trtdiff.digest import digest
from trtdiff.errors import UsageError
from trtdiff.sampler import SamplerTable

STABLE_DIFFUSION_3 = "stable-diffusion-3"
FLUX = "flux"

_MAX_SHIFT = {STABLE_DIFFUSION_3: 1.16, FLUX: 1.15}
"""What each pipeline takes for `max_shift` where the config has none."""
_CLASS = "FlowMatchEulerDiscreteScheduler"
_NOT_DERIVED = (
    "invert_sigmas", "stochastic_sampling", "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas",
)  # fmt: skip


def shift_exponent(config: Any, pipeline: str, image_tokens: int) -> float:
    """Give `mu`, by which a pipeline has its scheduler shift the schedule: a line through two sizes.

    `config` is a scheduler's, anything with `get`.
    """
    fewest, most = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    low, high = config.get("base_shift", 0.5), config.get("max_shift", _MAX_SHIFT[pipeline])
    slope = (high - low) / (most - fewest)
    return float(image_tokens * slope + (low - slope * fewest))


def depends_on_size(identity: Mapping[str, Any]) -> bool:
    """Whether the tables of a sampler, given what its digest covers, are those of one number of image tokens only."""
    return "image_tokens" in identity["call"] and bool(identity["config"].get("use_dynamic_shifting"))


def no_closed_form(identity: Mapping[str, Any]) -> str:
    """Say why `flow_table` cannot give this sampler's tables; nothing where it can."""
    if identity["class"] != _CLASS:
        return f"there is no closed form of {identity['class']}"
    fields = [name for name in _NOT_DERIVED if identity["config"].get(name)]
    return f"its config sets {' and '.join(fields)}, of which there is no closed form" if fields else ""


def flow_table(
    name: str, identity: Mapping[str, Any], steps: int, start: int | None, image_tokens: int
) -> SamplerTable:
    """Derive one table. `identity` is `SamplerInfo.config`: the scheduler's class and config, and the call."""
    where = f"sampler {name}, {steps} steps, start {start}, {image_tokens} image tokens"
    if reason := no_closed_form(identity):
        raise UsageError(f"this sampler cannot be derived: {reason}", where=where)
    if steps < 1 or image_tokens < 1 or not 0 <= (start or 0) < steps:
        raise UsageError("there is no such table", where=where, hint=f"starts are 0 … {steps - 1}")
    config, call = identity["config"], identity["call"]
    sigmas = _sigmas(config, call["pipeline"], steps, image_tokens)[start or 0 :]
    known = np.stack([1 - sigmas.astype(np.float64), sigmas], axis=1)
    if start is None:
        known[0] = 0, 1
    coefficients = np.zeros((len(sigmas), 3))
    coefficients[0, [0, 2]] = known[0]
    coefficients[1:, 0] = 1
    coefficients[1:, 1] = np.diff(sigmas)
    timesteps = sigmas[:-1] * config["num_train_timesteps"]
    calls = len(timesteps)
    return SamplerTable(
        name=name,
        digest=digest({**identity, "call": {**call, "image_tokens": image_tokens}}),
        steps=steps,
        start=start,
        coefficients=coefficients,
        scales=np.ones(calls),
        timesteps=timesteps,
        draws=np.zeros(calls, np.bool_),
        residual=0.0,
        known=known,
    )


def _sigmas(
    config: Mapping[str, Any], pipeline: str, steps: int, image_tokens: int
) -> npt.NDArray[np.float32]:  # [steps + 1]
    sigmas: npt.NDArray[Any]
    if pipeline == FLUX:
        sigmas = np.linspace(1.0, 1 / steps, steps).astype(np.float32)
    else:
        train = config["num_train_timesteps"]
        ends = np.array([train, 1], np.float32) / train
        if not config["use_dynamic_shifting"]:
            ends = _shifted(ends, config["shift"])
        first, last = (end * train for end in ends.tolist())
        sigmas = np.linspace(first, last, steps) / train
    if config["use_dynamic_shifting"]:
        exponent = shift_exponent(config, pipeline, image_tokens)
        factor = math.exp(exponent) if config["time_shift_type"] == "exponential" else exponent
        sigmas = factor / (factor + (1 / sigmas - 1))
    else:
        sigmas = _shifted(sigmas, config["shift"])
    if config["shift_terminal"]:
        rest = 1 - sigmas
        sigmas = 1 - rest / (rest[-1] / (1 - config["shift_terminal"]))
    return np.append(sigmas.astype(np.float32), np.float32(0))


def _shifted(sigmas: npt.NDArray[Any], shift: float) -> npt.NDArray[Any]:
    shifted: npt.NDArray[Any] = shift * sigmas / (1 + (shift - 1) * sigmas)
    return shifted
