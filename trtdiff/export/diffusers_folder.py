"""The parts of a checkpoint that is a diffusers folder: a folder a component, each with its config and its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError, UsageError
from trtdiff.export.layout import DAMAGED, Configs, components_of, left_out, listing, options_of, read_config, read_json
from trtdiff.export.safetensors_index import TensorRef
from trtdiff.export.weight_files import WeightFile, choose, files_of, read_tensors, weight_files
from trtdiff.types import names


@dataclass(frozen=True)
class DiffusersFolder:
    """A folder with model_index.json, opened with `DiffusersFolder.open`."""

    path: Path
    pipeline: str
    configs: Mapping[str, Mapping[str, Any]]
    notes: tuple[str, ...]
    _weights: Mapping[str, WeightFile]

    @classmethod
    def open(cls, path: Path, *, variant: str | None) -> "DiffusersFolder":
        """Read the configs, and choose the files of weights. Raises CheckpointError, UsageError."""
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
        return cls(path, pipeline, configs, (*files, *unfiltered), weights)

    @property
    def where(self) -> str:
        """The field that names the pipeline."""
        return f"{self.path / 'model_index.json'}: _class_name"

    @property
    def variants(self) -> Mapping[str, str | None]:
        """The variant of every component that has weights."""
        return {name: chosen.variant or None for name, chosen in self._weights.items()}

    def tensors(self, folder: str) -> Mapping[str, TensorRef]:
        """Index a component's weights."""
        return read_tensors(self.path / folder, self._chosen(folder))

    def files(self, folder: str) -> Mapping[str, Path]:
        """Give a component's files of weights, by name."""
        return {file.name: file for file in files_of(self.path / folder, self._chosen(folder))}

    def tokenizer(self, folder: str) -> Path:
        """Give the folder of a tokenizer's files."""
        return self.path / folder

    def _chosen(self, folder: str) -> WeightFile:
        if folder not in self._weights:
            inside = listing(self.path / folder)
            raise CheckpointError(
                f"{folder} has no weights",
                where=str(self.path / folder),
                hint=f"expected diffusion_pytorch_model or model .safetensors, found {names(inside) or 'nothing'}",
            )
        return self._weights[folder]


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
