r"""Prompts with weights and of any length: `a (red:1.3) [cat]`, cut into chunks that the text encoder takes.

    (word:1.3)    1.3                       BREAK              what follows begins a new chunk
    (word)        1.1                       \( \) \[ \] \\     the character itself
    [word]        1 / 1.1
    ((word))      1.1 · 1.1: nested weights multiply

The syntax, the way long prompts are cut and the way weights act are those of AUTOMATIC1111's stable-diffusion-webui
(its wiki, "Attention/emphasis" and "Infinite prompt length"; modules/prompt_parser.py, sd_hijack_clip.py,
sd_emphasis.py). Three things differ. A bracket without its partner is an error here, where webui reads it as text or
closes it at the end. A weight may have blanks around it. And the text between two BREAKs is tokenised as a whole, where
webui tokenises span by span and makes two words of `(cat)s`: a prompt has the same ids with and without weights, and
where a span begins or ends inside a word, each id of the word has the weight of the span that it begins in. Prompt
editing (`[cat:dog:0.5]`, `[cat|dog]`) is not known: it is text in square brackets.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from trtdiff.errors import UsageError
from trtdiff.types import Array

if TYPE_CHECKING:
    from trtdiff.tokens import Tokenizer

STRONGER = 1.1
"""Weight of a round bracket; a square one has its inverse."""
MOST_WEIGHT = 10.0
"""Far beyond use; what exceeds it is a text in brackets that ends with a number, like a time of day."""
BACKTRACK = 20
"""How many ids before its end a full chunk may end, behind a comma; webui's default."""
MOST_SCALE = 100.0
"""Of `apply_weights`: a mean that changed more than this says nothing about the size of the values."""


@dataclass(frozen=True)
class Span:
    """Some text of one weight."""

    text: str
    weight: float


@dataclass(frozen=True)
class Chunks:
    """A prompt as rows for the text encoder."""

    ids: npt.NDArray[np.int64]  # [n, limit]
    weights: npt.NDArray[np.float32]  # [n, limit]
    """Of every id; 1 of begin and end tokens and of padding."""
    mask: npt.NDArray[np.int64]  # [n, limit]
    """1 of begin tokens, words and end tokens; 0 of padding."""
    empty: "Row"
    """The row of a chunk without words."""


class Row(NamedTuple):
    """One row of `Chunks`."""

    ids: npt.NDArray[np.int64]  # [limit]
    weights: npt.NDArray[np.float32]  # [limit]
    mask: npt.NDArray[np.int64]  # [limit]


def parse(prompt: str) -> list[list[Span]]:
    """Give the spans between one BREAK and the next; neighbours of one weight are one. Raises UsageError."""
    parts: list[list[Span]] = [[]]
    for text, weight in _pieces(prompt):
        part = parts[-1]
        if text is None:
            parts.append([])
        elif part and part[-1].weight == weight:
            part[-1] = Span(part[-1].text + text, weight)
        else:
            part.append(Span(text, weight))
    return parts


def chunked(prompt: str, tokenizer: "Tokenizer") -> Chunks:
    """Cut a prompt into chunks; an empty one is one empty chunk.

    A chunk has room for a row's ids without begin and end tokens. Where more follow, it ends behind the last comma
    among its last `BACKTRACK` ids, unless there is none or the id that follows is itself a comma: then it is full.
    BREAK ends it too; two in a row leave an empty chunk, and at the very end BREAK does nothing.
    """
    room = tokenizer.limit - len(tokenizer.begin) - len(tokenizer.end)
    parts = parse(prompt)
    if len(parts) > 1 and not "".join(span.text for span in parts[-1]).strip():
        parts.pop()
    rows = [_row(ids, tokenizer) for part in parts for ids in _cut(_weighed_ids(part, tokenizer), room)]
    return _stacked(rows, _row([], tokenizer))


def padded(chunks: Chunks, count: int) -> Chunks:
    """Add empty chunks up to `count`, so that a prompt and its negative prompt have equally many."""
    rows = [Row(*row) for row in zip(chunks.ids, chunks.weights, chunks.mask, strict=True)]
    return _stacked(rows + [chunks.empty] * (count - len(rows)), chunks.empty)


def apply_weights(embeddings: Array, weights: Array) -> Array:  # [n, limit, width], [n, limit] -> [n * limit, width]
    """Multiply every embedding by its weight, then scale each chunk so that the mean over all its values is as before.

    This is webui's emphasis "Original". A chunk whose weights are all 1 stays exactly as it is. Raises UsageError where
    weights cancel each other out, so that the mean vanishes or turns.
    """
    return np.concatenate([_weighed(chunk, weight) for chunk, weight in zip(embeddings, weights, strict=True)])


def _weighed(chunk: Array, weights: Array) -> Array:  # [limit, width], [limit] -> [limit, width]
    if (weights == 1).all():
        return chunk
    weighed = chunk * weights[:, None]
    before, after = (float(values.mean(dtype=np.float64)) for values in (chunk, weighed))
    if before * after <= 0 or abs(before) > MOST_SCALE * abs(after):
        raise UsageError(
            f"the weights of a prompt cancel each other out: its embedding's mean, {before:.3g}, became {after:.3g}",
            hint="use weights nearer to 1, and none below 0",
        )
    return weighed * np.float32(before / after)


# --- the syntax -------------------------------------------------------------------------------------------------------

_TOKENS = re.compile(
    r"""  \\ (?P<escaped> [()\[\]\\] )
        | (?P<opened> [(\[] )
        | (?: : \s* (?P<weight> [+-]? (?: \d+ \.? \d* | \. \d+ ) ) \s* )? (?P<closed> \) )
        | (?P<squared> \] )
        | (?P<broken> \b BREAK \b )
        | (?P<text> . )
    """,
    re.VERBOSE | re.DOTALL,
)


class _Open(NamedTuple):
    bracket: str
    place: int
    """Of the bracket in the prompt."""
    first: int
    """The first piece inside."""


def _pieces(prompt: str) -> list[tuple[str | None, float]]:
    """Give pieces of text and their weights; None where BREAK stands."""
    pieces: list[tuple[str | None, float]] = []
    opened: list[_Open] = []
    for found in _TOKENS.finditer(prompt):
        if found["opened"]:
            opened.append(_Open(found["opened"], found.start(), len(pieces)))
        elif closed := found["closed"] or found["squared"]:
            if not opened or opened[-1].bracket != {")": "(", "]": "["}[closed]:
                raise _without_partner(prompt, closed, found.end() - 1)
            factor = 1 / STRONGER if closed == "]" else float(found["weight"] or STRONGER)
            inside = slice(opened.pop().first, None)
            pieces[inside] = [(text, weight * factor) for text, weight in pieces[inside]]
            if any(abs(weight) > MOST_WEIGHT for text, weight in pieces[inside] if text):
                raise UsageError(
                    f"the weight at character {found.start() + 1} of the prompt is beyond {MOST_WEIGHT:g}",
                    where=_around(prompt, found.start()),
                    hint=r"0.5 to 1.5 are usual; brackets that are text are written \( and \)",
                )
        elif found["broken"]:
            pieces.append((None, 1))
        else:
            pieces.append((found["escaped"] or found["text"], 1))
    if opened:
        raise _without_partner(prompt, opened[-1].bracket, opened[-1].place)
    return pieces


def _without_partner(prompt: str, bracket: str, place: int) -> UsageError:
    return UsageError(
        f"the bracket {bracket} at character {place + 1} of the prompt has no partner",
        where=_around(prompt, place),
        hint=rf"write \{bracket} for a bracket that is text",
    )


def _around(prompt: str, place: int) -> str:
    return repr(prompt[max(0, place - 30) : place + 30])


# --- the rows ---------------------------------------------------------------------------------------------------------


class _Id(NamedTuple):
    number: int
    weight: float
    comma: bool


def _weighed_ids(part: Sequence[Span], tokenizer: "Tokenizer") -> list[_Id]:
    text = "".join(span.text for span in part)
    first = len(text) - len(text.lstrip())  # blanks around BREAK are no text
    ends = list(accumulate(len(span.text) for span in part))
    return [
        _Id(
            number,
            part[min(bisect_right(ends, first + start), len(part) - 1)].weight,
            text[first + start : first + stop].endswith(","),
        )
        for number, start, stop in tokenizer.pieces(text.strip())
    ]


def _cut(ids: Sequence[_Id], room: int) -> list[Sequence[_Id]]:
    rows = []
    while len(ids) > room:
        commas = [place for place in range(max(0, room - BACKTRACK), room) if ids[place].comma]
        end = commas[-1] + 1 if commas and not ids[room].comma else room
        rows.append(ids[:end])
        ids = ids[end:]
    return [*rows, ids]


def _row(ids: Sequence[_Id], tokenizer: "Tokenizer") -> Row:
    numbers = [*tokenizer.begin, *(each.number for each in ids), *tokenizer.end]
    row = Row(
        np.full(tokenizer.limit, tokenizer.pad, np.int64),
        np.ones(tokenizer.limit, np.float32),
        np.zeros(tokenizer.limit, np.int64),
    )
    row.ids[: len(numbers)], row.mask[: len(numbers)] = numbers, 1
    row.weights[len(tokenizer.begin) :][: len(ids)] = [each.weight for each in ids]
    return row


def _stacked(rows: Sequence[Row], empty: Row) -> Chunks:
    ids, weights, mask = (np.stack(column) for column in zip(*rows, strict=True))
    return Chunks(ids, weights, mask, empty)
