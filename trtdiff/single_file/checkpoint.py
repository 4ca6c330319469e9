"""The parts of a checkpoint that is one file: recognised, measured, and named as diffusers names them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError, UsageError
from trtdiff.export.layout import Configs
from trtdiff.export.pickle_index import read_pickle_index
from trtdiff.export.safetensors_index import TensorRef, read_index, read_metadata
from trtdiff.single_file.converted import converted
from trtdiff.single_file.kinds import recognise
from trtdiff.single_file.measured import changed_fields, measured_configs
from trtdiff.single_file.prediction import PREDICTIONS, kind_and_scheduler
from trtdiff.single_file.published import PUBLISHED
from trtdiff.single_file.vocabulary import Vocabulary, find_vocabulary, word_count

PICKLES = (".ckpt", ".pt", ".pth", ".bin")


@dataclass(frozen=True)
class SingleFile:
    """One file with a whole model in it, opened with `SingleFile.open`."""

    path: Path
    kind: str
    """A key of `PUBLISHED`."""
    configs: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    _stored: Mapping[str, TensorRef]
    _vocabulary: Vocabulary

    @classmethod
    def open(cls, path: Path, *, tokenizer: Path | None, prediction: str | None) -> "SingleFile":
        """Recognise a file. Raises CheckpointError that says what it is, for one that is no known whole model."""
        if prediction not in {None, *PREDICTIONS}:
            raise UsageError(f"no model predicts {prediction!r}", hint=f"one of: {', '.join(PREDICTIONS)}")
        if path.suffix in PICKLES:
            stored, metadata = read_pickle_index(path), {}
        elif path.suffix == ".safetensors":
            stored, metadata = read_index(path), read_metadata(path)
        else:
            raise CheckpointError(
                f"{path.name} is no file of weights that is known",
                where=str(path),
                hint=f"give a .safetensors file, a {', '.join(PICKLES[:2])} file, or a diffusers folder",
            )
        kind, scheduler, remark = kind_and_scheduler(recognise(stored, path), stored, metadata, prediction)
        configs = Configs(measured_configs(stored, kind, path))
        configs["scheduler"] = scheduler
        configs["model_index"] = PUBLISHED[kind].model_index
        vocabulary = find_vocabulary(tokenizer)
        notes = (f"{path.name}: {PUBLISHED[kind].title}, {_weights(kind)}", *_remarks(stored, configs, kind), remark)
        return cls(path, kind, configs, (*notes, vocabulary.note), stored, vocabulary)

    @property
    def pipeline(self) -> str:
        """The diffusers pipeline class of this kind of model."""
        return PUBLISHED[self.kind].pipeline

    @property
    def where(self) -> str:
        """What names the pipeline."""
        return f"{self.path}: its tensors are those of {PUBLISHED[self.kind].title}"

    @property
    def variants(self) -> Mapping[str, str | None]:
        """The components that have weights; a single file has no variants."""
        return {name: None for name in self.configs if not name.startswith(("tokenizer", "scheduler", "model_index"))}

    def tensors(self, folder: str) -> Mapping[str, TensorRef]:
        """Index a component's weights under diffusers' names."""
        if folder not in self._indexed:
            if folder not in self.variants:
                raise CheckpointError(f"{folder} has no weights", where=str(self.path))
            self._indexed[folder] = converted(self._stored, folder, self.configs[folder], self.kind)
        return self._indexed[folder]

    def files(self, folder: str) -> Mapping[str, Path]:
        """Give the file, under no name: what people call it is nothing of the model's."""
        return {"": self.path} if folder in self.variants else {}

    def tokenizer(self, folder: str) -> Path:
        """Give the folder with the vocabulary, which all known models share, fetched if need be.

        Raises CheckpointError where there is none, or one of another size than the text encoder's.
        """
        place = self._vocabulary.folder()
        known, words = self.configs[folder.replace("tokenizer", "text_encoder")]["vocab_size"], word_count(place)
        if words != known:
            raise CheckpointError(
                f"the tokenizer has {words} words, {self.path.name} has a text encoder of {known}",
                where=str(place),
                hint="give the tokenizer that this model was trained with: CLIP's has 49408",
            )
        return place

    @cached_property
    def _indexed(self) -> dict[str, Mapping[str, TensorRef]]:
        return {}


def _weights(kind: str) -> str:
    """Say how the layout's bytes serve."""
    turned = ", but for 1 that is transposed: text_projection of text_encoder_2"
    return f"weights by reference{turned if 'text_encoder_2' in PUBLISHED[kind].configs else ''}"


def _remarks(stored: Mapping[str, TensorRef], configs: Mapping[str, Mapping[str, Any]], kind: str) -> tuple[str, ...]:
    """Say what is unusual about a file."""
    changes = "; ".join(f"{folder} {', '.join(fields)}" for folder, fields in changed_fields(configs, kind).items())
    moving = any(name.startswith("model_ema.") for name in stored)
    return (
        *([f"sizes other than published, measured in the file: {changes}"] if changes else []),
        *(["model_ema: averaged weights are there too, and not used, as in diffusers"] if moving else []),
    )
