"""The prologue's numbers, against numpy in float64."""

import numpy as np
import pytest

from trtdiff.errors import BuildError
from trtdiff.passes.sampler_prologue import decoder_prologue, denoiser_prologue

ir = pytest.importorskip("onnx_ir")

DENOISER = """<ir_version: 10, opset_import: ["": 23]>
denoiser ({t}["batch", 4, "height/8", "width/8"] sample, float["batch"] timestep,
          float["batch", "tokens", 6] encoder_hidden_states) => ({t}["batch", 4, "height/8", "width/8"] prediction)
<int64[3] column = {{1, 2, 3}}, int64[2] last = {{1, 2}}>
{{
    mood = ReduceSum <keepdims = 0> (encoder_hidden_states, last)
    sum = Add (mood, timestep)
    row = Unsqueeze (sum, column)
    typed = CastLike (row, sample)
    squared = Mul (sample, sample)
    prediction = Add (squared, typed)
}}"""

DECODER = """<ir_version: 10, opset_import: ["": 23]>
decoder (float["batch", 4, "height/8", "width/8"] latent) => (float["batch", 4, "height/8", "width/8"] image)
{ image = Tanh (latent) }"""


def session(model):
    import onnx
    import onnxruntime as ort

    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    return ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])


def denoiser(form="matmul", t="float", mask="no"):
    model = ir.from_onnx_text(DENOISER.format(t=t))
    denoiser_prologue(model, form=form, mask=mask)
    return model


def arrays(slots, branches, batch, seed=0, *, masked=False):
    rng = np.random.default_rng(seed)
    shapes = {
        "window": (slots, batch, 4, 5, 3),
        "coefficients": (slots, batch),
        "timestep": (batch,),
        "scale": (batch,),
        "encoder_hidden_states": (branches, batch, 7, 6),
        "guidance": (branches, batch),
    }
    found = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    found["rescale"] = np.zeros(batch, np.float32)
    if masked:
        found["mask"] = rng.integers(0, 2, (batch, 1, 5, 3)).astype(np.float32)
        found["known"] = rng.standard_normal((2, batch, 4, 5, 3)).astype(np.float32)
        found["known_coefficients"] = rng.standard_normal((2, batch)).astype(np.float32)
    return found


def expected(feeds):
    exact = {name: array.astype(np.float64) for name, array in feeds.items()}
    latent = np.einsum("kb,kbchw->bchw", exact["coefficients"], exact["window"])
    if "mask" in exact:
        kept = np.einsum("jb,jbchw->bchw", exact["known_coefficients"], exact["known"])
        latent = exact["mask"] * latent + (1 - exact["mask"]) * kept
    sample = latent * exact["scale"][:, None, None, None]
    row = exact["encoder_hidden_states"].sum((2, 3)) + exact["timestep"]  # [G, B]
    per_branch = sample[None] ** 2 + row[:, :, None, None, None]
    guided = np.einsum("gb,gbchw->bchw", exact["guidance"], per_branch)
    share = exact["rescale"][:, None, None, None]
    axes = {"axis": (1, 2, 3), "keepdims": True}
    rescaled = guided * per_branch[-1].std(**axes) / guided.std(**axes)
    return {"latent": latent, "prediction": share * rescaled + (1 - share) * guided}


@pytest.mark.parametrize("form", ["matmul", "reduce"])
@pytest.mark.parametrize("slots", [1, 3, 9])
@pytest.mark.parametrize(("branches", "batch"), [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_equals_numpy_with_every_image_its_own_row(form, slots, branches, batch):
    feeds = arrays(slots, branches, batch)
    got = dict(zip(("latent", "prediction"), session(denoiser(form)).run(["latent", "prediction"], feeds), strict=True))
    for name, exact in expected(feeds).items():
        assert got[name].shape == exact.shape
        assert got[name].dtype == np.float32
        scale = np.abs(exact).max()  # float32 sums of at most 42 terms: measured at most 2.4e-7 of the largest value
        assert np.abs(got[name] - exact).max() <= 5e-7 * scale, name


@pytest.mark.parametrize("form", ["matmul", "reduce"])
@pytest.mark.parametrize("slots", [1, 6])
def test_what_a_mask_keeps_is_the_known_latent_to_the_bit(form, slots):
    feeds = arrays(slots, 2, 3, masked=True)
    latent, prediction = session(denoiser(form, mask="yes")).run(["latent", "prediction"], feeds)
    for name, got in {"latent": latent, "prediction": prediction}.items():
        exact = expected(feeds)[name]
        assert np.abs(got - exact).max() <= 5e-7 * np.abs(exact).max(), name
    painted = np.broadcast_to(feeds["mask"] == 1, latent.shape)
    free = {name: feeds[name] for name in arrays(slots, 2, 3)}
    (unmasked,) = session(denoiser(form)).run(["latent"], free)
    assert np.array_equal(latent[painted], unmasked[painted])
    assert not np.array_equal(latent[~painted], unmasked[~painted])


def test_the_decoder_keeps_what_a_mask_keeps():
    model = ir.from_onnx_text(DECODER)
    decoder_prologue(model, mask="yes")
    feeds = arrays(3, 1, 2, masked=True)
    taken = ("window", "coefficients", "mask", "known", "known_coefficients")
    image, latent = session(model).run(["image", "latent"], {name: feeds[name] for name in taken})
    exact = expected(feeds)["latent"]
    assert np.abs(latent - exact).max() <= 5e-7 * np.abs(exact).max()
    assert np.abs(image - np.tanh(exact)).max() <= 1e-6


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_guidance_rescale_is_that_of_diffusers(share):
    import torch
    from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg

    feeds = arrays(3, 2, 3) | {"rescale": np.full(3, share, np.float32)}
    (got,) = session(denoiser()).run(["prediction"], feeds)
    plain = {**feeds, "rescale": np.zeros(3, np.float32)}
    (guided,) = session(denoiser()).run(["prediction"], plain)
    (text,) = session(denoiser()).run(["prediction"], {**plain, "guidance": np.array([[0] * 3, [1] * 3], np.float32)})
    wanted = rescale_noise_cfg(torch.from_numpy(guided), torch.from_numpy(text), share).numpy()
    assert np.abs(got - wanted).max() <= 1e-6 * np.abs(wanted).max()
    assert np.abs(got - expected(feeds)["prediction"]).max() <= 1e-6 * np.abs(wanted).max()


def test_a_branch_that_predicts_one_number_everywhere_stays_finite():
    feeds = arrays(1, 1, 1) | {"coefficients": np.zeros((1, 1), np.float32)}
    (prediction,) = session(denoiser()).run(["prediction"], feeds)
    assert np.isfinite(prediction).all()


def test_one_slot_and_ones_are_the_plain_denoiser():
    feeds = arrays(1, 1, 2) | {name: np.ones((1, 2), np.float32) for name in ("coefficients", "guidance")}
    feeds["scale"] = np.ones(2, np.float32)
    plain = session(ir.from_onnx_text(DENOISER.format(t="float")))
    (want,) = plain.run(None, {"sample": feeds["window"][0], "timestep": feeds["timestep"],
                               "encoder_hidden_states": feeds["encoder_hidden_states"][0]})  # fmt: skip
    latent, prediction = session(denoiser()).run(["latent", "prediction"], feeds)
    assert np.array_equal(latent, feeds["window"][0])
    assert np.array_equal(prediction, want)


def test_an_image_does_not_depend_on_its_batch():
    feeds = arrays(9, 2, 3)
    runner = session(denoiser())
    (together,) = runner.run(["latent"], feeds)
    for image in range(3):
        alone = {
            name: array[image : image + 1] if array.ndim == 1 else array[:, image : image + 1]
            for name, array in feeds.items()
        }
        assert np.array_equal(runner.run(["latent"], alone)[0][0], together[image])


def test_unwritten_slots_of_zeros_change_nothing():
    feeds = arrays(3, 2, 2)
    longer = feeds | {
        "window": np.concatenate([np.zeros((6, 2, 4, 5, 3), np.float32), feeds["window"]]),
        "coefficients": np.concatenate([np.zeros((6, 2), np.float32), feeds["coefficients"]]),
    }
    runner = session(denoiser())
    for a, b in zip(runner.run(None, feeds), runner.run(None, longer), strict=True):
        assert np.abs(a - b).max() <= 3e-7 * np.abs(a).max()


def test_a_half_precision_model_keeps_its_sums_in_float32():
    model = denoiser(t="float16")
    assert {value.dtype for value in (*model.graph.inputs, *model.graph.outputs)} == {ir.DataType.FLOAT}
    feeds = arrays(9, 2, 2)
    latent, _ = session(model).run(["latent", "prediction"], feeds)
    exact = expected(feeds)["latent"]
    assert np.abs(latent - exact).max() <= 5e-7 * np.abs(exact).max()


def test_the_contract_is_written_in_names_and_dimensions():
    graph = denoiser().graph
    said = {value.name: [str(dim) for dim in value.shape] for value in (*graph.inputs, *graph.outputs)}
    latent = ["batch", "4", "height/8", "width/8"]
    assert list(said) == [
        "window",
        "coefficients",
        "timestep",
        "scale",
        "encoder_hidden_states",
        "guidance",
        "rescale",
        "latent",
        "prediction",
    ]
    assert said["window"] == ["window", *latent]
    assert said["encoder_hidden_states"] == ["branches", "batch", "tokens", "6"]
    assert said["guidance"] == ["branches", "batch"]
    assert said["latent"] == said["prediction"] == latent


def test_no_two_sizes_share_the_name_batch():
    """A runtime may reuse memory between tensors whose symbolic shapes are equal."""
    inner = [
        value
        for node in denoiser().graph
        for value in node.outputs
        if value.name in {"squared", "typed", "prediction.rows"}
    ]
    assert all("batch" not in str(value.shape) for value in inner)


def test_decoder_applies_the_last_row_and_shows_its_latent():
    model = ir.from_onnx_text(DECODER)
    decoder_prologue(model)
    feeds = {name: arrays(9, 1, 2)[name] for name in ("window", "coefficients")}
    image, latent = session(model).run(["image", "latent"], feeds)
    exact = np.einsum("kb,kbchw->bchw", *(feeds[name].astype(np.float64) for name in ("coefficients", "window")))
    assert np.abs(latent - exact).max() <= 5e-7 * np.abs(exact).max()
    assert np.abs(image - np.tanh(exact)).max() <= 5e-7 * np.abs(exact).max()


def test_a_graph_with_other_inputs_is_refused():
    with pytest.raises(BuildError, match="no input sample, timestep"):
        denoiser_prologue(ir.from_onnx_text(DECODER))
