"""What a compiler is to the rest of trtdiff: two protocols, `Backend` (offline) and `Session` (at run time).

A backend turns a lowered ONNX graph into an *engine*, a folder of files that only it understands, and opens such
folders as sessions. Everything above it (store, bundle, loop, parity) is the same for every backend.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from trtdiff.backends.options import BuilderOptions
from trtdiff.passes.eight_bits import EightBits
from trtdiff.types import Array, ShapeProfile, TensorSpec

if TYPE_CHECKING:
    from trtdiff.passes.statistics import Place

Progress = Callable[[int, int], None]
"""Called with how much is done, and how much there is."""


@dataclass(frozen=True)
class Toolchain:
    """What an engine depends on besides its graph: the backend's version and the device it was compiled for."""

    backend: str
    version: str
    device: str = "cpu"
    details: Mapping[str, str] = field(default_factory=dict)


class Runs(Protocol):
    """All that a family needs of a session to make conditions from prompts."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once."""


class Session(Protocol):
    """An engine ready to execute. Not thread-safe: one caller at a time; use several sessions for several threads.

    Buffers handed to `bind` come from `allocate`, or are views into such buffers.
    """

    @property
    def inputs(self) -> Sequence[TensorSpec]:
        """Every input, with symbolic dimensions."""

    @property
    def outputs(self) -> Sequence[TensorSpec]:
        """Every output, with symbolic dimensions."""

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory where this backend reads and writes without copies."""

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Execute once; checks names, types and shapes, returns new arrays by output name."""

    def bind(self, buffers: Mapping[str, Array]) -> Callable[[], None]:
        """Prepare one execution that reads and writes exactly these buffers (all inputs and outputs, contiguous).

        The returned call does no allocation, copy or check. The buffers must outlive it.
        """

    def close(self) -> None:
        """Free the engine."""

    def __enter__(self) -> Self:
        """Use as a context manager."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""


@runtime_checkable
class LooksInside(Protocol):
    """What a session can do besides, where its engine is a graph that can be changed and run again."""

    def first_non_finite(self, feeds: Mapping[str, Array]) -> "Place | None":
        """Execute once on another session of the same engine, and give the first value that is not finite.

        None where all are finite. Raises MissingDependency without onnx-ir.
        """


class Backend(Protocol):
    """One compiler and its runtime."""

    name: str
    """Key in `BACKENDS`, and the word after `--backend`."""
    extra: str
    """The extra of this package that installs what the backend needs."""

    device: str
    """What its engines are for."""
    passes: tuple[str, ...]
    """`module:function` of the passes that put a graph into the forms this compiler is best at; after the recipe's."""
    bases: tuple[str, ...]
    """Types of arithmetic (`computes_in` of a recipe) whose graphs it compiles as they are meant; its usual first."""
    formats: frozenset[EightBits]
    """Types of 8 bits that its engines compute in."""
    sums: str
    """Form of the sampler's weighted sums: `matmul`, or `reduce` where a product might lose bits."""

    fuses_attention: bool
    """Whether its engines compute attention without ever holding the whole matrix of scores."""
    keeps_graph: bool
    """Whether its engines hold the graph that `build` is given, and its weights; else those are read and forgotten."""

    def toolchain(self) -> Toolchain:
        """Versions and device; raises MissingDependency naming the extra where the library is not installed.

        Cheap: it must not import the library.
        """

    def refusal(self, option: str) -> str:
        """Say why an option of `BuilderOptions`, by field name, cannot be had here; empty where it can."""

    def impossible(self, precision: str, formats: frozenset[str] = frozenset()) -> str:
        """Say why engines for this device cannot be made in one of `precisions`; empty where they can. Quick.

        `formats` are the types of 8 bits that graphs of this precision hold, `int8` and `float8`, whatever its name.
        """

    def memory(self, weights: int) -> int:
        """Estimate the peak bytes of memory that `build` takes for a graph with so many bytes of weights."""

    def seconds(self, weights: int) -> float:
        """Estimate how long `build` takes for a graph with so many bytes of weights, on two cores."""

    def build(
        self, graph: Path, profile: ShapeProfile, options: BuilderOptions, out: Path, progress: Progress
    ) -> Mapping[str, Any]:
        """Compile the ONNX file `graph` into files in the empty folder `out`; runs in a worker process.

        The folder of `graph` holds it and its weights and nothing else; where `keeps_graph`, it is scratch on the same
        file system as `out`, and its files may be moved out of it. `profile` has a range for every symbolic dimension
        of the graph's inputs. Returns what the compiler realised (types by layer where it tells), for the manifest.
        Raises BuildError.
        """

    def runnable(self) -> str:
        """Say why this machine cannot run this backend's engines; empty where it can. Cheap."""

    def mismatch(self, spec: Mapping[str, Any]) -> str:
        """Say why an engine with this `EngineSpec` (as its manifest has it) cannot be loaded here; empty where it can.

        Where `runnable`: an engine of another version of the library, or for another device.
        """

    def load(self, engine: Path, *, threads: int | None = None) -> Session:
        """Open an engine folder that `build` made."""
