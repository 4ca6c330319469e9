"""The compilers trtdiff can use; a new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from trtdiff.backends.base import Backend, Session, Toolchain
from trtdiff.errors import UsageError

__all__ = ["BACKENDS", "Backend", "Session", "Toolchain", "backend"]

BACKENDS: dict[str, str] = {
    "onnxruntime": "trtdiff.backends.onnxruntime:OnnxRuntime",
}
"""Name → where its class stands; imported on first use, since importing a compiler is slow."""


def backend(name: str) -> Backend:
    """Give the backend of that name."""
    try:
        module, _, cls = BACKENDS[name].partition(":")
    except KeyError:
        raise UsageError(f"no backend is called {name!r}", hint=f"known: {', '.join(BACKENDS)}") from None
    make: Callable[[], Backend] = getattr(import_module(module), cls)
    return make()
