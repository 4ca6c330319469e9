"""`export.json`: what an export folder holds. Reading it imports neither torch nor onnx.

exports/NAME/
  export.json
  text_encoder.onnx  denoiser.onnx  vae_decoder.onnx  vae_encoder.onnx
  weights/<folder>.safetensors          # external data of the graphs; one VAE file serves both VAE graphs
  tokenizers/<folder>.json              # tokenizers' own format
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trtdiff.families.base import ModelFacts
from trtdiff.types import TensorSpec

EXPORT_SCHEMA = 2
EXPORT_FILE = "export.json"
"""The manifest's name in an export folder."""


@dataclass(frozen=True)
class CheckpointOrigin:
    """Where a checkpoint came from, in words that mean the same on another machine: no local paths."""

    name: str
    """A folder's own name, or a hub id."""
    revision: str | None
    """Commit of a hub checkpoint."""
    digest: str
    """sha256 over the configs and the digests of all weight files."""
    pipeline: str
    """The diffusers pipeline class."""


@dataclass(frozen=True)
class ExportedComponent:
    """One graph and the weight files it refers to, paths relative to the export folder."""

    name: str
    folder: str
    graph: str
    graph_sha256: str
    weights: Mapping[str, str]
    """Weight file → sha256."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class ExportManifest:
    """Everything `build` needs to know of an export."""

    schema: int
    trtdiff: str
    name: str
    family: str
    checkpoint: CheckpointOrigin
    facts: ModelFacts
    components: tuple[ExportedComponent, ...]
    tokenizers: Mapping[str, str]
    """Tokenizer name → file relative to the export folder."""
    tokenizer_sha256: Mapping[str, str]
    scheduler: Mapping[str, Any]
    """The checkpoint's own scheduler config, `_class_name` included."""
    configs: Mapping[str, Mapping[str, Any]]
    """Config of every component folder, as it stands in the checkpoint."""
    checks: Mapping[str, Any]
    """What the export verified: shapes and relative L2 error by component, or why not."""
    versions: Mapping[str, str]
    """Versions of the libraries that made the graphs: what a new export would have to be compared with."""
    dtype: str = "stored"
    """Type in which weights lie in the export: as the checkpoint stores them, or the one that was asked for."""
    code: str = ""
    """sha256 of trtdiff's own code that made it."""
