"""The T5 encoder: the long-text encoder of SD3, FLUX and PixArt."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

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

if TYPE_CHECKING:
    import torch

TOKENS = "long_tokens"
PAD = "<pad>"
KEEP_HIGH = dict.fromkeys(
    (
        "encoder.block.*.layer.?",
        "*.layer_norm",
        "encoder.final_layer_norm",
        "*.DenseReluDense",
        "*.DenseReluDense.wo",
    ),
    "T5 was trained in bfloat16: its residual stream leaves float16, and the picture is black",
)
"""The residual stream, and what reads and writes it; the product of gate and value, which is large too. transformers
keeps `wo` in float32 for the same reason."""


def token_facts(configs: Mapping[str, Config], tokenizer: str, limit: int) -> TokenFacts:
    """Give the padding token and the row length, which is the pipeline's and not the tokenizer's."""
    return TokenFacts(limit=limit, pad=padding_of(configs, tokenizer, PAD))


def text_encoder(configs: Mapping[str, Config], folder: str, *, masked: bool = False) -> ComponentSpec:
    """Describe one; `masked` hides the padding from attention, as PixArt does, and SD3 and FLUX do not."""
    require_class(configs, folder, "T5EncoderModel")
    width = field_of(configs, folder, "d_model", int, 512)
    rows = ("batch", TOKENS)
    mask = [TensorSpec("attention_mask", "int64", rows)] if masked else []
    return ComponentSpec(
        name=folder,
        folder=folder,
        inputs=(TensorSpec("input_ids", "int64", rows), *mask),
        outputs=(TensorSpec("encoder_hidden_states", "float32", (*rows, width)),),
        build=_text_encoder,
        prefix="text_encoder",
        keep_high=KEEP_HIGH,
        values={
            "input_ids": Integers(field_of(configs, folder, "vocab_size", int, 32128)),
            "attention_mask": Integers(2),
        },
    )


def run_t5(texts: Sequence[str | None], reading: Reading, tokenizer: str, encoder: str) -> Array:  # [B, tokens, width]
    """Encode texts, padding included."""
    ids = np.stack([reading.tokenizers[tokenizer].encode(text or "") for text in texts])
    return reading.sessions[encoder].run({"input_ids": ids})["encoder_hidden_states"]


def _text_encoder(config: Config) -> "torch.nn.Module":
    import torch
    from transformers import T5Config, T5EncoderModel

    class TextEncoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text_encoder = T5EncoderModel(T5Config(**config))

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
            return self.text_encoder(input_ids, attention_mask=attention_mask, return_dict=False)[0]

    return TextEncoder().eval()
