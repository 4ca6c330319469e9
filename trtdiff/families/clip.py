"""CLIP text encoders, with and without projection: which layer a family reads, and what it pools.

The graph takes `clip_skip`, the number of last layers that are left out, as an input: a request decides, not the
export. All layers are computed whatever it is; a text encoder runs once a prompt.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from trtdiff.errors import CheckpointError
from trtdiff.families.base import (
    ComponentSpec,
    Config,
    Integers,
    Reading,
    TokenFacts,
    field_of,
    padding_of,
    require_class,
)
from trtdiff.types import Array, TensorSpec
from trtdiff.weighted import apply_weights, chunked, padded

if TYPE_CHECKING:
    import torch

Reads: TypeAlias = Literal["last", "penultimate", "pooled"]
"""`last`: the last layer, normalized (Stable Diffusion 1 and 2); `penultimate`: the one before it, as it is (SDXL and
SD3); `pooled`: no layer, only the vector of the end token (FLUX)."""

END = "<|endoftext|>"


def token_facts(configs: Mapping[str, Config], tokenizer: str, encoder: str) -> TokenFacts:
    """Read the padding token and the row length that a text encoder takes."""
    require_class(configs, encoder, "CLIPTextModel", "CLIPTextModelWithProjection")
    positions = field_of(configs, encoder, "max_position_embeddings", int)
    longest = configs.get(tokenizer, {}).get("model_max_length") or positions
    if not isinstance(longest, int | float) or longest < 1:
        raise CheckpointError(f"{tokenizer}'s config says model_max_length = {longest!r}; a number is expected",
                              where=f"{tokenizer}/tokenizer_config.json: model_max_length",
                              hint=f"write {positions}, which is what {encoder} takes")  # fmt: skip
    return TokenFacts(limit=min(positions, int(longest)), pad=padding_of(configs, tokenizer, END))


def text_encoder(configs: Mapping[str, Config], folder: str, *, reads: Reads, projected: bool = False) -> ComponentSpec:
    """Describe one; with a projection, or where nothing else is read, `pooled` is an output too."""
    width = field_of(configs, folder, "hidden_size", int)
    layers = field_of(configs, folder, "num_hidden_layers", int, 12)
    inputs = [TensorSpec("input_ids", "int64", ("batch", "tokens"))]
    outputs = []
    values = {"input_ids": Integers(field_of(configs, folder, "vocab_size", int, 49408))}
    if reads != "pooled":
        inputs.append(TensorSpec("clip_skip", "int64", (1,)))
        outputs.append(TensorSpec("encoder_hidden_states", "float32", ("batch", "tokens", width)))
        values["clip_skip"] = Integers(layers)
    if projected or reads == "pooled":
        size = field_of(configs, folder, "projection_dim", int, 512) if projected else width
        outputs.append(TensorSpec("pooled", "float32", ("batch", size)))
    return ComponentSpec(
        name=folder,
        folder=folder,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        build=partial(_text_encoder, reads=reads, projected=projected),
        prefix="text_encoder",
        values=values,
    )


def run_clip(
    texts: Sequence[str | None], reading: Reading, tokenizer: str, encoder: str, *, skips: bool = True
) -> Mapping[str, Array]:
    """Encode texts; `skips` is False where the encoder is read for its pooled output alone.

    With rows asked for, weights hold, and states are [B, rows · tokens, width]; the pooled output is the first row's.
    """
    given, tokens, rows = [text or "" for text in texts], reading.tokenizers[tokenizer], reading.options.rows
    fixed = {"clip_skip": np.array([reading.options.clip_skip])} if skips else {}

    def run(ids: Array) -> Mapping[str, Array]:  # [B, tokens] int64
        return reading.sessions[encoder].run({"input_ids": ids, **fixed})

    if not (skips and rows):
        return run(np.stack([tokens.encode(text) for text in given]))
    chunks = [padded(chunked(text, tokens), rows) for text in given]
    made = [run(np.stack([one.ids[row] for one in chunks])) for row in range(rows)]
    states = np.stack([row["encoder_hidden_states"] for row in made], axis=1)  # [B, rows, tokens, width]
    weighed = [apply_weights(each, one.weights) for each, one in zip(states, chunks, strict=True)]
    return {**made[0], "encoder_hidden_states": np.stack(weighed)}


def _text_encoder(config: Config, *, reads: Reads, projected: bool) -> "torch.nn.Module":
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    kind = CLIPTextModelWithProjection if projected else CLIPTextModel

    class TextEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text_encoder = kind(CLIPTextConfig(**config))

        def forward(self, input_ids: torch.Tensor, clip_skip: torch.Tensor | None = None) -> Any:
            made: Any = self.text_encoder(input_ids, output_hidden_states=reads != "pooled")
            pooled = made.text_embeds if projected else made.pooler_output
            if clip_skip is None:
                return pooled
            states = torch.stack(made.hidden_states)  # [layers + 1, B, tokens, width]
            chosen = len(made.hidden_states) - (1 if reads == "last" else 2) - clip_skip  # [1]
            hidden = torch.index_select(states, 0, chosen)[0]
            if reads == "last":
                inner: Any = self.text_encoder.text_model if projected else self.text_encoder
                hidden = inner.final_layer_norm(hidden)
            return (hidden, pooled) if projected else hidden

    return TextEncoder().eval()
