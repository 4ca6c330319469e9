"""The prompt sets that come with the project are what calibration/README.md says of them."""

import itertools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def prompts(name):
    text = (ROOT / "calibration" / name).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n")


@pytest.mark.parametrize(("name", "count"), [("prompts.txt", 128), ("digits.txt", 40)])
def test_sets_have_no_blank_and_no_equal_lines(name, count):
    lines = prompts(name)
    assert all(line == line.strip() != "" for line in lines)
    assert len(set(lines)) == len(lines) == count


def test_the_demo_is_asked_in_words_it_was_taught():
    taught = json.loads((ROOT / "checkpoints/digits/prompts.json").read_text())
    articles = {word: f"{'an' if word[0] in 'aeiou' else 'a'} {word}" for word in (*taught["inks"], *taught["pages"])}
    spellings = [text for digit, word in enumerate(taught["digits"]) for text in (word, str(digit))]
    sentences = {
        wording.format(digit=digit, ink=ink, page=page, an_ink=articles[ink], a_page=articles[page]): digit
        for wording, digit, (ink, page) in itertools.product(taught["wordings"], spellings, taught["pairs"])
    }
    asked = [sentences[prompt] for prompt in prompts("digits.txt")]
    assert {spelling: asked.count(spelling) for spelling in spellings} == dict.fromkeys(spellings, 2)
