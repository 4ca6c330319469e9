"""Numerics of a written graph: PyTorch against ONNX Runtime, at two shapes that differ from the traced one.

A size that the trace baked in, a wrong axis, a constant without its true value: all show as a large error here. Both
sides compute in float32 from the very same stored weights, so what is left is the order of sums. Measured on random
weights: 1e-7 to 4e-6 relative L2; the bound is 1e-4.

PyTorch's side is built for real, so this takes the memory of a component's weights in float32. ONNX Runtime's does not:
without its optimizations, which fold and repack weights, it maps their files and casts them one by one.
"""

import gc
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.errors import ExportError, MissingDependency, UsageError
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.trace import fake_mode, sizes_of
from trtdiff.export.unfilled import build_unfilled
from trtdiff.families.base import ComponentSpec, Config
from trtdiff.machine import available_memory
from trtdiff.types import Array

if TYPE_CHECKING:
    import torch

BOUND = 1e-4
"""Largest relative L2 error, ‖onnx - torch‖₂ / ‖torch‖₂."""

CHECKED_AT = (
    {"batch": 1, "height": 8, "width": 16, "tokens": 12, "context": 14, "long_tokens": 10},
    {"batch": 3, "height": 9, "width": 5, "tokens": 6, "context": 9, "long_tokens": 13},
)
"""Sizes in units of a dimension's divisor: one image of aligned sides, then three of odd sides."""


@dataclass(frozen=True)
class CheckPoint:
    """One comparison."""

    sizes: Mapping[str, int]
    relative_l2: Mapping[str, float]
    """By output."""


def check_graph(
    path: Path, spec: ComponentSpec, config: Config, weights: Mapping[str, TensorRef]
) -> tuple[CheckPoint, ...]:
    """Compare a written graph with PyTorch; raise ExportError where an output differs by more than the bound."""
    points = [sizes_of(spec, units) for units in CHECKED_AT]
    feeds = [_feeds(spec, sizes, seed) for seed, sizes in enumerate(points)]
    expected = _run_torch(spec, config, weights, feeds)
    got = _run_onnx(path, spec, feeds)
    checks = tuple(
        CheckPoint(sizes, {name: relative_l2(g[name], e[name]) for name in e})
        for sizes, g, e in zip(points, got, expected, strict=True)
    )
    for check in checks:
        for name, error in check.relative_l2.items():
            if not error <= BOUND:  # NaN is not
                sizes = ", ".join(f"{dim} {size}" for dim, size in check.sizes.items())
                raise ExportError(
                    f"output {name} differs from PyTorch by {error:.1e} (relative L2, bound {BOUND:.0e})",
                    where=f"{spec.name} at {sizes}",
                    hint="the graph would give wrong pictures; --no-check exports it nevertheless",
                )
    return checks


def require_memory(parameters: Mapping[str, int]) -> None:
    """Refuse early where the machine lacks the memory that checking takes; elements of weights by component."""
    needed = memory_for_check(max(parameters.values()))
    free = available_memory()
    if needed > free:
        raise UsageError(
            f"checking against PyTorch takes about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free",
            where=f"{max(parameters, key=lambda name: parameters[name])}",
            hint="free some memory, or export with --no-check (about 0.6 GB)",
        )


def memory_for_check(parameters: int) -> int:
    """Estimate the peak in bytes: imports and trace, and a component's weights in float32.

    Measured with SD1.5 (860 M parameters in the denoiser, stored in fp16): 4.85 GB.
    """
    return int(700e6 + 1.25 * 4 * parameters)


def relative_l2(got: Array, expected: Array) -> float:
    """‖got - expected‖₂ / ‖expected‖₂ in float64; NaN for shapes that differ, emptiness and anything not finite."""
    if got.shape != expected.shape or got.size == 0:
        return float("nan")
    difference = got.astype(np.float64) - expected.astype(np.float64)
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(difference)) / norm if norm else float("nan")


def require_onnxruntime() -> None:
    """Raise MissingDependency without ONNX Runtime."""
    if find_spec("onnxruntime") is None:
        raise MissingDependency(
            "checking against PyTorch needs onnxruntime",
            hint="pip install 'trtdiff[cpu]', or export with --no-check",
        )


def open_graph(path: Path) -> Any:
    """Open a graph in ONNX Runtime as it is written, with its weights left in their files: about 30 MB at SD1.5's size.

    Raises MissingDependency without ONNX Runtime, ExportError for a graph that it refuses.
    """
    require_onnxruntime()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors are one private class a status
        raise ExportError(f"ONNX Runtime refuses the graph: {str(error).splitlines()[0]}", where=path.name) from error


# --- both sides ------------------------------------------------------------------------------------------------------


def _run_torch(
    spec: ComponentSpec, config: Config, weights: Mapping[str, TensorRef], feeds: list[dict[str, Array]]
) -> list[dict[str, Array]]:
    import torch

    module = build_unfilled(spec, config, fake_mode())
    filled = {f"{spec.prefix}.{name}": _load(ref).float() for name, ref in weights.items()}
    module.load_state_dict(filled, strict=False, assign=True)
    del filled
    results = []
    with torch.inference_mode():
        for feed in feeds:
            outputs = module(*(torch.from_numpy(feed[tensor.name]) for tensor in spec.inputs))
            given = outputs if isinstance(outputs, tuple) else (outputs,)
            results.append({t.name: out.numpy() for t, out in zip(spec.outputs, given, strict=True)})
    del module
    gc.collect()
    return results


def _load(ref: TensorRef) -> "torch.Tensor":
    import torch

    elements = ref.nbytes // getattr(torch, ref.dtype).itemsize
    stored = torch.from_file(str(ref.file), shared=False, size=ref.offset + ref.nbytes, dtype=torch.uint8)
    return stored[ref.offset :].view(getattr(torch, ref.dtype))[:elements].reshape(ref.shape)


def _run_onnx(path: Path, spec: ComponentSpec, feeds: list[dict[str, Array]]) -> list[dict[str, Array]]:
    session = open_graph(path)
    outputs = [tensor.name for tensor in spec.outputs]
    results: list[dict[str, Array]] = []
    for feed in feeds:
        try:
            results.append(dict(zip(outputs, session.run(outputs, feed), strict=True)))
        except Exception as error:  # onnxruntime's errors are one private class a status
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in feed.items())
            raise ExportError(
                f"the graph does not run: {str(error).splitlines()[0]}", where=f"{spec.name} at {sizes}"
            ) from error
    return results


# --- what goes in ----------------------------------------------------------------------------------------------------


def _feeds(spec: ComponentSpec, sizes: Mapping[str, int], seed: int) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {tensor.name: spec.draw(tensor, tensor.shape(sizes), random) for tensor in spec.inputs}
