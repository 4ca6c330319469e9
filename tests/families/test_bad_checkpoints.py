"""Checkpoints whose parts do not fit each other are refused before anything is traced, by the names of both fields."""

import copy
import json
import shutil

import pytest
import tiny

from trtdiff.errors import CheckpointError
from trtdiff.families import FAMILIES, family, family_of_pipeline

VAE = {"latent_channels": 4, "block_out_channels": [8, 8, 8, 8], "scaling_factor": 0.5}
VAE_16 = {**VAE, "latent_channels": 16}
CLIP = {
    "hidden_size": 16,
    "max_position_embeddings": 77,
    "vocab_size": 64,
    "num_hidden_layers": 4,
    "projection_dim": 24,
}
T5 = {"d_model": 48, "vocab_size": 64}
TOKENIZER = {"pad_token": "!"}
CONFIGS = {
    "stable-diffusion": {
        "model_index": {}, "vae": VAE, "text_encoder": CLIP, "tokenizer": TOKENIZER,
        "unet": {"in_channels": 4, "sample_size": 8, "cross_attention_dim": 16},
    },
    "stable-diffusion-xl": {
        "model_index": {}, "vae": VAE, "text_encoder": CLIP, "text_encoder_2": dict(CLIP), "tokenizer": TOKENIZER,
        "tokenizer_2": TOKENIZER,
        "unet": {
            "in_channels": 4, "sample_size": 8, "cross_attention_dim": 32, "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 72,
        },
    },
    "stable-diffusion-3": {
        "model_index": {}, "vae": VAE_16, "text_encoder": CLIP, "text_encoder_2": dict(CLIP), "text_encoder_3": T5,
        "tokenizer": TOKENIZER, "tokenizer_2": TOKENIZER, "tokenizer_3": {},
        "transformer": {
            "in_channels": 16, "sample_size": 8, "patch_size": 2, "joint_attention_dim": 48,
            "pooled_projection_dim": 48, "pos_embed_max_size": 24,
        },
    },
    "flux": {
        "model_index": {}, "vae": VAE_16, "text_encoder": CLIP, "text_encoder_2": T5, "tokenizer": TOKENIZER,
        "tokenizer_2": {},
        "transformer": {"in_channels": 64, "joint_attention_dim": 48, "pooled_projection_dim": 16},
    },
    "pixart": {
        "model_index": {}, "vae": VAE, "text_encoder": T5, "tokenizer": {},
        "transformer": {"in_channels": 4, "sample_size": 32, "patch_size": 2, "caption_channels": 48},
    },
}  # fmt: skip
"""The fields that each family reads, small; what is changed below is one of them."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_configs_that_are_broken_below_are_whole(name):
    facts = family(name).facts(CONFIGS[name])
    assert {spec.name for spec in family(name).components(CONFIGS[name])} >= {"denoiser", "vae_decoder"}
    assert facts.lengths["context"] >= 16


@pytest.mark.parametrize(
    ("name", "folder", "field", "value", "said", "where"),
    [
        ("stable-diffusion", "unet", "cross_attention_dim", 24, "width 24, the text encoder has 16",
         "unet/config.json: cross_attention_dim, text_encoder/config.json: hidden_size"),
        ("stable-diffusion", "unet", "in_channels", 5, "takes 5 channels, the VAE makes 4", "unet/config.json"),
        ("stable-diffusion", "vae", "latent_channels", 16, "takes 4 channels, the VAE makes 16", "unet/config.json"),
        ("stable-diffusion", "unet", "sample_size", "64", "native size is '64'", "unet/config.json: sample_size"),
        ("stable-diffusion", "unet", "sample_size", [8, 0], r"native size is \[8, 0\]",
         "unet/config.json: sample_size"),
        ("stable-diffusion-xl", "text_encoder_2", "hidden_size", 20, r"width 32, the text encoders have 16 \+ 20",
         "text_encoder_2/config.json: hidden_size"),
        ("stable-diffusion-xl", "text_encoder_2", "projection_dim", 40, "have 72 numbers: 40 are the pooled text's",
         "projection_class_embeddings_input_dim"),
        ("stable-diffusion-xl", "unet", "addition_embed_type", "image", "'image', not 'text_time'",
         "unet/config.json: addition_embed_type"),
        ("stable-diffusion-xl", "unet", "in_channels", 8, "takes 8 channels", "unet/config.json: in_channels"),
        ("stable-diffusion-3", "text_encoder_3", "d_model", 64, "64 of T5", "joint_attention_dim"),
        ("stable-diffusion-3", "text_encoder", "projection_dim", 8, "32 pooled", "pooled_projection_dim"),
        ("stable-diffusion-3", "vae", "latent_channels", 4, "takes 16 channels, the VAE makes 4",
         "transformer/config.json: in_channels, vae/config.json: latent_channels"),
        ("flux", "text_encoder_2", "d_model", 32, "T5 has 32", "joint_attention_dim"),
        ("flux", "text_encoder", "hidden_size", 24, "CLIP 24", "pooled_projection_dim"),
        ("flux", "transformer", "in_channels", 384, "tokens of 384 numbers", "transformer/config.json: in_channels"),
        ("pixart", "text_encoder", "d_model", 64, "captions of width 48, T5 has 64", "caption_channels"),
        ("pixart", "vae", "latent_channels", 8, "the VAE makes 8", "in_channels"),
    ],
)  # fmt: skip
def test_components_that_disagree_are_refused(name, folder, field, value, said, where):
    configs = copy.deepcopy(CONFIGS[name])
    configs[folder][field] = value
    with pytest.raises(CheckpointError, match=said) as caught:
        family(name).components(configs)
    assert where in caught.value.where
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "folder", "kind"),
    [
        ("stable-diffusion", "vae", "AutoencoderTiny"), ("stable-diffusion", "unet", "UNet2DModel"),
        ("stable-diffusion-xl", "text_encoder_2", "CLIPModel"), ("stable-diffusion-3", "vae", "AutoencoderDC"),
        ("stable-diffusion-3", "text_encoder_3", "UMT5EncoderModel"), ("pixart", "text_encoder", "GemmaModel"),
        ("flux", "transformer", "Flux2Transformer2DModel"),
    ],
)  # fmt: skip
def test_a_component_of_another_class_is_refused_by_name(name, folder, kind):
    configs = copy.deepcopy(CONFIGS[name])
    configs["model_index"][folder] = ["diffusers", kind]
    with pytest.raises(CheckpointError, match=f"{folder} is of the class {kind}; ") as caught:
        family(name).components(configs)
    assert caught.value.where == f"model_index.json: {folder}"


def test_a_text_encoder_that_hides_padding_is_refused():
    configs = copy.deepcopy(CONFIGS["stable-diffusion"])
    configs["text_encoder"]["use_attention_mask"] = True
    with pytest.raises(CheckpointError, match="hides padding") as caught:
        family("stable-diffusion").facts(configs)
    assert caught.value.where == "text_encoder/config.json: use_attention_mask"


@pytest.mark.parametrize(
    ("version", "size", "pixels"),
    [("0.6.0", 32, 256 * 2), ("0.9.0.dev0", 32, 256), ("0.36.0", 32, 256), (None, 32, 256), ("0.6.0", 96, 768),
     ("nonsense", 32, 256)],
)  # fmt: skip
def test_small_native_sizes_of_the_first_year_are_a_slip(version, size, pixels):
    configs = copy.deepcopy(CONFIGS["stable-diffusion"])
    configs["unet"] |= {"sample_size": size} | ({} if version is None else {"_diffusers_version": version})
    assert family("stable-diffusion").facts(configs).latent.height == pixels


def test_sizes_beyond_stored_positions_are_refused():
    configs = copy.deepcopy(CONFIGS["stable-diffusion-3"])
    configs["transformer"]["sample_size"] = 64
    with pytest.raises(CheckpointError, match="512 x 512 pixels, and stored positions end at 384"):
        family("stable-diffusion-3").facts(configs)


@pytest.mark.parametrize(
    ("name", "dims", "said"),
    [
        ("stable-diffusion-3", "height=256:512:1024", "height 512 is beyond this model's positions, which end at 384"),
        ("stable-diffusion-3", "height=100:128:128", "height 100 is not a multiple of 16"),
        ("stable-diffusion", "branches=3", "branches 3 is more than guidance takes"),
        ("stable-diffusion", "tokens=8", "tokens 8 is not 77"),
        ("stable-diffusion", "context=77:77:100", "context 100 is no whole number of rows of 77 tokens"),
        ("flux", "context=77", "context 77 is not 512"),
        ("stable-diffusion", "batch=1:1:99999999999999999999", "batch 99999999999999999999 is beyond any use"),
        ("stable-diffusion", "height=64:64:1000000000000", "height 1000000000000 is beyond any use"),
    ],
)
def test_profiles_that_no_request_could_use_are_refused(name, dims, said):
    from trtdiff.asked import check_profile
    from trtdiff.errors import UsageError
    from trtdiff.types import ShapeProfile

    facts = family(name).facts(CONFIGS[name])
    own = family(name).profile(facts)
    check_profile(own, facts)
    if facts.weighted:
        check_profile(own.merged(ShapeProfile.parse("context=77:154:231")), facts)
    with pytest.raises(UsageError, match=said) as caught:
        check_profile(own.merged(ShapeProfile.parse(dims)), facts)
    assert caught.value.where.startswith("--profile ")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("model_max_length", -1, "model_max_length = -1; a number"), ("model_max_length", "x", "model_max_length = 'x'"),
     ("pad_token", 5, "pad_token = 5; a word"), ("pad_token", {"text": "a"}, "pad_token = ")],
)  # fmt: skip
def test_a_tokenizer_s_config_is_read_with_care(field, value, said):
    configs = copy.deepcopy(CONFIGS["stable-diffusion"])
    configs["tokenizer"][field] = value
    with pytest.raises(CheckpointError, match=said) as caught:
        family("stable-diffusion").facts(configs)
    assert caught.value.where == f"tokenizer/tokenizer_config.json: {field}"


# --- whole folders ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of two kinds, to be copied and damaged; nothing of them is traced."""
    folder = tmp_path_factory.mktemp("whole")
    return {kind: tiny.make(kind, folder / kind) for kind in ("sdxl", "flux-dev")}


def _tokenizer_gone(folder):
    shutil.rmtree(folder / "tokenizer_2")


def _tokenizer_cut(folder):
    file = folder / "tokenizer_2/tokenizer.json"
    file.write_bytes(file.read_bytes()[:300])


def _tokenizer(**changes):
    def write(folder):
        file = folder / "tokenizer/tokenizer.json"
        content = json.loads(file.read_text())
        for name, value in changes.items():
            if name in content["model"]:
                content["model"][name] = value(content["model"][name])
            else:
                content[name] = value(content[name])
        file.write_text(json.dumps(content))

    return write


def _config(folder, **fields):
    def write(checkpoint):
        file = checkpoint / folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return write


def _scheduler(**config):
    def write(folder):
        (folder / "scheduler/scheduler_config.json").write_text(json.dumps(config))

    return write


BROKEN = {
    "sdxl, no second tokenizer": ("sdxl", _tokenizer_gone, "tokenizer_2 is missing", "tokenizer_2"),
    "flux, no second tokenizer": ("flux-dev", _tokenizer_gone, "tokenizer_2 is missing", "tokenizer_2"),
    "sdxl, half a tokenizer": ("sdxl", _tokenizer_cut, "not a readable tokenizer", "tokenizer_2/tokenizer.json"),
    "flux, half a tokenizer": ("flux-dev", _tokenizer_cut, "not a readable tokenizer", "tokenizer_2/tokenizer.json"),
    "no end token": ("sdxl", _tokenizer(post_processor=lambda _: None), "puts no end token", "tokenizer"),
    "an empty vocabulary": ("sdxl", _tokenizer(vocab=lambda _: {}, merges=lambda _: []), "cannot use tokenizer",
                            "tokenizer"),
    "ids that nobody has": (
        "sdxl", _tokenizer(vocab=lambda vocab: {**vocab, "dog</w>": 100000}), r"has an id 100000 \('dog</w>'\)",
        "tokenizer",
    ),
    "rows of two": ("sdxl", _config("text_encoder", max_position_embeddings=2), "leave no room for words", "tokenizer"),
    "weights in 8 bits": (
        "sdxl", _config("unet", quantization_config={"quant_method": "bitsandbytes"}), r"quantized \(bitsandbytes\)",
        "unet/config.json: quantization_config",
    ),
    "an unknown scheduler": (
        "sdxl", _scheduler(_class_name="FancyScheduler"), "diffusers has no scheduler FancyScheduler",
        "scheduler/scheduler_config.json: _class_name",
    ),
    "a scheduler of nothing": (
        "sdxl", _scheduler(), "diffusers has no scheduler without a name", "scheduler/scheduler_config.json"
    ),
    "a scheduler with a Brownian tree": (
        "sdxl", _scheduler(_class_name="DPMSolverSDEScheduler"), "cannot be compiled",
        "scheduler/scheduler_config.json",
    ),
    "noise prediction in flux": (
        "flux-dev", _scheduler(_class_name="DDIMScheduler"), "DDIMScheduler is for models that predict noise",
        "scheduler/scheduler_config.json: _class_name",
    ),
    "a scheduler without sigmas in flux": (
        "flux-dev", _scheduler(_class_name="FlowMatchHeunDiscreteScheduler"), "cannot call its scheduler FlowMatchHeun",
        "scheduler/scheduler_config.json: _class_name",
    ),
    "flow matching in sdxl": (
        "sdxl", _scheduler(_class_name="FlowMatchEulerDiscreteScheduler"),
        "FlowMatchEulerDiscreteScheduler is for flow matching", "scheduler/scheduler_config.json: _class_name",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_before_it_is_traced(case, checkpoints, tmp_path, monkeypatch):
    from trtdiff.checkpoint import Checkpoint
    from trtdiff.export import export

    def traced(*_args, **_kwargs):
        raise AssertionError("traced")

    monkeypatch.setattr(export, "export_components", traced)
    kind, damage, message, where = BROKEN[case]
    folder = shutil.copytree(checkpoints[kind], tmp_path / "checkpoint")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        export.export_checkpoint(Checkpoint.open(str(folder)), tmp_path / "out", check=False)
    assert where in caught.value.where
    assert caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("pipeline", ["KolorsPipeline", "FluxFillPipeline", "", "StableDiffusionDepth2ImgPipeline"])
def test_an_unknown_pipeline_is_refused_with_those_that_are_known(pipeline):
    with pytest.raises(CheckpointError, match=f"{pipeline!r} is not known") as caught:
        family_of_pipeline(pipeline, where="model_index.json: _class_name")
    assert caught.value.where == "model_index.json: _class_name"
    for known in ("StableDiffusionXLPipeline", "FluxPipeline", "PixArtAlphaPipeline", "StableDiffusion3Pipeline"):
        assert known in caught.value.hint


def test_a_refiner_is_what_lacks_the_first_text_encoder():
    configs = copy.deepcopy(CONFIGS["stable-diffusion-xl"])
    del configs["text_encoder"], configs["tokenizer"]
    configs["unet"] |= {"cross_attention_dim": 16, "projection_class_embeddings_input_dim": 5 * 8 + 24}
    facts = family("stable-diffusion-xl").facts(configs)
    assert list(facts.tokens) == ["tokenizer_2"]
    assert facts.conditions[-1].dims == ("batch", 5)


def test_largest_sides_follow_from_stored_positions():
    facts = family("stable-diffusion-3").facts(CONFIGS["stable-diffusion-3"])
    assert facts.largest == 24 * 2 * 8
    assert family("stable-diffusion-3").profile(facts).dims["height"].max == 128
    configs = copy.deepcopy(CONFIGS["stable-diffusion-3"])
    configs["transformer"]["sample_size"] = 16
    assert family("stable-diffusion-3").profile(family("stable-diffusion-3").facts(configs)).dims["height"].max == 256
    configs["transformer"]["sample_size"] = 40
    assert family("stable-diffusion-3").profile(family("stable-diffusion-3").facts(configs)).dims["height"].max == 384
