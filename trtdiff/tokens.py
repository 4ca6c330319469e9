"""Prompts to token ids, as transformers' tokenizers pad and cut them, with the `tokenizers` library alone.

A row is what `CLIPTokenizer(prompt, padding="max_length", truncation=True)` gives: begin token, the prompt, end token,
padding up to the row's length; T5's rows have no begin token. A longer prompt loses its last words; `cut` says which.
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
    begin: tuple[int, ...]
    """Ids that every row begins with: one of CLIP's, none of T5's."""
    end: tuple[int, ...]
    """Ids that stand behind the prompt."""
    _uncut: "tokenizers.Tokenizer"
    _cut: "tokenizers.Tokenizer"

    @classmethod
    def open(cls, path: Path, facts: TokenFacts) -> Self:
        """Read a tokenizer.json. Raises ArtefactError where it is damaged, or cannot make such rows."""
        try:
            return cls.of(path.read_bytes(), facts)
        except (OSError, ValueError) as error:
            raise ArtefactError(
                f"cannot use {path.name}: {error}", where=str(path), hint="export the checkpoint again"
            ) from None

    @classmethod
    def of(cls, content: bytes, facts: TokenFacts) -> Self:
        """Make one of the content of a tokenizer.json. Raises ValueError where that cannot make such rows."""
        uncut, cut = _read(content), _read(content)
        cut.enable_truncation(facts.limit)
        pad = uncut.token_to_id(facts.pad)
        if pad is None:
            raise ValueError(f"it has no token {facts.pad!r} to pad with")
        around = _around(uncut)
        if around is None:
            raise ValueError("it has no token for the letter a")
        if facts.limit <= sum(map(len, around)):
            raise ValueError(f"rows of {facts.limit} ids leave no room for words")
        return cls(facts.limit, pad, *around, uncut, cut)

    @property
    def largest(self) -> tuple[int, str]:
        """The largest id that there is, and its token."""
        token, number = max(self._uncut.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
        return number, token

    def encode(self, text: str) -> npt.NDArray[np.int64]:  # [limit]
        """Give the row of ids of a prompt; of what is longer, the beginning."""
        return self.encode_with_mask(text)[0]

    def encode_with_mask(self, text: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:  # 2 x [limit]
        """Give the row of ids, and 1 where it holds begin token, prompt and end token, 0 where it is only filled."""
        row, mask = np.full(self.limit, self.pad, np.int64), np.zeros(self.limit, np.int64)
        ids = self._cut.encode(text).ids
        row[: len(ids)], mask[: len(ids)] = ids, 1
        return row, mask

    def pieces(self, text: str) -> list[tuple[int, int, int]]:
        """Give every id of a text, without begin and end, with where it starts and stops in the text.

        Ids of one character (of an emoji, say) have the same place. Blanks in front of a word are not part of it.
        """
        whole = self._uncut.encode(text, add_special_tokens=False)
        return [
            (number, _behind_blanks(text, start, stop), stop)
            for number, (start, stop) in zip(whole.ids, whole.offsets, strict=True)
        ]

    def cut(self, text: str) -> str:
        """Give the words that a prompt loses, as they stand in it; empty where it fits. Half a word counts as lost."""
        whole = self._uncut.encode(text)
        if len(whole) <= self.limit:
            return ""
        kept = sum(1 for special in self._cut.encode(text).special_tokens_mask if not special)
        spans = [span for span, special in zip(whole.offsets, whole.special_tokens_mask, strict=True) if not special]
        start = _behind_blanks(text, *spans[kept])
        while start > 0 and not text[start - 1].isspace():
            start -= 1  # back to where the word begins
        return text[start:].strip()


def _read(content: bytes) -> "tokenizers.Tokenizer":
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ValueError(f"it is not a readable tokenizer: {error}") from None
    made.no_padding()
    made.no_truncation()
    return made


def _around(tokenizer: "tokenizers.Tokenizer") -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Give the ids that a tokenizer puts around a text, seen on a short one; None if nothing of that is left."""
    try:
        row = tokenizer.encode("a")
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ValueError(f"it cannot read the letter a: {error}") from None
    inner = [place for place, special in enumerate(row.special_tokens_mask) if not special]
    if not inner:
        return None
    return tuple(row.ids[: inner[0]]), tuple(row.ids[inner[-1] + 1 :])


def _behind_blanks(text: str, start: int, stop: int) -> int:
    """Move a start over blanks: T5's tokenizers count the blank in front of a word to it."""
    while start < stop and text[start].isspace():
        start += 1
    return start


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
