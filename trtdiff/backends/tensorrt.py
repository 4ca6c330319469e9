"""TensorRT: engines for the GPU of this machine, with kernels that were measured on it.

It is TensorRT for RTX's code under another module name; nothing of it has run on a GPU yet.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trtdiff.backends.base import Progress, Session, Toolchain
from trtdiff.backends.gpu import FLOAT8_FROM, Gpu, this_gpu, without_float8
from trtdiff.backends.options import BuilderOptions
from trtdiff.backends.tensorrt_builder import compile_graph, peak_memory
from trtdiff.backends.tensorrt_failures import not_imported, not_installed
from trtdiff.backends.timing_cache import Key
from trtdiff.errors import MissingDependency, UsageError
from trtdiff.machine import installed
from trtdiff.passes.eight_bits import EightBits
from trtdiff.types import ShapeProfile

DISTRIBUTIONS = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12", "tensorrt-cu11")
"""Packages that bring the library; the first is no more than a name for one of the others."""
AMPERE = 80
"""Compute capability, times ten, from which on hardware-compatible engines can be built and loaded."""
SHARES = {"phases": 0.9, "read": 0.0, "written": 0.1}
"""How far a build is: phases in which kernels are measured take nearly all of it. Not seen on a GPU."""


class TensorRt:
    """TensorRT, on the machine that will run its engines."""

    name = "tensorrt"
    extra = "gpu"
    passes = ()
    bases = ("float16", "bfloat16")
    formats: frozenset[EightBits] = frozenset({"int8", "float8"})
    sums = "reduce"
    fuses_attention = True
    keeps_graph = False

    def __init__(self, device: str = "") -> None:
        """`device` may name the compute capability of this machine's GPU, to be sure of it: `sm89`."""
        self._asked = device.lower()

    @property
    def device(self) -> str:
        """Compute capability of the GPU that is here: `sm89`. Raises MissingDependency."""
        return self._gpu().capability

    def toolchain(self) -> Toolchain:
        """Read the installed version and the GPU, without importing the library.

        Raises MissingDependency for no library or no GPU, UsageError for another GPU than was asked for.
        """
        gpu = self._gpu()
        packages = " ".join(f"{name} {version}" for name, version in installed(DISTRIBUTIONS).items())
        return Toolchain(self.name, _version(), gpu.capability, {"gpu": gpu.name, "packages": packages})

    def impossible(self, precision: str, formats: frozenset[str] = frozenset()) -> str:  # noqa: ARG002
        """Refuse float8 on GPUs that have none. Raises MissingDependency where it takes a GPU to say."""
        if "float8" not in formats or not (why := without_float8([self.device])):
            return ""
        return f"{why}; GPUs from sm{FLOAT8_FROM} on have it"

    def memory(self, weights: int) -> int:
        """Estimate the peak bytes of `build` as for TensorRT for RTX; not measured on a GPU."""
        return peak_memory(weights)

    def refusal(self, option: str) -> str:
        """Refuse what this GPU cannot have; what an older version does not know is an error when it is built.

        Raises MissingDependency where it takes a GPU to say.
        """
        if option != "hardware_compatible" or (gpu := self._gpu()).number >= AMPERE:
            return ""
        return f"engines for other GPUs are built on sm{AMPERE} and later, {gpu.words} is here"

    def seconds(self, weights: int) -> float:
        """Guess how long `build` takes: measuring kernels takes minutes; not measured on a GPU."""
        return 60 + weights / 10e6

    def build(
        self, graph: Path, profile: ShapeProfile, options: BuilderOptions, out: Path, progress: Progress
    ) -> Mapping[str, Any]:
        """Compile for the GPU of this machine, which takes part."""
        tools, trt = self.toolchain(), _import()
        times = Key(tools.details["gpu"], tools.device, tools.version)
        return compile_graph(trt, graph, profile, options, out, progress=progress, shares=SHARES, times=times)

    def runnable(self) -> str:
        """Refuse: this version does not run its engines."""
        return "this version of trtdiff builds TensorRT engines and does not run them yet"

    def mismatch(self, spec: Mapping[str, Any]) -> str:
        """Refuse engines of another version or for another GPU, unless they were built to be loaded there."""
        options, version, built = spec["options"], _version(), spec["backend_version"]
        compatible = options.get("version_compatible") and _release(version) >= _release(built)
        if built != version and not compatible:
            return f"it was built with TensorRT {built}, {version} is installed"
        gpu = self._gpu()
        portable = options.get("hardware_compatible") and gpu.number >= AMPERE
        if spec["device"] != gpu.capability and not portable:
            return f"it was built for {spec['device']}, {gpu.words} is here"
        return ""

    def load(self, engine: Path, *, threads: int | None = None) -> Session:  # noqa: ARG002
        """Refuse: this version compiles for TensorRT and does not run its engines."""
        raise MissingDependency(
            self.runnable(), where=str(engine), hint="run a bundle that was built with --target cpu"
        )

    def _gpu(self) -> Gpu:
        gpu = this_gpu()
        if self._asked not in {"", gpu.capability}:
            raise UsageError(
                f"this machine's GPU is {gpu.words}, not {self._asked}", where="--target",
                hint=f"TensorRT builds for the GPU that is here; for another one: --target rtx:{self._asked}",
            )  # fmt: skip
        return gpu


def _version() -> str:
    found = installed(DISTRIBUTIONS)
    if not found:
        raise not_installed("TensorRT", TensorRt.extra)
    return next(iter(found.values()))


def _release(version: str) -> tuple[int, ...]:
    """Give a version as numbers that compare: 10.13.0.35."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _import() -> Any:
    try:
        import tensorrt
    except (ImportError, OSError) as error:
        raise not_imported(error, "tensorrt", "TensorRT", TensorRt.extra) from None
    return tensorrt
