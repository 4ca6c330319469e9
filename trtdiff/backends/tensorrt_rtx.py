"""TensorRT for RTX: engines for NVIDIA's GPUs of this and the last generations, compiled on any machine.

Building needs no GPU. A target names the compute capabilities that the engine is for (`rtx:sm89`, `rtx:sm86,sm120`);
without any it is portable, and the GPU's own kernels are chosen when it is first loaded.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from trtdiff.backends.base import Progress, Session, Toolchain
from trtdiff.backends.gpu import this_gpu, without_float8
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_builder import compile_graph, peak_memory
from trtdiff.backends.tensorrt_failures import not_imported, not_installed
from trtdiff.errors import MissingDependency, UsageError
from trtdiff.passes.eight_bits import EightBits
from trtdiff.types import ShapeProfile

_PRODUCT = "tensorrt-rtx"
PORTABLE = "portable"
PORTABLE_FROM = 80
"""Compute capability, times ten, from which on a portable engine can be loaded: Turing's must be named."""
TURING = "sm75"
REFUSED = {
    "optimization_level": "TensorRT for RTX makes the same engine at every level, byte for byte: kernels are chosen "
    "when a GPU loads it",
    "timing_cache": "TensorRT for RTX measures nothing while it builds: timing caches do nothing there, and looking at "
    "one asks for a GPU",
    "version_compatible": "it needs the lean runtime (libnvinfer_lean), which TensorRT for RTX does not have",
    "hardware_compatible": "TensorRT for RTX ignores it; name the GPUs instead, --target rtx:sm86,sm120, or none of "
    "them: --target rtx makes portable engines",
}
"""What this library cannot do, by option, as version 1.7.1 shows it on a machine without a GPU."""
SHARES = {"phases": 0.1, "read": 0.5, "written": 0.4}
"""How far a build is: the phases are over in a moment, and weights are read for the first half of it."""


class TensorRtRtx:
    """TensorRT for RTX, ahead of time."""

    name = "tensorrt-rtx"
    extra = "rtx"
    passes = ("trtdiff.passes.decompose_attention:decompose_attention target=rtx",)
    bases = ("float16", "bfloat16")
    formats: frozenset[EightBits] = frozenset({"int8", "float8"})
    sums = "reduce"
    fuses_attention = True
    keeps_graph = False

    def __init__(self, device: str = "") -> None:
        """`device` lists compute capabilities, `sm86,sm89`; empty or `portable`: none in particular.

        Raises UsageError for a malformed one.
        """
        named = "" if device == PORTABLE else device.lower()
        capabilities = list(dict.fromkeys(named.split(","))) if named else []
        if malformed := [item for item in capabilities if not re.fullmatch(r"sm\d{2,3}", item)]:
            raise UsageError(
                f"{malformed[0]!r} is not a compute capability",
                where="--target",
                hint="write rtx:sm89, or rtx:sm86,sm89",
            )
        self.device = ",".join(sorted(capabilities, key=lambda item: int(item[2:]))) or PORTABLE

    def toolchain(self) -> Toolchain:
        """Read the installed version, without importing the library."""
        try:
            return Toolchain(self.name, metadata.version("tensorrt-rtx"), self.device)
        except metadata.PackageNotFoundError:
            raise not_installed(_PRODUCT, self.extra) from None

    def impossible(self, precision: str, formats: frozenset[str] = frozenset()) -> str:
        """Refuse compute capabilities that the library does not know, and types that one of them has not.

        Turing has no bfloat16; float8 begins with Ada. A portable engine may hold float8: it is for the GPUs that have
        it. int8 is known to all, though Turing has no kernels for convolutions in it: that is seen once it is built.
        """
        if self.device == PORTABLE:
            return ""
        asked, known = self.device.split(","), _known(_import())
        if unknown := [item for item in asked if item not in known]:
            return f"TensorRT for RTX does not build for {unknown[0]}, only for {', '.join(known)}"
        if precision == "bf16" and TURING in asked:
            return f"{TURING} has no bfloat16"
        if "float8" not in formats or not (why := without_float8(asked)):
            return ""
        return f"{why}; of the GPUs that TensorRT for RTX builds for, {', '.join(_with_float8(known))} have it"

    def memory(self, weights: int) -> int:
        """Estimate the peak bytes of `build`."""
        return peak_memory(weights)

    def refusal(self, option: str) -> str:
        """Refuse what the library ignores or fails at."""
        return REFUSED.get(option, "")

    def seconds(self, weights: int) -> float:
        """Estimate how long `build` takes; with the passes, within a quarter of `scripts/bench_rtx.py` for UNets."""
        return weights / 110e6

    def build(
        self,
        graph: Path,
        profile: ShapeProfile,
        options: BuilderOptions,
        out: Path,
        progress: Progress,
    ) -> Mapping[str, Any]:
        """Compile for the device's compute capabilities; no GPU takes part."""
        trt = _import()

        def configure(config: Any) -> None:
            if self.device == PORTABLE:
                return
            capabilities = self.device.split(",")
            config.num_compute_capabilities = len(capabilities)
            for index, item in enumerate(capabilities):
                known = getattr(trt.ComputeCapability, item.upper(), None)
                if known is None or not config.set_compute_capability(known, index):
                    raise UsageError(
                        f"TensorRT for RTX {trt.__version__} does not build for {item}", where="--target",
                        hint=f"it builds for {', '.join(_known(trt))}"
                    )  # fmt: skip

        return compile_graph(trt, graph, profile, options, out, progress=progress, shares=SHARES, configure=configure)

    def runnable(self) -> str:
        """Refuse: this version does not run its engines."""
        return "this version of trtdiff builds TensorRT for RTX engines and does not run them yet"

    def mismatch(self, spec: Mapping[str, Any]) -> str:
        """Refuse engines of another version, and those for other GPUs than the one that is here, if one is."""
        version, built = self.toolchain().version, spec["backend_version"]
        if built != version:
            return f"it was built with TensorRT for RTX {built}, {version} is installed"
        try:
            here = this_gpu()
        except MissingDependency:
            return ""  # `runnable` says so
        if spec["device"] == PORTABLE:
            turing = here.number < PORTABLE_FROM
            if turing:
                return f"portable engines need sm{PORTABLE_FROM} or later, {here.words} is here"
            return without_float8([here.capability]) if _has_float8(spec) else ""
        fits = here.capability in spec["device"].split(",")
        return "" if fits else f"it was built for {spec['device']}, {here.words} is here"

    def load(self, engine: Path, *, threads: int | None = None) -> Session:  # noqa: ARG002
        """Refuse: this version compiles for TensorRT for RTX and does not run its engines."""
        raise MissingDependency(
            self.runnable(), where=str(engine), hint="run a bundle that was built with --target cpu"
        )


def _has_float8(spec: Mapping[str, Any]) -> bool:
    how = spec.get("recipe", {}).get("quantization") or {}
    return "float8" in {how.get("weights"), how.get("activations")}


def _known(trt: Any) -> list[str]:
    """Give the compute capabilities that the library builds for."""
    return [name.lower() for name in trt.ComputeCapability.__members__ if name.startswith("SM")]


def _with_float8(known: Sequence[str]) -> list[str]:
    return [item for item in known if not without_float8([item])]


def _import() -> Any:
    try:
        import tensorrt_rtx
    except (ImportError, OSError) as error:
        raise not_imported(error, "tensorrt_rtx", _PRODUCT, TensorRtRtx.extra) from None
    return tensorrt_rtx
