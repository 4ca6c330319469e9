"""Names under which checkpoints store a tensor that today's modules call otherwise, as a table.

Loading with diffusers or transformers renames on the way; here nothing is loaded, so the table is read the other way
round: from the name a module needs to the names it may be stored under. An exact match always wins.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches

from trtdiff.export.safetensors_index import TensorRef

STORED_AS: tuple[tuple[str, str, str], ...] = (
    # needed                                 stored                    why
    (r"^(.*)\.to_q\.(weight|bias)$", r"\1.query.\2", "attention blocks before diffusers 0.15: SD 1.x and 2.x VAEs"),
    (r"^(.*)\.to_k\.(weight|bias)$", r"\1.key.\2", "the same"),
    (r"^(.*)\.to_v\.(weight|bias)$", r"\1.value.\2", "the same"),
    (r"^(.*)\.to_out\.0\.(weight|bias)$", r"\1.proj_attn.\2", "the same"),
    (r"^(?!text_model\.)(.*)$", r"text_model.\1", "CLIPTextModel lost its inner text_model in transformers 5"),
    (r"^text_model\.(.*)$", r"\1", "saved with transformers 5, needed by transformers 4"),
    (
        r"^encoder\.embed_tokens\.weight$",
        "shared.weight",
        "T5 ties its embedding to the shared one and stores one of them",
    ),
    (r"^shared\.weight$", "encoder.embed_tokens.weight", "the same, the other way round"),
)


def stored_name(needed: str, tensors: Mapping[str, TensorRef]) -> str | None:
    """Give the name under which a needed tensor is stored, or None."""
    return next((name for name in _candidates(needed) if name in tensors), None)


def near_names(needed: str, tensors: Mapping[str, TensorRef]) -> list[str]:
    """Give up to three stored names that look like a missing one."""
    return get_close_matches(needed, tensors, n=3, cutoff=0.8)


def same_elements(stored: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """Whether shapes differ in dimensions of 1 alone, as a convolution of one pixel [C, C, 1, 1] and a matrix do."""
    return [n for n in stored if n != 1] == [n for n in needed if n != 1]


def _candidates(needed: str) -> Iterator[str]:
    yield needed
    for pattern, replacement, _ in STORED_AS:
        if re.match(pattern, needed):
            yield re.sub(pattern, replacement, needed)
