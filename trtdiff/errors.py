"""Every error a user of trtdiff can meet.

    TrtdiffError                 1   anything that went wrong
    ├── UsageError               2   a request that cannot be meant: steps 0, an unknown scheduler, a missing folder
    │   └── ProfileError         2   a size or batch that the engines were not built for
    ├── CheckpointError          1   a checkpoint that is damaged, incomplete or of an unknown kind
    ├── ExportError              1   a model that could not be traced or whose graph breaks its contract
    ├── SamplerError             1   a scheduler that cannot be compiled into a table
    ├── BuildError               1   a compiler that failed, crashed or ran out of memory
    ├── NonFiniteError           1   a network that gave NaN or infinity
    ├── StorageError             1   a file that could not be written: disk full, no permission
    ├── ParityError              3   compiled and reference results differ by more than the tolerance
    ├── ArtefactError            4   a file of ours that is damaged, stale, or from another version or machine
    └── MissingDependency        5   a library or device that is not there

The number is the exit code of the command line. A message says what happened, `where` says in which file, field,
node or module, `hint` says what to do.
"""


class TrtdiffError(Exception):
    """What happened, where, and what to do about it."""

    exit_code = 1

    def __init__(self, message: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        where = f"\n  where: {self.where}" if self.where else ""
        hint = f"\n  to do: {self.hint}" if self.hint else ""
        return f"{self.message}{where}{hint}"

    def __reduce__(self) -> tuple[object, ...]:
        """Survive the trip from a worker process: keyword-only fields are restored as state."""
        return (type(self), (self.message,), {"where": self.where, "hint": self.hint})


class UsageError(TrtdiffError):
    """A request that cannot be meant."""

    exit_code = 2


class ProfileError(UsageError):
    """A size or batch that the engines were not built for."""


class CheckpointError(TrtdiffError):
    """A checkpoint that is damaged, incomplete or of an unknown kind."""


class ExportError(TrtdiffError):
    """A model that could not be traced, or whose graph breaks its contract."""


class SamplerError(TrtdiffError):
    """A scheduler that cannot be compiled into a table."""


class BuildError(TrtdiffError):
    """A compiler that failed, crashed or ran out of memory."""


class NonFiniteError(TrtdiffError):
    """A network that gave NaN or infinity; the message says where, and in which picture, first."""


class StorageError(TrtdiffError):
    """A file that could not be written."""


class ParityError(TrtdiffError):
    """Compiled and reference results differ by more than the tolerance."""

    exit_code = 3


class ArtefactError(TrtdiffError):
    """A file of ours that is damaged, stale, or from another version or machine."""

    exit_code = 4


class MissingDependency(TrtdiffError):  # noqa: N818 - the field's word is a missing dependency, not an error of it
    """A library or device that is not there."""

    exit_code = 5
