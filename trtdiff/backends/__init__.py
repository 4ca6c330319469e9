"""The compilers trtdiff can use; a new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from trtdiff.backends.base import Backend, Session, Toolchain
from trtdiff.errors import MissingDependency, UsageError

__all__ = ["BACKENDS", "TARGETS", "Backend", "Session", "Toolchain", "backend", "best_target", "target_backend"]

BACKENDS: dict[str, str] = {
    "tensorrt": "trtdiff.backends.tensorrt:TensorRt",
    "tensorrt-rtx": "trtdiff.backends.tensorrt_rtx:TensorRtRtx",
    "onnxruntime": "trtdiff.backends.onnxruntime:OnnxRuntime",
    "rounded": "trtdiff.backends.rounded:Rounded",
}
"""Name → where its class stands; imported on first use, since importing a compiler is slow.

Of the engines in a bundle, those of the first backend here run that this machine can run.
"""

TARGETS: dict[str, str] = {
    "cpu": "onnxruntime",
    "rtx": "tensorrt-rtx",
    "tensorrt": "tensorrt",
    "rounded": "rounded",
}
"""What an engine is for → the backend that makes it; the word after `--target`. A device may follow: `rtx:sm89`."""


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
    """Give the first target whose engines this machine can run. Raises MissingDependency with every reason."""
    reasons = {}
    for target in TARGETS:
        reasons[target] = target_backend(target).runnable()
        if not reasons[target]:
            return target
    raise MissingDependency(
        "this machine can run engines of no target", where="; ".join(f"{name}: {why}" for name, why in reasons.items()),
        hint="pip install 'trtdiff[cpu]', or name the --target that engines are to be compiled for"
    )  # fmt: skip
