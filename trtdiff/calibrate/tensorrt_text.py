"""TensorRT's own calibration cache: a header line, and a line a tensor.

    TRT-101300-EntropyCalibration2
    down_blocks.0.resnets.0.conv1/Conv: 3c010a14

The number is the int8 scale, amax / 127, as a big-endian float32 in hexadecimal: what `IInt8Calibrator` of TensorRT up
to 10 wrote and read [1], and what tools around it exchange. It knows nothing but one scale a tensor.

[1] https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/work-quantized-types.html
"""

import struct
from collections.abc import Mapping
from pathlib import Path

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.passes.eight_bits import FORMATS
from trtdiff.records import whole_file

HEADER = "TRT-101300-EntropyCalibration2"
"""What is written; any header that begins like it is read."""


LEAST, MOST = 2.0**-126, 2.0**120
"""Scales that can be divided and multiplied by in float32; 0 besides, of a tensor that is always 0."""


def write_scales(path: Path, clips: Mapping[str, float]) -> None:
    """Write tensor → clip as a TensorRT calibration cache, whole or not at all. A clip of 0 is left out."""
    lines = [HEADER]
    for name, clip in clips.items():
        if "\n" in name or "\r" in name:
            raise UsageError(f"the tensor's name {name!r} has a line end, which the format cannot hold",
                             where=f"--export-tensorrt {path}")  # fmt: skip
        if clip > 0:
            lines.append(f"{name}: {struct.pack('>f', clip / FORMATS['int8'].largest).hex()}")
    with whole_file(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_scales(path: Path) -> dict[str, float]:
    """Read tensor → clip from a TensorRT calibration cache. Raises ArtefactError, naming the line that is wrong."""
    hint = "it is the text that TensorRT's calibrators write: a header TRT-…, then `tensor: hex` lines"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArtefactError(f"cannot read a TensorRT calibration cache: {error}", where=str(path), hint=hint) from None
    if not lines or not lines[0].startswith("TRT-"):
        raise ArtefactError("not a TensorRT calibration cache: the header is missing", where=f"{path}:1", hint=hint)
    clips: dict[str, float] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        name, colon, text = line.rpartition(":")
        try:
            (scale,) = struct.unpack(">f", bytes.fromhex(text.strip()))
        except (ValueError, struct.error):
            scale = float("nan")
        if not colon or not name or not (scale == 0 or LEAST <= scale <= MOST):
            raise ArtefactError(f"not a tensor and its scale: {line[:80]!r}", where=f"{path}:{number}", hint=hint)
        if name in clips:
            raise ArtefactError(f"the tensor {name} stands there twice", where=f"{path}:{number}", hint=hint)
        clips[name] = scale * FORMATS["int8"].largest
    return clips
