"""Weighted and long prompts through whole pipelines, against diffusers given the same embeddings."""

import numpy as np
import pytest

SIZE = {"height": 32, "width": 32}
PLAIN = "a red cat"
LONG = "a (red:1.4) cat, small photo of a [green] house, a dog, BREAK a ship of tree, seven"


def _embeddings(pipeline, text, rows):
    """Encode rows by hand: each its own call of the text encoders, weighed as its docstring says, laid end to end."""
    import torch

    from trtdiff.weighted import chunked, padded

    states, pooled = [], None
    pairs = ((pipeline.tokenizer, pipeline.text_encoder), (pipeline.tokenizer_2, pipeline.text_encoder_2))
    for tokenizer, encoder in pairs:
        chunks = padded(chunked(text, _Ids(tokenizer)), rows)
        with torch.inference_mode():
            made = [encoder(torch.from_numpy(ids[None]), output_hidden_states=True) for ids in chunks.ids]
        weighed = []
        for one, weights in zip(made, chunks.weights, strict=True):
            state = one.hidden_states[-2][0].numpy()
            heavy = state * weights[:, None]
            weighed.append(heavy * (state.mean() / heavy.mean()))
        states.append(np.concatenate(weighed))
        pooled = made[0][0]
    return torch.from_numpy(np.concatenate(states, axis=-1))[None], pooled


class _Ids:
    """transformers' tokenizer with the few things that `chunked` asks of ours."""

    def __init__(self, tokenizer):
        self._own = tokenizer
        self.limit, self.pad = tokenizer.model_max_length, tokenizer.pad_token_id
        self.begin, self.end = (tokenizer.bos_token_id,), (tokenizer.eos_token_id,)

    def pieces(self, text):
        made = self._own(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(i, *span) for i, span in zip(made.input_ids, made.offset_mapping, strict=True)]


@pytest.mark.parametrize("negative", ["blurry", "(blurry:1.3), a dog " * 6])
def test_long_and_weighted_prompts_are_the_embeddings_of_their_rows(negative, made):
    import torch
    from diffusers import StableDiffusionXLPipeline

    import trtdiff

    folder = made("sdxl")
    asked = {"negative": negative, "steps": 4, "guidance": 4.0, "seed": 3, "scheduler": "euler", **SIZE}
    with trtdiff.load(folder / "bundle", threads=1) as ours:
        latents = ours(LONG, weighted=True, **asked).latents
    pipeline = StableDiffusionXLPipeline.from_pretrained(folder / "checkpoint", torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    texts = [_embeddings(pipeline, text, 3) for text in (LONG, negative)]
    expected = pipeline(
        prompt_embeds=texts[0][0], pooled_prompt_embeds=texts[0][1], negative_prompt_embeds=texts[1][0],
        negative_pooled_prompt_embeds=texts[1][1], num_inference_steps=4, guidance_scale=4.0,
        generator=torch.Generator().manual_seed(3), output_type="latent", **SIZE,
    ).images.numpy()  # fmt: skip
    assert np.linalg.norm(latents - expected) <= 1e-4 * np.linalg.norm(expected)


def test_a_prompt_without_weights_that_fits_is_the_plain_one(made):
    import trtdiff

    with trtdiff.load(made("sdxl") / "bundle", threads=1) as ours:
        asked = {"steps": 2, "scheduler": "euler", **SIZE}
        plain, weighted = ours(PLAIN, **asked), ours(PLAIN, weighted=True, **asked)
    assert np.array_equal(plain.latents, weighted.latents)


def test_more_rows_than_the_engines_take_are_refused_with_the_way_out(made):
    import trtdiff
    from trtdiff.errors import ProfileError, UsageError

    with (
        trtdiff.load(made("sdxl") / "bundle", threads=1) as ours,
        pytest.raises(ProfileError, match=r"has \d rows of 16 tokens, the engines take 16:16:48") as caught,
    ):
        ours(LONG * 4, weighted=True, steps=2, **SIZE)
    assert "--profile context=16:16:" in caught.value.hint
    with (
        trtdiff.load(made("sd3") / "bundle", threads=1) as ours,
        pytest.raises(UsageError, match="cannot be weighted"),
    ):
        ours(PLAIN, weighted=True, steps=2)


def test_without_weights_the_words_that_are_cut_are_named(made):
    import trtdiff

    with trtdiff.load(made("sdxl") / "bundle", threads=1) as ours:
        text = "a small photo of a red house with a green tree and seven dogs"
        receipt = ours(text, steps=1, scheduler="euler", **SIZE).receipt
    assert any("these words were cut" in warning and "dogs" in warning for warning in receipt.warnings)
