"""Prompts to token ids, as transformers' tokenizers pad and cut them, with the `tokenizers` library alone.

A row is what `CLIPTokenizer(prompt, padding="max_length", truncation=True)` gives: begin token, the prompt, end token,
padding up to the row's length. A longer prompt loses its last words; `cut` says which.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.families.base import TokenFacts

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True)
class Tokenizer:
    """One tokenizer of a bundle. Safe to share between threads: nothing in it changes."""

    limit: int
    """Ids in a row, special tokens included."""
    pad: int
    """Id that fills a row."""
    _uncut: "tokenizers.Tokenizer"
    _cut: "tokenizers.Tokenizer"

    @classmethod
    def open(cls, path: Path, facts: TokenFacts) -> Self:
        """Read a tokenizer.json. Raises ArtefactError where it is damaged or lacks the padding token."""
        import tokenizers

        def read() -> "tokenizers.Tokenizer":
            try:
                made = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # noqa: BLE001 - the library raises bare Exception
                raise ArtefactError(
                    f"cannot read {path.name}: {error}", where=str(path), hint="make it again"
                ) from None
            made.no_padding()
            made.no_truncation()
            return made

        uncut, cut = read(), read()
        cut.enable_truncation(facts.limit)
        pad = uncut.token_to_id(facts.pad)
        if pad is None:
            raise ArtefactError(f"{path.name} has no token {facts.pad!r} to pad with", where=str(path),
                                hint="export the checkpoint again")  # fmt: skip
        return cls(facts.limit, pad, uncut, cut)

    def encode(self, text: str) -> npt.NDArray[np.int64]:  # [limit]
        """Give the row of ids of a prompt; of what is longer, the beginning."""
        row = np.full(self.limit, self.pad, np.int64)
        ids = self._cut.encode(text).ids
        row[: len(ids)] = ids
        return row

    def cut(self, text: str) -> str:
        """Give the words that a prompt loses, as they stand in it; empty where it fits. Half a word counts as lost."""
        whole = self._uncut.encode(text)
        if len(whole) <= self.limit:
            return ""
        kept = sum(1 for special in self._cut.encode(text).special_tokens_mask if not special)
        spans = [span for span, special in zip(whole.offsets, whole.special_tokens_mask, strict=True) if not special]
        start = spans[kept][0]
        while start > 0 and not text[start - 1].isspace():
            start -= 1  # back to where the word begins
        return text[start:].strip()


def check_text(text: str, *, what: str) -> str:
    """Refuse text that is not Unicode: bytes of another encoding reach Python as lone surrogates."""
    if not isinstance(text, str):
        raise UsageError(f"{what} is {type(text).__name__}, not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text.encode("utf-8", "backslashreplace").decode()
        raise UsageError(f"{what} is not UTF-8: {shown[:80]!r} at character {error.start}",
                         hint="write it in a UTF-8 terminal or file")  from None  # fmt: skip
    return text
