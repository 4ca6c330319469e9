"""A scan's key covers what determines it; what is left open is the checkpoint's own; what it takes grows with it."""

import json
from dataclasses import asdict

import pytest

from trtdiff.calibrate.prompts import prompts_for
from trtdiff.calibrate.settings import DEFAULTS, ranges_spec, scan_memory, scan_seconds, scan_settings
from trtdiff.errors import UsageError
from trtdiff.export.manifest import EXPORT_FILE, EXPORT_SCHEMA, ExportManifest
from trtdiff.families import FAMILIES
from trtdiff.manifest import key_of
from trtdiff.records import read_record


@pytest.fixture(scope="module")
def export(export_maker, tmp_path_factory):
    return export_maker(tmp_path_factory.mktemp("exports") / "toy")


def manifest(export):
    return read_record(export / EXPORT_FILE, ExportManifest, schema=EXPORT_SCHEMA)


def test_what_is_left_open_is_the_checkpoints_own(export):
    settings = scan_settings(manifest(export))
    facts = manifest(export).facts
    assert (settings.height, settings.width) == (facts.latent.height, facts.latent.width) == (64, 64)
    assert settings.guidance == facts.guidance
    assert settings.steps == DEFAULTS["steps"]
    assert settings.prompts == prompts_for("stable-diffusion")
    assert settings.branches == 2
    assert scan_settings(manifest(export), {"guidance": 1.0}).branches == 1


@pytest.mark.parametrize("given", [{"steps": 0}, {"steps": "many"}, {"prompts": []}])
def test_settings_that_cannot_be_meant_are_refused(export, given):
    with pytest.raises(UsageError):
        scan_settings(manifest(export), given)


@pytest.mark.parametrize(
    "edit",
    [
        lambda about: about["components"][1].update(graph_sha256="0" * 64),
        lambda about: about["components"][2]["weights"].update({"weights/vae.safetensors": "0" * 64}),
        lambda about: about["scheduler"].update(beta_end=0.02),
        lambda about: about["tokenizer_sha256"].update(tokenizer="0" * 64),
        lambda about: about["facts"].update(guidance=3.0),
    ],
    ids=["graph", "weights", "scheduler", "tokenizer", "facts"],
)
def test_the_key_covers_the_export(export, edit, tmp_path):
    about = json.loads((export / EXPORT_FILE).read_text())
    edit(about)
    (tmp_path / EXPORT_FILE).write_text(json.dumps(about))
    assert key_of(ranges_spec(manifest(tmp_path))) != key_of(ranges_spec(manifest(export)))


def test_the_key_covers_the_settings_and_not_the_exports_name(export, tmp_path):
    keys = {
        key_of(ranges_spec(manifest(export), given)) for given in ({}, {"steps": 5}, {"seed": 1}, {"prompts": ["a"]})
    }
    assert len(keys) == 4
    about = json.loads((export / EXPORT_FILE).read_text())
    (tmp_path / EXPORT_FILE).write_text(json.dumps({**about, "name": "another"}))
    assert key_of(ranges_spec(manifest(tmp_path))) == key_of(ranges_spec(manifest(export), DEFAULTS))


def test_a_spec_carries_the_settings_that_a_scan_takes(export):
    spec = ranges_spec(manifest(export), {"steps": 3})
    settings = asdict(scan_settings(manifest(export), {"steps": 3}))
    assert spec.settings == {**settings, "prompts": list(settings["prompts"])}


def test_memory_is_that_of_the_largest_component_and_time_that_of_all():
    weights = {"denoiser": 4_000_000_000, "vae_decoder": 200_000_000, "text_encoder": 3_000_000_000}
    alone = {"denoiser": 4_000_000_000}
    assert scan_memory(weights) == scan_memory(alone)  # one at a time
    assert scan_memory(alone) > 4_000_000_000 + scan_memory({}, pixels=0)
    assert scan_seconds(weights) > scan_seconds(alone)
    assert scan_seconds(alone, pixels=1024 * 1024) > 3 * scan_seconds(alone)


def test_the_estimate_covers_what_was_measured():
    """A UNet of 210.6 M weights at 512 by 512, with a small VAE: 1,751 MB resident at most."""
    assert 1_751 << 20 < scan_memory({"denoiser": 4 * 210_600_000}) < 2 * 1_751 << 20


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_prompts_differ_in_length(family):
    lengths = [len(prompt) for prompt in prompts_for(family)]
    assert max(lengths) > 4 * min(lengths)
