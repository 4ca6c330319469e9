"""Exports that several tests look at; each is made once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_export(tiny_checkpoint, tmp_path_factory):
    """The tiny checkpoint exported and checked: an `Export`."""
    pytest.importorskip("diffusers")
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export.export import export_checkpoint

    return export_checkpoint(Checkpoint.open(str(tiny_checkpoint)), tmp_path_factory.mktemp("exports") / "tiny")


@pytest.fixture
def copied(tiny_export, tmp_path) -> Path:
    """A copy of the tiny export, to be damaged."""
    import shutil

    return shutil.copytree(tiny_export.folder, tmp_path / "copy")
