"""Hub ids: which look like one, and a snapshot of the files that an export reads, from the hub or from its cache."""

import re
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError, MissingDependency, TrtdiffError, UsageError
from trtdiff.export.layout import components_of, read_json
from trtdiff.export.weight_files import choose, read_weight_map, shard_names

SMALL_FILES = ("*.json", "*/*.json", "*/*.txt", "*/*.model")
"""Configs, tokenizers and indices of shards; weights are fetched by their full names."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")


def is_hub_id(source: str) -> bool:
    """Whether a text that is no existing path can be meant as `owner/name` on the hub."""
    return _ID.fullmatch(source) is not None and not Path(source).parent.is_dir()


def snapshot_origin(path: Path) -> tuple[str, str] | None:
    """Hub id and commit of a folder that lies in a hub cache."""
    match = _SNAPSHOT.search(path.absolute().as_posix())
    return (f"{match['owner']}/{match['name']}", match["revision"]) if match else None


def fetch(source: str, *, revision: str | None, variant: str | None) -> tuple[Path, str]:
    """Give a local snapshot of a hub checkpoint: fetched where the hub answers, else what its cache holds.

    The text beside it says that it came from the cache, and why; it is empty where the hub answered.

    Only configs, tokenizers and the chosen weights are fetched. Raises UsageError for an id or revision that does not
    exist, CheckpointError where neither hub nor cache has it, MissingDependency without huggingface_hub.
    """
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise MissingDependency(
            f"{source} is not a folder, and fetching it needs huggingface_hub",
            hint="pip install huggingface_hub, or give a local folder",
        ) from None
    label = f"{source} at {revision}" if revision else source
    try:
        return _download(hub, source, revision, variant), ""
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{label} is open only to those who accepted its terms",
            hint="accept them on the model's page, then log in with `hf auth login`",
        ) from None
    except errors.RevisionNotFoundError:
        raise UsageError(f"{source} has no revision {revision!r}", hint="give a branch, a tag or a commit") from None
    except errors.RepositoryNotFoundError:
        raise UsageError(
            f"{source} is neither a folder here nor a model on the hub",
            hint="check the spelling; a private model needs `hf auth login`",
        ) from None
    except TrtdiffError:
        raise  # what was fetched is damaged: the cache would not help
    except errors.HFValidationError as error:
        raise UsageError(f"{source!r} is not a hub id: {_first_line(error)}", hint="write owner/name") from None
    except Exception as error:  # noqa: BLE001 - whatever the network does, the cache may still have it
        path = _cached(hub, source, revision, error)
        return path, f"fetching {label} failed ({_first_line(error)}): this is what the hub's cache holds of it"


def _download(hub: Any, source: str, revision: str | None, variant: str | None) -> Path:
    info = hub.HfApi().model_info(source, revision=revision)
    commit, names = info.sha, [file.rfilename for file in info.siblings or ()]
    small = Path(hub.snapshot_download(source, revision=commit, allow_patterns=list(SMALL_FILES)))
    wanted = _weights(small, names, variant)
    if wanted:
        hub.snapshot_download(source, revision=commit, allow_patterns=wanted)
    return small


def _weights(small: Path, names: list[str], variant: str | None) -> list[str]:
    """Full names of the weight files to fetch, shards included."""
    wanted = []
    for folder, library in components_of(read_json(small / "model_index.json"), small).items():
        inside = [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]
        chosen = choose(inside, variant=variant, library=library)
        if chosen is None:
            continue
        if chosen.index:
            index = small / folder / chosen.name
            wanted += [f"{folder}/{shard}" for shard in shard_names(index, read_weight_map(index))]
        else:
            wanted.append(f"{folder}/{chosen.name}")
    return wanted


def _cached(hub: Any, source: str, revision: str | None, error: Exception) -> Path:
    try:
        return Path(hub.snapshot_download(source, revision=revision, local_files_only=True))
    except Exception:  # noqa: BLE001 - not there either; the first error is the one to tell
        label = f"{source} at {revision}" if revision else source
        raise CheckpointError(
            f"{label} is not a folder here, the hub cannot be reached and its cache does not have it",
            where=_first_line(error),
            hint="download it where there is a network, then give the folder",
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
