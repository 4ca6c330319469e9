"""What a user may ask of a compiler besides sizes and precision. A backend takes an option, or says why it cannot."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from trtdiff.errors import UsageError

LEVELS = range(6)
"""TensorRT's optimization levels: 0 tries nothing, 5 tries everything."""


@dataclass(frozen=True)
class BuilderOptions:
    """Options of one build; what is None or False was not asked for, and the compiler's own default holds."""

    optimization_level: int | None = None
    workspace: int | None = None
    """Bytes of device memory that a kernel may use as scratch."""
    timing_cache: Path | None = None
    """File of measured kernel times, read and added to. Changes how long a build takes, so no part of a key."""
    weight_streaming: bool = False
    """Let the engine keep weights in host memory and stream them while it runs."""
    version_compatible: bool = False
    """Let later versions of the library load the engine."""
    hardware_compatible: bool = False
    """Let GPUs of other generations load the engine."""

    def __post_init__(self) -> None:
        """Refuse what no compiler takes. Raises UsageError."""
        if self.optimization_level is not None and self.optimization_level not in LEVELS:
            raise UsageError(f"there is no optimization level {self.optimization_level}", where="--optimization-level",
                             hint=f"{LEVELS[0]} (compiles fastest) to {LEVELS[-1]} (runs fastest)")  # fmt: skip
        if self.workspace is not None and self.workspace <= 0:
            raise UsageError(f"a workspace of {self.workspace} bytes is none", where="--workspace",
                             hint="give a size such as 4GB, or leave it out")  # fmt: skip

    def asked(self) -> Iterator[str]:
        """Names of the fields that were asked for; a level of 0 is one."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return (name for name, value in values if value is not None and value is not False)

    def only(self, names: "set[str]") -> "BuilderOptions":
        """Leave out what is not in `names`."""
        return BuilderOptions(**{name: getattr(self, name) for name in self.asked() if name in names})

    def content(self) -> dict[str, Any]:
        """Give what determines engines: the options that were asked for, without the timing cache."""
        return {name: getattr(self, name) for name in self.asked() if name != "timing_cache"}

    def json(self) -> dict[str, Any]:
        """Give everything as JSON-like values, for the worker."""
        return {**asdict(self), "timing_cache": None if self.timing_cache is None else str(self.timing_cache)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Read what `json` gave."""
        cache = values.get("timing_cache")
        return cls(**{**values, "timing_cache": None if cache is None else Path(cache)})


NO_OPTIONS = BuilderOptions()


def flag(option: str) -> str:
    """Give the command line's word for a field."""
    return "--" + option.replace("_", "-")
