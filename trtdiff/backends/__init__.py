"""The compilers trtdiff can use; a new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from trtdiff.backends.base import Backend, Session, Toolchain
from trtdiff.errors import MissingDependency, UsageError

__all__ = ["BACKENDS", "TARGETS", "Backend", "Session", "Toolchain", "backend", "best_target", "target_backend"]

BACKENDS: dict[str, str] = {
    "onnxruntime": "trtdiff.backends.onnxruntime:OnnxRuntime",
    "rounded": "trtdiff.backends.rounded:Rounded",
    "tensorrt-rtx": "trtdiff.backends.tensorrt_rtx:TensorRtRtx",
}
"""Name → where its class stands; imported on first use, since importing a compiler is slow."""

TARGETS: dict[str, str] = {
    "cpu": "onnxruntime",
    "rtx": "tensorrt-rtx",
    "rounded": "rounded",
}
"""What an engine is for → the backend that makes it; the word after `--target`. A device may follow: `rtx:sm89`."""

RUNNABLE = ("cpu",)
"""Targets that this version also runs, best first."""


def backend(name: str, device: str = "") -> Backend:
    """Give the backend of that name, for that device where it has several. Raises UsageError."""
    try:
        module, _, cls = BACKENDS[name].partition(":")
    except KeyError:
        raise UsageError(f"no backend is called {name!r}", hint=f"known: {', '.join(BACKENDS)}") from None
    make: Callable[..., Backend] = getattr(import_module(module), cls)
    return make(device) if device else make()


def target_backend(target: str) -> Backend:
    """Give the backend that makes engines for this target."""
    name, _, device = target.partition(":")
    if name not in TARGETS:
        raise UsageError(f"no target is called {name!r}", where="--target", hint=f"known: {', '.join(TARGETS)}")
    return backend(TARGETS[name], device)


def best_target() -> str:
    """Give the best target that this machine has a backend for. Raises the last MissingDependency."""
    missing = MissingDependency("no backend is known")
    for target in RUNNABLE:
        try:
            target_backend(target).toolchain()
        except MissingDependency as error:
            missing = error
        else:
            return target
    raise missing
