"""A diffusers checkpoint on disk: its configs, where its tensors lie, its tokenizers. Nothing of it is loaded.

    model_index.json                       names the pipeline class and the components
    unet/config.json, unet/*.safetensors   one folder a component
    scheduler/scheduler_config.json
    tokenizer/tokenizer.json               or vocab.json and merges.txt, or T5's spiece.model

Opening reads JSON alone; weights are indexed when `tensors` asks for them, from their headers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from trtdiff.digest import digest, file_digest
from trtdiff.errors import CheckpointError, MissingDependency, UsageError
from trtdiff.export.hub import fetch, is_hub_id, snapshot_origin
from trtdiff.export.layout import (
    DAMAGED,
    Configs,
    components_of,
    left_out,
    listing,
    options_of,
    read_config,
    read_json,
)
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.spiece import t5_tokenizer_json
from trtdiff.export.weight_files import WeightFile, choose, files_of, read_tensors, weight_files
from trtdiff.types import names

__all__ = ["Checkpoint", "TensorRef"]


@dataclass(frozen=True)
class Checkpoint:
    """A diffusers checkpoint, opened with `Checkpoint.open`."""

    path: Path
    name: str
    """The folder's own name, or the hub id."""
    revision: str | None
    """Commit of a checkpoint that comes from the hub or lies in its cache."""
    pipeline: str
    """The diffusers pipeline class."""
    configs: Mapping[str, Mapping[str, Any]]
    """By component folder, as stored; a tokenizer's has its special tokens in it. `model_index` has the pipeline's."""
    notes: tuple[str, ...]
    """For people: that the hub's cache was used, and what was chosen: `unet: fp16 variant, 1 file`."""
    _weights: Mapping[str, WeightFile] = field(repr=False)

    @classmethod
    def open(cls, source: str, *, revision: str | None = None, variant: str | None = None) -> "Checkpoint":
        """Open a folder, or a hub id (`owner/name`, fetched or found in the cache).

        `variant` (`fp16`) is preferred where a component has it; without it, files without a variant are.
        Raises UsageError for a source that is not there, CheckpointError for one that is damaged or incomplete.
        """
        path, name, commit, remark = _locate(source, revision, variant)
        index = read_json(path / "model_index.json")
        pipeline = index.get("_class_name")
        if not isinstance(pipeline, str):
            raise CheckpointError(
                "model_index.json names no pipeline class",
                where=f"{path / 'model_index.json'}: _class_name",
                hint=DAMAGED,
            )
        configs, weights = Configs(model_index=options_of(index)), {}
        for component, library in components_of(index, path).items():
            configs[component] = read_config(path / component)
            chosen = choose(listing(path / component), variant=variant, library=library)
            if chosen is not None:
                weights[component] = chosen
        _check_variant(path, weights, variant)
        files = (_note(path / component, chosen) for component, chosen in weights.items())
        unfiltered = (f"{part}: not compiled, so pictures are not filtered" for part in left_out(index))
        notes = (*filter(None, [remark]), *files, *unfiltered)
        return cls(path, name, commit, pipeline, configs, notes, weights)

    @property
    def variants(self) -> Mapping[str, str | None]:
        """The variant that each component is read from; None for the plain files."""
        return {name: chosen.variant or None for name, chosen in self._weights.items()}

    @property
    def weighted(self) -> tuple[str, ...]:
        """Components that have weights."""
        return tuple(self._weights)

    def tensors(self, folder: str) -> Mapping[str, TensorRef]:
        """Index a component's weights by their names in the checkpoint, from headers alone.

        Raises CheckpointError for a component without weights, and for weights that are damaged, incomplete, or a
        pickle that wants to run something.
        """
        return read_tensors(self.path / folder, self._chosen(folder))

    def tokenizer_json(self, folder: str) -> bytes:
        """Give a tokenizer in tokenizers' own format, made from its parts if only those are stored."""
        stored = self.path / folder / "tokenizer.json"
        try:
            made = stored.read_bytes() if stored.is_file() else _tokenizer_from_parts(self.path / folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {stored.name}: {error.strerror}", where=str(stored), hint=DAMAGED
            ) from None
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_buffer(made)
        except Exception as error:  # noqa: BLE001 - tokenizers raises bare Exception
            raise CheckpointError(
                f"{folder} is not a readable tokenizer: {error}", where=str(stored), hint=DAMAGED
            ) from None
        return made

    def origin(self, *, progress: Callable[[int], None] | None = None, fresh: bool = False) -> CheckpointOrigin:
        """Say where this checkpoint comes from, with a digest over configs, tokenizers and weights.

        Weights that were never digested before are read once, all of them if `fresh`; `progress` is told the bytes.
        """
        weights = {
            folder: {file.name: _digest(file, progress, fresh=fresh) for file in files_of(self.path / folder, chosen)}
            for folder, chosen in self._weights.items()
        }
        vocabularies = {
            f"{folder}/{file.name}": _digest(file, None)
            for folder in self.configs
            for file in sorted((self.path / folder).glob("*"))
            if file.name in {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model"}
        }
        content = {"configs": self.configs, "weights": weights, "tokenizers": vocabularies}
        return CheckpointOrigin(self.name, self.revision, digest(content), self.pipeline)

    def _chosen(self, folder: str) -> WeightFile:
        if folder not in self._weights:
            inside = listing(self.path / folder)
            raise CheckpointError(
                f"{folder} has no weights",
                where=str(self.path / folder),
                hint=f"expected diffusion_pytorch_model or model .safetensors, found {names(inside) or 'nothing'}",
            )
        return self._weights[folder]


# --- finding it -------------------------------------------------------------------------------------------------------


def _locate(source: str, revision: str | None, variant: str | None) -> tuple[Path, str, str | None, str]:
    """Give folder, name and commit of a source, and what there is to say about how it was found."""
    path = Path(source).expanduser()
    if path.is_file():
        raise UsageError(
            f"{path.name} is one file; single-file checkpoints are not supported yet",
            where=str(path),
            hint="load it with diffusers' from_single_file, save_pretrained it, and give that folder",
        )
    if not path.is_dir():
        if not is_hub_id(source):
            raise UsageError(f"no such folder: {source}", where=str(path.absolute().parent), hint=_near(path))
        path, remark = fetch(source, revision=revision, variant=variant)
        _, commit = snapshot_origin(path) or (None, revision)
        return path, source, commit, remark
    if revision is not None:
        raise UsageError(f"{source} is a folder, a revision belongs to a hub id", hint="leave the revision out")
    if not (path / "model_index.json").is_file():
        raise CheckpointError(
            f"{path.name or path} is not a diffusers checkpoint: it has no model_index.json",
            where=str(path),
            hint=_what_is_it(path),
        )
    name, commit = snapshot_origin(path) or (path.resolve().name, None)
    return path, name, commit, ""


def _near(path: Path) -> str:
    parent = path.absolute().parent
    if "@" in path.name:
        return "a hub id is owner/name; its revision is given apart"
    if not parent.is_dir():
        return f"{parent} is not there either"
    folders = sorted(item.name for item in parent.iterdir() if item.is_dir())
    if near := get_close_matches(path.name, folders, n=3):
        return f"did you mean {' or '.join(near)}?"
    return "give a checkpoint's folder, or a hub id like owner/name"


def _what_is_it(path: Path) -> str:
    inside = listing(path)
    if "config.json" in inside or weight_files(inside):
        return "this is one component; give the folder above it, which holds model_index.json"
    if any(name.endswith((".safetensors", ".ckpt")) for name in inside):
        return "single-file checkpoints are not supported yet; save it with diffusers first"
    below = sorted(item.parent.name for item in path.glob("*/model_index.json"))
    return f"did you mean {names(below, 3)} in it?" if below else "give the folder that holds model_index.json"


# --- what it holds ----------------------------------------------------------------------------------------------------


def _check_variant(path: Path, weights: Mapping[str, WeightFile], variant: str | None) -> None:
    if variant is None or any(chosen.variant == variant for chosen in weights.values()):
        return
    there = {file.variant for folder in weights for file in weight_files(listing(path / folder))} - {""}
    raise UsageError(
        f"no component has the variant {variant!r}",
        where=str(path),
        hint=f"there is {', '.join(sorted(there))}" if there else "this checkpoint has no variants; leave it out",
    )


def _note(folder: Path, chosen: WeightFile) -> str:
    """Say which files a component is read from, and which other variants were left."""
    which = f"{chosen.variant} variant" if chosen.variant else "default weights"
    count = len(files_of(folder, chosen))
    pickle = ", pickled" if chosen.format == "bin" else ""
    others = sorted(
        {file.variant or "default" for file in weight_files(listing(folder))} - {chosen.variant or "default"}
    )
    left = f" (not used: {', '.join(others)})" if others else ""
    return f"{folder.name}: {which}, {count} {'file' if count == 1 else 'files'}{pickle}{left}"


def _digest(file: Path, progress: Callable[[int], None] | None, *, fresh: bool = False) -> str:
    if file.exists() and not file.is_file():  # a pipe would be waited for
        raise CheckpointError(f"{file.name} is not a file", where=str(file), hint=DAMAGED)
    try:
        return file_digest(file, fresh=fresh, progress=progress)
    except OSError as error:
        raise CheckpointError(f"cannot read {file.name}: {error.strerror}", where=str(file), hint=DAMAGED) from None


def _tokenizer_from_parts(folder: Path) -> bytes:
    """Make T5's tokenizer from `spiece.model`, or let transformers make CLIP's from `vocab.json` and `merges.txt`."""
    if (folder / "spiece.model").is_file():
        return t5_tokenizer_json(folder / "spiece.model")
    missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder.name} has neither tokenizer.json nor {' and '.join(missing)} nor spiece.model",
            where=str(folder),
            hint=DAMAGED,
        )
    try:
        import transformers
    except ImportError:
        raise MissingDependency(
            "making tokenizer.json needs transformers", where=str(folder), hint="pip install 'trtdiff[compile]'"
        ) from None
    try:
        tokenizer: Any = transformers.CLIPTokenizerFast.from_pretrained(  # type: ignore[attr-defined]
            folder, local_files_only=True
        )
        made: str = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # noqa: BLE001 - damaged vocabularies raise whatever their bytes make of them
        raise CheckpointError(
            f"{folder.name} cannot be made into a tokenizer: {error}", where=str(folder), hint=DAMAGED
        ) from None
    return made.encode()
