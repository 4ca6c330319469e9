"""The compilers trtdiff can use; a new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from trtdiff.backends.base import Backend, Session, Toolchain
from trtdiff.errors import MissingDependency, UsageError

__all__ = ["BACKENDS", "TARGETS", "Backend", "Session", "Toolchain", "backend", "best_target", "target_backend"]

BACKENDS: dict[str, str] = {
    "onnxruntime": "trtdiff.backends.onnxruntime:OnnxRuntime",
}
"""Name → where its class stands; imported on first use, since importing a compiler is slow."""

TARGETS: dict[str, str] = {
    "cpu": "onnxruntime",
}
"""What an engine is for, best first → the backend that makes it; the word after `--target`."""


def backend(name: str) -> Backend:
    """Give the backend of that name."""
    try:
        module, _, cls = BACKENDS[name].partition(":")
    except KeyError:
        raise UsageError(f"no backend is called {name!r}", hint=f"known: {', '.join(BACKENDS)}") from None
    make: Callable[[], Backend] = getattr(import_module(module), cls)
    return make()


def target_backend(target: str) -> Backend:
    """Give the backend that makes engines for this target."""
    if target not in TARGETS:
        raise UsageError(f"no target is called {target!r}", where="--target", hint=f"known: {', '.join(TARGETS)}")
    return backend(TARGETS[target])


def best_target() -> str:
    """Give the best target that this machine has a backend for. Raises the last MissingDependency."""
    missing = MissingDependency("no backend is known")
    for target in TARGETS:
        try:
            target_backend(target).toolchain()
        except MissingDependency as error:
            missing = error
        else:
            return target
    raise missing
