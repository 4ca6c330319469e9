"""CLIP's vocabulary, which no single file carries. Every known model has the same one, but for the word that pads.

Looked for in the folder that is given, else in the hub's cache of models that have it, else on the hub.
"""

from dataclasses import dataclass
from pathlib import Path

from trtdiff.errors import CheckpointError, UsageError
from trtdiff.export.layout import read_json

HUB = (
    ("openai/clip-vit-large-patch14", ""),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", "tokenizer"),
    ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer"),
    ("stabilityai/stable-diffusion-xl-refiner-1.0", "tokenizer_2"),
    ("stabilityai/stable-diffusion-2-1", "tokenizer"),
    ("stabilityai/stable-diffusion-2-1-base", "tokenizer"),
    ("runwayml/stable-diffusion-v1-5", "tokenizer"),
    ("CompVis/stable-diffusion-v1-4", "tokenizer"),
)
"""Hub ids and their folders that hold it; the first is the one fetched where none is in the cache."""

_PARTS = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class Vocabulary:
    """Where the vocabulary comes from; it is only fetched when somebody wants to read it."""

    found: Path | None
    """A folder with tokenizer.json, or vocab.json and merges.txt."""
    note: str

    def folder(self) -> Path:
        """Give the folder, fetched from the hub if need be. Raises CheckpointError where it cannot be had."""
        return self.found or _fetched()


def find_vocabulary(given: Path | None) -> Vocabulary:
    """Find the vocabulary in a folder (a tokenizer's, or a diffusers checkpoint's) or in the hub's cache.

    Raises UsageError for a given folder that has none.
    """
    if given is not None:
        folder = next((given / part for part in ("", "tokenizer", "tokenizer_2") if _has_one(given / part)), None)
        if folder is None:
            raise UsageError(
                f"{given} has no tokenizer", where=str(given.absolute()),
                hint="give a folder with tokenizer.json, or with vocab.json and merges.txt, or a diffusers checkpoint",
            )  # fmt: skip
        return Vocabulary(folder, f"tokenizer: {folder}")
    for source, part in HUB:
        folder = _cached(source, part)
        if folder is not None:
            return Vocabulary(folder, f"tokenizer: the hub cache's {source}")
    return Vocabulary(None, f"tokenizer: not here, to be fetched from {HUB[0][0]}; --tokenizer gives a folder")


def word_count(folder: Path) -> int:
    """Count the words of a tokenizer in either form. Raises CheckpointError for one that is damaged."""
    stored = folder / "tokenizer.json"
    if not stored.is_file():
        return len(read_json(folder / _PARTS[0]))
    tokenizer = read_json(stored)
    try:
        return len({*tokenizer["model"]["vocab"], *(token["content"] for token in tokenizer["added_tokens"])})
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{folder.name} is not a readable tokenizer", where=str(stored), hint="give another folder"
        ) from None


def _has_one(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in _PARTS)


def _cached(source: str, part: str) -> Path | None:
    """Give the folder of a hub repository's tokenizer in the cache."""
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    places = [try_to_load_from_cache(source, f"{part}/{name}" if part else name) for name in _PARTS]
    return Path(places[0]).parent if all(isinstance(place, str) for place in places) else None  # type: ignore[arg-type]


def _fetched() -> Path:
    source, _ = HUB[0]
    try:
        from huggingface_hub import hf_hub_download

        fetched = [Path(hf_hub_download(source, name)) for name in _PARTS]
    except Exception as error:  # noqa: BLE001 - whatever the network does, or no library to ask it with
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            "a single file has no tokenizer in it, and there is none here",
            where=f"{source}: {reason}",
            hint="give one with --tokenizer FOLDER: any Stable Diffusion checkpoint in diffusers' form, or its "
            "tokenizer folder; or download vocab.json and merges.txt of openai/clip-vit-large-patch14",
        ) from None
    return fetched[0].parent
