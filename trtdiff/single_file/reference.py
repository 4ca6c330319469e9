"""A single file as diffusers itself loads it, offline: the other side of a comparison.

`from_single_file` reads the file with real tensors and its own converters. All it lacks without a network is a folder
of configs and tokenizers, which is written for it.
"""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trtdiff.errors import CheckpointError
from trtdiff.single_file.checkpoint import SingleFile


def load_pipeline(file: SingleFile) -> Any:
    """Give the diffusers pipeline of a file, in float32. Raises CheckpointError where diffusers cannot load it."""
    import diffusers
    import torch

    with tempfile.TemporaryDirectory() as folder:
        write_configs(file, Path(folder))
        try:
            return getattr(diffusers, file.pipeline).from_single_file(
                str(file.path), config=folder, local_files_only=True, torch_dtype=torch.float32
            )
        except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"diffusers cannot load the file: {error}", where=str(file.path)) from error


def write_configs(file: SingleFile, folder: Path) -> None:
    """Write what a diffusers folder of this model holds besides weights."""
    configs = dict(file.configs)
    index: dict[str, Any] = {"_class_name": file.pipeline, **configs.pop("model_index")}
    for name, config in configs.items():
        place = folder / name
        place.mkdir()
        if name.startswith("tokenizer"):
            library, cls, document = "transformers", str(config["tokenizer_class"]), "tokenizer_config.json"
            for part in ("tokenizer.json", "vocab.json", "merges.txt"):
                if (file.tokenizer(name) / part).is_file():
                    shutil.copyfile(file.tokenizer(name) / part, place / part)
        elif name.startswith("text_encoder"):
            library, cls, document = "transformers", config["architectures"][0], "config.json"
        else:
            library, cls = "diffusers", str(config["_class_name"])
            document = "scheduler_config.json" if name == "scheduler" else "config.json"
        index[name] = [library, cls]
        (place / document).write_text(json.dumps(config))
    (folder / "model_index.json").write_text(json.dumps(index))
