"""Canonical graphs that were traced before: another checkpoint of the same architecture is not traced again.

A graph follows from a component's contract and config, from our code and from the libraries' versions, and from no
weight: all of that is the key. Weights are kept as names, types and shapes. Numbers are compared with PyTorch for every
checkpoint, wherever its graph comes from.

Files lie in `<cache>/graphs`, the latest of them; any may be deleted at any time.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trtdiff.digest import cache_folder, digest
from trtdiff.errors import StorageError
from trtdiff.export.folder import library_versions
from trtdiff.families.base import ComponentSpec, Config
from trtdiff.records import whole_file

if TYPE_CHECKING:
    import onnx_ir as ir

KEPT = 64
"""Graphs that are kept; one of a large model takes 1 to 5 MB."""
NO_MATTER = frozenset({"_name_or_path", "_commit_hash", "_diffusers_version", "transformers_version"})
"""Fields of a config that say where it comes from, not what the network is."""
_DIGEST = hashlib.sha256().digest_size
_WEIGHT = "a-weight"
"""Where an initializer lies that the checkpoint has to fill."""


def traced_before(
    spec: ComponentSpec, config: Config, code: str, make: Callable[[], "ir.Model"], *, fresh: bool = False
) -> tuple["ir.Model", bool]:
    """Give the canonical graph of a component, and whether it was there; else `make` makes it, and it is kept.

    `code` is the digest of our code that makes graphs. `fresh` makes it anew.
    """
    path = cache_folder() / "graphs" / f"{_key(spec, config, code)}.onnx"
    if not fresh and (found := _read(path)) is not None:
        return found, True
    model = make()
    with suppress(StorageError, OSError):  # a cache that cannot be written costs time, not correctness
        _write(model, path)
        _forget(path.parent)
    return model, False


def _key(spec: ComponentSpec, config: Config, code: str) -> str:
    build = spec.build if isinstance(spec.build, partial) else partial(spec.build)
    return digest(
        {
            "name": spec.name,
            "inputs": [repr(tensor) for tensor in spec.inputs],
            "outputs": [repr(tensor) for tensor in spec.outputs],
            "prefix": spec.prefix,
            "multiple": spec.multiple,
            "build": [build.func.__module__, build.func.__qualname__, repr(build.args), repr(build.keywords)],
            "config": json.dumps(
                {name: value for name, value in config.items() if name not in NO_MATTER}, sort_keys=True
            ),
            "code": code,
            "libraries": library_versions(),
        }
    )


def _read(path: Path) -> "ir.Model | None":
    """Give a graph that is whole, or None."""
    import onnx
    import onnx_ir as ir

    try:
        raw = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    if hashlib.sha256(raw[_DIGEST:]).digest() != raw[:_DIGEST]:
        return None
    model = ir.from_proto(onnx.load_model_from_string(raw[_DIGEST:]))
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = None
    return model


def _write(model: "ir.Model", path: Path) -> None:
    import onnx_ir as ir

    weights = [value for value in model.graph.initializers.values() if value.const_value is None]
    for value in weights:
        assert value.dtype is not None and isinstance(value.shape, ir.Shape), value.name  # noqa: S101, PT018 - traced
        value.const_value = ir.ExternalTensor(_WEIGHT, 0, 0, value.dtype, shape=value.shape, name=value.name or "")
    raw = ir.to_proto(model).SerializeToString(deterministic=True)
    for value in weights:
        value.const_value = None
    with whole_file(path) as temporary:
        temporary.write_bytes(hashlib.sha256(raw).digest() + raw)


def _forget(folder: Path) -> None:
    """Remove the graphs that nobody asked for the longest."""
    graphs = sorted(folder.glob("*.onnx"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in graphs[KEPT:]:
        path.unlink(missing_ok=True)
