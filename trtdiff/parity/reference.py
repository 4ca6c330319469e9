"""The other side of every comparison: the checkpoint as diffusers itself loads and runs it, in float32 on the CPU."""

import contextlib
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trtdiff.checkpoint import Checkpoint
from trtdiff.errors import CheckpointError, MissingDependency, UsageError
from trtdiff.export.layout import NOT_COMPILED, read_json
from trtdiff.families import family_of_pipeline
from trtdiff.families.base import ComponentSpec
from trtdiff.single_file.checkpoint import SingleFile
from trtdiff.single_file.reference import load_pipeline
from trtdiff.types import Array

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class PictureRequest:
    """One call of a pipeline, in words that both sides understand."""

    prompts: tuple[str, ...]
    negative: str
    seed: int
    """Image i starts from seed + i."""
    steps: int
    guidance: float
    height: int
    width: int
    scheduler: str
    strength: float = 0.8
    """For image to image alone."""

    def __str__(self) -> str:
        return (
            f"{len(self.prompts)} x {self.height}x{self.width}, {self.steps} steps of {self.scheduler}, "
            f"guidance {self.guidance:g}, seed {self.seed}"
        )


@dataclass(frozen=True)
class Pictures:
    """What a pipeline made."""

    latents: Array  # [calls, B, C, h, w] float32, after every scheduler step
    pixels: Array  # [B, H, W, 3] uint8


class Reference:
    """A checkpoint loaded by diffusers. Loading takes the memory of its weights in float32.

    Where an export was asked to store weights in a smaller type than the checkpoint's, the reference rounds its own to
    that type first: what is compared is what compilation did, not what the asked rounding did.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: str = "stored") -> None:
        require_pytorch()
        import torch

        self._checkpoint = checkpoint
        with _quiet():
            self._pipeline = _load_pipeline(checkpoint)
        if dtype != "stored":
            with _quiet():
                for part in self._pipeline.components.values():
                    if isinstance(part, torch.nn.Module):
                        part.to(getattr(torch, dtype)).to(torch.float32)
        self._pipeline.set_progress_bar_config(disable=True)

    def component(self, spec: ComponentSpec, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Run diffusers' own module behind the family's adapter on these inputs."""
        import torch

        config = self._checkpoint.configs[spec.folder]
        with torch.device("meta"):
            adapter = spec.build(config)  # its weights never exist: the loaded module takes the place of its own
        setattr(adapter, spec.prefix, getattr(self._pipeline, spec.folder).eval())
        tensors = [torch.from_numpy(np.ascontiguousarray(feeds[item.name])) for item in spec.inputs]
        with torch.inference_mode():
            results = adapter(*tensors)
        if isinstance(results, torch.Tensor):
            results = (results,)
        return {item.name: value.numpy() for item, value in zip(spec.outputs, results, strict=True)}

    def pictures(self, request: PictureRequest, image: "Image | None" = None) -> Pictures:
        """Call the diffusers pipeline as its users do; with an image, the pipeline's image-to-image form."""
        import diffusers
        import torch

        from trtdiff.export.schedulers import make_scheduler

        pipeline = self._pipeline
        own = pipeline.scheduler
        kwargs: dict[str, Any] = {"height": request.height, "width": request.width}
        if image is not None:
            with _quiet():
                pipeline = diffusers.AutoPipelineForImage2Image.from_pipe(pipeline)
            image = image.resize((request.width, request.height))
            takes = inspect.signature(type(pipeline).__call__).parameters  # some take the image's size, others do not
            kwargs = {name: value for name, value in kwargs.items() if name in takes}
            kwargs |= {"image": [image] * len(request.prompts), "strength": request.strength}
        pipeline.set_progress_bar_config(disable=True)
        kind = family_of_pipeline(self._checkpoint.pipeline, where=self._checkpoint.name)
        choices, call = kind.schedulers(), kind.schedule_call(self._checkpoint.pipeline, 0)
        pipeline.scheduler = make_scheduler(self._checkpoint.configs["scheduler"], request.scheduler, call, choices)
        latents: list[Array] = []

        def keep(_pipeline: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
            latents.append(kind.unpacked(values["latents"].float().numpy(), request.height, request.width).copy())
            return {}

        arguments = {
            "prompt": list(request.prompts),
            "negative_prompt": [request.negative] * len(request.prompts),
            "num_inference_steps": request.steps,
            "guidance_scale": request.guidance,
            "generator": [torch.Generator().manual_seed(request.seed + i) for i in range(len(request.prompts))],
            "output_type": "np",
            "callback_on_step_end": keep,
            **kwargs,
        }
        try:
            with _quiet():
                made = pipeline(**kind.diffusers_arguments(arguments))
        except ValueError as error:
            raise UsageError(f"the diffusers pipeline refuses the request: {error}", where=str(request)) from error
        finally:
            self._pipeline.scheduler = own
        if not latents:
            raise UsageError(
                "the diffusers pipeline took no step", where=str(request), hint="raise --steps or --strength"
            )
        return Pictures(np.stack(latents), (made.images * 255).round().astype(np.uint8))


def require_pytorch() -> None:
    """Raise MissingDependency without the libraries that a checkpoint is compared by."""
    needed = ("torch", "diffusers", "transformers")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise MissingDependency(
            f"comparing with PyTorch needs {' and '.join(missing)}", hint="pip install 'trtdiff[compile]'"
        )


def _load_pipeline(checkpoint: Checkpoint) -> Any:
    """Let diffusers load a checkpoint, a folder or a file, in float32."""
    if isinstance(checkpoint.parts, SingleFile):
        return load_pipeline(checkpoint.parts)
    import diffusers
    import torch

    index = read_json(checkpoint.path / "model_index.json")
    optional = {name: None for name, value in index.items() if name in NOT_COMPILED or value == [None, None]}
    variants = checkpoint.variants
    variant = next(filter(None, variants.values()), None)
    load: Any = diffusers.DiffusionPipeline.from_pretrained
    try:
        apart = {part: _load_part(checkpoint, part) for part in variants if variants[part] != variant}
        return load(
            str(checkpoint.path), torch_dtype=torch.float32, local_files_only=True, variant=variant,
            **optional, **apart,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"diffusers cannot load the checkpoint: {error}", where=checkpoint.name) from error


def _load_part(checkpoint: Checkpoint, part: str) -> Any:
    """Load a component whose plain files are compiled while others are read from a variant."""
    import torch

    library, kind = read_json(checkpoint.path / "model_index.json")[part]
    load: Any = getattr(importlib.import_module(library), kind).from_pretrained
    return load(str(checkpoint.path / part), torch_dtype=torch.float32, local_files_only=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep diffusers' and transformers' remarks and bars out of our output; their errors still come as exceptions."""
    import diffusers
    import transformers

    libraries = (diffusers.utils.logging, transformers.utils.logging)
    levels = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity_error()
        library.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
            library.enable_progress_bar()
