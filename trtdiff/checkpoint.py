"""A checkpoint on disk: its configs, where its tensors lie, its tokenizers. Nothing of it is loaded.

It is a diffusers folder,

    model_index.json                       names the pipeline class and the components
    unet/config.json, unet/*.safetensors   one folder a component
    scheduler/scheduler_config.json
    tokenizer/tokenizer.json               or vocab.json and merges.txt, or T5's spiece.model

or one file in the layout of the original training code, which looks like such a folder here. Opening a folder reads
JSON alone, opening a file its header; weights are indexed when `tensors` asks for them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from trtdiff.digest import digest, file_digest
from trtdiff.errors import CheckpointError, MissingDependency, UsageError
from trtdiff.export.diffusers_folder import DiffusersFolder
from trtdiff.export.hub import fetch, is_hub_id, snapshot_origin
from trtdiff.export.layout import DAMAGED, listing
from trtdiff.export.manifest import CheckpointOrigin
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.spiece import t5_tokenizer_json
from trtdiff.export.weight_files import weight_files
from trtdiff.single_file.checkpoint import PICKLES, SingleFile
from trtdiff.types import names

__all__ = ["Checkpoint", "TensorRef"]


class Parts(Protocol):
    """What a form of checkpoint has to give."""

    @property
    def pipeline(self) -> str:
        """The diffusers pipeline class."""

    @property
    def where(self) -> str:
        """What says that it is this class."""

    @property
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """By component folder."""

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: what was chosen or assumed."""

    @property
    def variants(self) -> Mapping[str, str | None]:
        """Component with weights → variant."""

    def tensors(self, folder: str) -> Mapping[str, TensorRef]:
        """Index a component's weights."""

    def files(self, folder: str) -> Mapping[str, Path]:
        """Name → file that holds a component's weights."""

    def tokenizer(self, folder: str) -> Path:
        """Give the folder that holds a tokenizer's files."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint, opened with `Checkpoint.open`."""

    path: Path
    """The folder, or the one file."""
    name: str
    """The folder's own name, the file's without its ending, or the hub id."""
    revision: str | None
    """Commit of a checkpoint that comes from the hub or lies in its cache."""
    parts: Parts
    remark: str
    """That the hub's cache was used; empty otherwise."""

    @classmethod
    def open(
        cls,
        source: str,
        *,
        revision: str | None = None,
        variant: str | None = None,
        tokenizer: str | None = None,
        prediction: str | None = None,
    ) -> "Checkpoint":
        """Open a folder, a file, or a hub id (`owner/name`, fetched or found in the cache).

        `variant` (`fp16`) is preferred where a component has it; without it, files without a variant are. `tokenizer`
        (a folder that has one) and `prediction` (`epsilon`, `v_prediction`) say of a file what it does not say itself.
        Raises UsageError for a source that is not there, CheckpointError for one that is damaged or incomplete.
        """
        if Path(source).expanduser().is_file():
            return cls._of_file(Path(source).expanduser(), revision, variant, tokenizer, prediction)
        for option, value in (("tokenizer", tokenizer), ("prediction", prediction)):
            if value is not None:
                raise UsageError(
                    f"{source} is not one file, and says its {option} itself", hint=f"leave the {option} out"
                )
        path, name, commit, remark = _locate(source, revision, variant)
        return cls(path, name, commit, DiffusersFolder.open(path, variant=variant), remark)

    @classmethod
    def _of_file(
        cls, path: Path, revision: str | None, variant: str | None, tokenizer: str | None, prediction: str | None
    ) -> "Checkpoint":
        for option, value in (("revision", revision), ("variant", variant)):
            if value is not None:
                raise UsageError(f"{path.name} is one file, and has no {option}", hint=f"leave the {option} out")
        _refuse_component(path)
        folder = None if tokenizer is None else Path(tokenizer).expanduser()
        name, commit = snapshot_origin(path) or (path.stem, None)
        return cls(path, name, commit, SingleFile.open(path, tokenizer=folder, prediction=prediction), "")

    @property
    def pipeline(self) -> str:
        """The diffusers pipeline class."""
        return self.parts.pipeline

    @property
    def configs(self) -> Mapping[str, Mapping[str, Any]]:
        """By component folder, as stored; a tokenizer's has its special tokens in it."""
        return self.parts.configs

    @property
    def notes(self) -> tuple[str, ...]:
        """For people: that the hub's cache was used, and what was chosen: `unet: fp16 variant, 1 file`."""
        return (*filter(None, [self.remark]), *self.parts.notes)

    @property
    def variants(self) -> Mapping[str, str | None]:
        """The variant that each component is read from; None for the plain files."""
        return self.parts.variants

    @property
    def weighted(self) -> tuple[str, ...]:
        """Components that have weights."""
        return tuple(self.parts.variants)

    def tensors(self, folder: str) -> Mapping[str, TensorRef]:
        """Index a component's weights by their names in diffusers or transformers, from headers alone.

        Raises CheckpointError for a component without weights, and for weights that are damaged, incomplete, or a
        pickle that wants to run something.
        """
        return self.parts.tensors(folder)

    def tokenizer_json(self, folder: str) -> bytes:
        """Give a tokenizer in tokenizers' own format, made from vocabulary and merges if only those are stored."""
        place = self.parts.tokenizer(folder)
        stored = place / "tokenizer.json"
        try:
            made = stored.read_bytes() if stored.is_file() else _tokenizer_from_parts(place)
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
        files = {folder: self.parts.files(folder) for folder in self.weighted}
        every = {path for named in files.values() for path in named.values()}
        digests = {path: _digest(path, progress, fresh=fresh) for path in sorted(every)}
        weights = {folder: {name: digests[path] for name, path in named.items()} for folder, named in files.items()}
        vocabularies = {
            f"{folder}/{file.name}": _digest(file, None)
            for folder in self.configs
            if folder.startswith("tokenizer")
            for file in sorted(self.parts.tokenizer(folder).glob("*"))
            if file.name in {"tokenizer.json", "vocab.json", "merges.txt", "added_tokens.json", "spiece.model"}
        }
        content = {"configs": self.configs, "weights": weights, "tokenizers": vocabularies}
        return CheckpointOrigin(self.name, self.revision, digest(content), self.pipeline)


# --- finding it -------------------------------------------------------------------------------------------------------


def _locate(source: str, revision: str | None, variant: str | None) -> tuple[Path, str, str | None, str]:
    """Give folder, name and commit of a source, and what there is to say about how it was found."""
    path = Path(source).expanduser()
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


def _refuse_component(path: Path) -> None:
    """Refuse the weights of one component of a folder that is a checkpoint."""
    if (path.parent.parent / "model_index.json").is_file() and weight_files([path.name]):
        raise CheckpointError(
            f"{path.name} is one component of a checkpoint",
            where=str(path),
            hint=f"give the folder: {path.parent.parent}",
        )


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
    if files := [name for name in inside if name.endswith((".safetensors", *PICKLES))]:
        return f"a checkpoint in one file is given by its name: {path / files[0]}"
    below = sorted(item.parent.name for item in path.glob("*/model_index.json"))
    return f"did you mean {names(below, 3)} in it?" if below else "give the folder that holds model_index.json"


# --- what it holds ----------------------------------------------------------------------------------------------------


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
