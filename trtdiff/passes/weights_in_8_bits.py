"""Weights stored in 8 bits: an initializer of bytes, a scale an output channel, and a `DequantizeLinear`.

The bytes and scales are computed when they are written, a block of output channels at a time, so that the largest
tensor in float32 is never held.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from trtdiff.errors import BuildError
from trtdiff.passes.derived import derived_weight
from trtdiff.passes.eight_bits import Format, rounded_to_float8
from trtdiff.types import Array

if TYPE_CHECKING:
    import onnx_ir as ir

BLOCK = 1 << 17
"""Elements that are converted at a time: half a megabyte, which stays in a processor's cache."""
ENOUGH = 1024
"""Elements of a channel that its clip is chosen by, spread over it."""
LEAST = 2.0**-126
"""The smallest scale: float32's smallest normal number, by which can be divided."""
UNSEEN = 1.0
"""Clip of a tensor in which nothing but zeros was seen."""
PHASES = tuple(2.0 ** (step / 8) for step in range(8))
"""Clips that are tried in E4M3, for the largest magnitude of a channel: phases of one binade.

Where a number falls in its binade is all that matters to a floating-point type: numbers spread evenly up to 1 lose 8 %
less when 1 becomes 256 than when it becomes 448. int8 tries none, since clipping a channel gained nothing.
"""


def scale_of(clip: float, kind: Format) -> float:
    """Give what a stored 1 stands for; never 0."""
    return float(_scales(np.array([clip]), kind)[0])


def _scales(clips: Array, kind: Format) -> Array:
    scales = np.where(clips > 0, clips, UNSEEN) / kind.largest
    made: Array = np.maximum(scales, LEAST).astype(np.float32)
    return made


class WeightIn8Bits:
    """One weight [out, in, …] on its way to 8 bits; `smooth` [in] multiplies it first."""

    def __init__(self, weight: "ir.Value", kind: Format, smooth: Array | None = None) -> None:
        self._weight, self._kind, self._smooth = weight, kind, smooth
        self._scales: Array | None = None

    def dequantized(self, stem: str) -> "ir.Value":
        """Register bytes and scales, as `stem`, beside the weight, and give the output of a node that dequantizes them.

        The node is in no graph yet; it is `value.producer()`.
        """
        import onnx_ir as ir

        stored = self._weight.const_value
        assert stored is not None, "an initializer"  # noqa: S101 - `layers` looked at it
        shape = stored.shape.numpy()
        bytes_ = derived_weight(self._weight, stem, self._bytes, dtype=self._kind.dtype, shape=shape)
        scales = derived_weight(self._weight, f"{stem}.scale", self._scale, dtype=ir.DataType.FLOAT, shape=shape[:1])
        node = ir.node("DequantizeLinear", [bytes_, scales], {"axis": 0}, name=f"{stem}/DequantizeLinear")
        made = node.outputs[0]
        made.name, made.shape, made.type = str(node.name), ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        return made

    def _scale(self, array: Array) -> Array:  # [out, in, …] → [out] float32
        if self._scales is None:
            found = np.concatenate([self._clips(block) for _, block in self._blocks(array)])
            self._scales = _scales(found, self._kind)
        return self._scales

    def _bytes(self, array: Array) -> Array:
        scales = self._scale(array)
        made = np.empty(array.shape, self._kind.numpy)
        flat = made.reshape(len(made), -1)
        for first, block in self._blocks(array):
            flat[first : first + len(block)] = self._kind.stored(block / scales[first : first + len(block), None])
        return made

    def _blocks(self, array: Array) -> Iterator[tuple[int, Array]]:
        """Give blocks of output channels in float32, flat, each with the number of its first."""
        flat = array.reshape(len(array), -1)
        rows = max(1, BLOCK // max(1, flat.shape[1]))
        for first in range(0, len(flat), rows):
            block = flat[first : first + rows].astype(np.float32)
            if self._smooth is not None:
                block *= np.repeat(self._smooth, flat.shape[1] // len(self._smooth))
            yield first, block

    def _clips(self, block: Array) -> Array:
        largest = np.abs(block).max(axis=1)
        if not np.isfinite(largest).all():
            raise BuildError("a weight is not finite", where=f"weight {self._weight.name}",
                             hint="the checkpoint is damaged, or was never good: see it with PyTorch")  # fmt: skip
        return largest if self._kind.name == "int8" else self._best(block, np.where(largest > 0, largest, UNSEEN))

    def _best(self, block: Array, largest: Array) -> Array:
        """Choose among phases of a binade by the squared error, of a part of each channel where it is long."""
        part = np.abs(block[:, :: -(-block.shape[1] // ENOUGH)])
        clips, least = largest, np.full(len(block), np.inf)
        for phase in PHASES:
            scale = (largest * phase / self._kind.largest)[:, None].astype(np.float32)
            units = part / scale
            units -= rounded_to_float8(units)
            error = np.einsum("ij,ij->i", units, units) * scale[:, 0] ** 2
            clips = np.where(error < least, largest * phase, clips)
            least = np.minimum(least, error)
        return clips


def channel_maxima(weight: "ir.Value") -> Array:  # [out, in] → [in] float64
    """Read the largest magnitude by which a linear layer multiplies each of its inputs."""
    import onnx_ir as ir

    tensor = weight.const_value
    assert tensor is not None, "an initializer"  # noqa: S101 - `layers` looked at it
    array = tensor.numpy()
    rows = max(1, BLOCK // array.shape[1])
    found = np.max([np.abs(array[first : first + rows]).max(axis=0) for first in range(0, len(array), rows)], axis=0)
    if isinstance(tensor, ir.ExternalTensor):
        del array
        tensor.release()
    wide: Array = found.astype(np.float64)
    return wide
