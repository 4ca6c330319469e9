"""TensorRT's own text format: the scale 1.0 is 3f800000, and what was written reads back."""

import numpy as np
import pytest

from trtdiff.calibrate.imported import imported_cache
from trtdiff.calibrate.tensorrt_text import read_scales, write_scales
from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.read import read_export

KNOWN = """TRT-8601-EntropyCalibration2
input: 3f800000
(Unnamed Layer* 3) [Convolution]_output: 3c010204
up:blocks.0/conv: 00000000
"""
"""1.0, 0.00787402 (the float32 nearest to 1 / 127, so that the largest magnitude is 1), and 0."""


def test_a_known_file_is_read(tmp_path):
    (tmp_path / "known").write_text(KNOWN)
    clips = read_scales(tmp_path / "known")
    assert clips == pytest.approx(
        {"input": 127.0, "(Unnamed Layer* 3) [Convolution]_output": 1.0, "up:blocks.0/conv": 0}
    )


def test_a_known_file_is_written(tmp_path):
    write_scales(tmp_path / "made", {"input": 127.0, "x: y": 1.0, "never": 0.0})
    header, *lines = (tmp_path / "made").read_text().splitlines()
    assert header.startswith("TRT-")
    assert lines == ["input: 3f800000", "x: y: 3c010204"]


def test_what_was_written_reads_back(tmp_path):
    clips = {f"tensor {number}": float(clip) for number, clip in enumerate(np.geomspace(1e-6, 1e6, 50))}
    write_scales(tmp_path / "made", clips)
    assert read_scales(tmp_path / "made") == pytest.approx(clips, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "match", "line"),
    [
        ("", "header is missing", 1),
        ("input: 3f800000\n", "header is missing", 1),
        ("TRT-1-x\ninput 3f800000\n", "not a tensor and its scale", 2),
        ("TRT-1-x\na: 3f800000\nb: 3f80\n", "not a tensor and its scale", 3),
        ("TRT-1-x\na: bf800000\n", "not a tensor and its scale", 2),
        ("TRT-1-x\na: 7fc00000\n", "not a tensor and its scale", 2),
        ("TRT-1-x\na: 3f800000\na: 3f800000\n", "stands there twice", 3),
    ],
)
def test_what_is_no_such_file_names_the_line(tmp_path, text, match, line):
    (tmp_path / "bad").write_text(text)
    with pytest.raises(ArtefactError, match=match) as caught:
        read_scales(tmp_path / "bad")
    assert caught.value.where == f"{tmp_path / 'bad'}:{line}"


def test_scales_become_a_cache_of_largest_magnitudes(toy_export):
    export = read_export(toy_export)
    cache, unknown = imported_cache(export, toy_export, "denoiser", {"rows": 2.0, "else": 1.0}, source="calib.txt")
    assert unknown == ["else"]
    assert cache.complete
    assert {name: seen.largest for name, seen in cache.components["denoiser"].values.items()} == {"rows": 2.0}
    with pytest.raises(ArtefactError, match="none of its 1 tensors"):
        imported_cache(export, toy_export, "denoiser", {"else": 1.0}, source="calib.txt")
    with pytest.raises(UsageError, match="no component 'unet'") as caught:
        imported_cache(export, toy_export, "unet", {"rows": 1.0}, source="calib.txt")
    assert "denoiser" in caught.value.hint
