"""One component of a file in the original layout under diffusers' names, by diffusers' own converters.

The converters get stand-ins in place of tensors, which know where a tensor lies and nothing of its values. What a
converter does to one (rename it, cut the queries out of queries, keys and values, drop a dimension of 1, transpose,
copy) gives a stand-in for the result, which is again a place in the same file. So nothing is read, and nothing copied:
on real tensors `convert_open_clip_checkpoint` would clone two thirds of an XL text encoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import SimpleNamespace
from typing import Any

from trtdiff.errors import CheckpointError, ExportError, MissingDependency
from trtdiff.export.safetensors_index import ITEMSIZE, TensorRef
from trtdiff.single_file.kinds import CLIP, OPEN_CLIP, UNET, model_of, vae_prefix

Config = Mapping[str, Any]


def converted(tensors: Mapping[str, TensorRef], folder: str, config: Config, kind: str) -> dict[str, TensorRef]:
    """Give a component's tensors by their names in diffusers or transformers, as references into the same file.

    Raises CheckpointError for a tensor that the layout has and the file lacks, ExportError where the installed
    diffusers does to a tensor what no reference can express.
    """
    prefix, convert = _converter(tensors, folder, config, model_of(kind))
    views = {name: View(ref) for name, ref in tensors.items() if name.startswith(prefix)}
    where = str(next(iter(tensors.values())).file)
    try:
        made = convert(views)
    except KeyError as error:
        raise CheckpointError(
            f"{folder} lacks the tensor {error}", where=where, hint="download it again; the copy is incomplete"
        ) from None
    except (AttributeError, TypeError, IndexError) as error:
        import diffusers

        raise ExportError(
            f"diffusers {diffusers.__version__} converts {folder} in a way that is not known: {error}",
            where=where,
            hint="save the model as a folder with diffusers, and give that",
        ) from error
    return {name: view.ref for name, view in made.items() if view is not None}


@dataclass(frozen=True)
class View:
    """A stand-in for a tensor: where its elements lie, with the few methods of a tensor that converters use."""

    ref: TensorRef

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes, outermost first."""
        return self.ref.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.ref.shape)

    @property
    def T(self) -> "View":  # noqa: N802 - PyTorch's name
        """The transpose of a matrix."""
        if self.ndim != 2:
            raise TypeError(f"transposes a tensor of {self.ndim} dimensions")
        return _view(self.ref, self.shape[::-1], self._strides[::-1], 0)

    def contiguous(self) -> "View":
        """Give itself: whoever reads the elements reads them in row-major order."""
        return self

    def clone(self) -> "View":
        """Give itself, which nobody changes."""
        return self

    def detach(self) -> "View":
        """Give itself, which has no gradient."""
        return self

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> "View":
        steps = self._strides
        shape, strides, first = list(self.shape), list(steps), 0
        for axis, part in reversed(list(enumerate(index if isinstance(index, tuple) else (index,)))):
            size = self.shape[axis]
            if isinstance(part, slice):
                start, stop, step = part.indices(size)
                if step != 1:
                    raise TypeError(f"takes every {step}th element")
                shape[axis] = max(0, stop - start)
                first += start * steps[axis]
            else:
                if not -size <= part < size:
                    raise IndexError(f"takes element {part} of {size}")
                first += part % size * steps[axis]
                del shape[axis], strides[axis]
        return _view(self.ref, tuple(shape), tuple(strides), first)

    @property
    def _strides(self) -> tuple[int, ...]:
        return self.ref.strides or _row_major(self.shape)


def _view(ref: TensorRef, shape: tuple[int, ...], strides: tuple[int, ...], first: int) -> View:
    """Give elements of a stored tensor that begin `first` elements after its own first."""
    itemsize = ITEMSIZE[ref.dtype]
    plain = all(n == 1 or step == usual for n, step, usual in zip(shape, strides, _row_major(shape), strict=True))
    return View(
        replace(
            ref,
            shape=shape,
            offset=ref.offset + first * itemsize,
            nbytes=prod(shape) * itemsize,
            strides=None if plain else strides,
        )
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


Views = Mapping[str, View]


def _converter(
    tensors: Mapping[str, TensorRef], folder: str, config: Config, model: str
) -> tuple[str, Callable[[Views], Mapping[str, View | None]]]:
    """Give the prefix of a component's tensors, and diffusers' converter for them."""
    theirs: Any
    try:
        from diffusers.loaders import single_file_utils as theirs
    except ImportError:
        raise MissingDependency(
            "reading the original layout needs diffusers", hint="pip install 'trtdiff[compile]'"
        ) from None
    if folder == "unet":
        return UNET, lambda views: theirs.convert_ldm_unet_checkpoint(views, config)
    if folder == "vae":
        return vae_prefix(tensors) or "", lambda views: theirs.convert_ldm_vae_checkpoint(views, config)
    if folder == "text_encoder" and model in CLIP:
        return CLIP[model], theirs.convert_ldm_clip_checkpoint
    built, prefix = SimpleNamespace(config=SimpleNamespace(**config)), OPEN_CLIP[model]
    return prefix, lambda views: theirs.convert_open_clip_checkpoint(built, views, prefix=prefix)
