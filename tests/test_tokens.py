"""Rows of token ids against transformers' own CLIPTokenizer, and what a long prompt loses."""

import json
import shutil

import pytest

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.families.base import TokenFacts
from trtdiff.tokens import Tokenizer, check_text

PROMPTS = [
    "",
    " ",
    "a red cat",
    "  A   RED\tcat\n\non a  house ",
    "cat,dog;tree!!! (small:1.2) [large] it's the cats'",
    "größe naïve Ελλάδα привет 日本語 العربية हिन्दी",
    "a cat 🐱 with a 👩‍👩‍👧 and 🏳️‍🌈",
    "control \x00 \x07 \x1b[31m \u200b\u202e \ufeff zero",
    "e\u0301 \u00e9 \ufb01 \u212b",  # composed, decomposed, ligature, Ångström sign
    "<|endoftext|> a <|startoftext|> cat",
    "123 4,567.89 ½ ²",
    "word " * 40,
    "x" * 500,
    "🐱" * 40,
    "\u00a0nbsp\u3000wide\u2028line",
]


@pytest.fixture(scope="module", params=["<|endoftext|>", "!"])
def pair(request, tiny_checkpoint, tmp_path_factory):
    """transformers' tokenizer and ours, from one folder; padded as Stable Diffusion 1 and as 2 do."""
    from transformers import CLIPTokenizer

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    shutil.copytree(tiny_checkpoint / "tokenizer", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "pad_token": request.param}))
    theirs = CLIPTokenizer.from_pretrained(folder)
    assert theirs.pad_token == request.param
    theirs.backend_tokenizer.save(str(folder / "ours.json"))
    return theirs, Tokenizer.open(folder / "ours.json", TokenFacts(theirs.model_max_length, request.param))


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_rows_are_transformers_rows(pair, prompt):
    theirs, ours = pair
    expected = theirs(prompt, padding="max_length", max_length=theirs.model_max_length, truncation=True).input_ids
    row = ours.encode(prompt)
    assert row.tolist() == expected
    assert row.dtype == "int64"


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_something_is_cut_exactly_where_transformers_truncates(pair, prompt):
    theirs, ours = pair
    assert bool(ours.cut(prompt)) == (len(theirs(prompt).input_ids) > theirs.model_max_length)


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_masks_are_transformers_masks(pair, prompt):
    theirs, ours = pair
    expected = theirs(prompt, padding="max_length", max_length=theirs.model_max_length, truncation=True)
    row, mask = ours.encode_with_mask(prompt)
    assert row.tolist() == expected.input_ids
    assert mask.tolist() == expected.attention_mask
    assert mask.dtype == "int64"


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_pieces_are_transformers_ids_without_begin_and_end(pair, prompt):
    theirs, ours = pair
    numbers = [number for number, _, _ in ours.pieces(prompt)]
    assert numbers == theirs(prompt, add_special_tokens=False).input_ids
    assert [*ours.begin, *numbers, *ours.end] == theirs(prompt).input_ids


def test_pieces_say_where_they_stand(pair):
    assert [(start, stop) for _, start, stop in pair[1].pieces("  a\n cat, 🐱")] == [
        (2, 3), (5, 8), (8, 9), *[(10, 11)] * 4  # four bytes of one character
    ]  # fmt: skip


@pytest.fixture
def blanks_included(tmp_path):
    """A Unigram tokenizer whose words include the blank in front of them, as some T5 files are made."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<unk>", "▁", "▁a", "▁cat", "▁red", ",", *"acdert"]
    made = Library(models.Unigram([(word, -len(word) - 1.0) for word in words], 2))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    made.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer.open(tmp_path / "tokenizer.json", TokenFacts(5, "<pad>"))


def test_a_blank_in_front_of_a_word_is_not_part_of_it(blanks_included):
    assert [(start, stop) for _, start, stop in blanks_included.pieces("a red, cat")] == [
        (0, 1),
        (2, 5),
        (5, 6),
        (7, 10),
    ]
    assert blanks_included.cut("a red a a cat, a") == "cat, a"
    assert (blanks_included.begin, blanks_included.end) == ((), (1,))


def test_a_tokenizer_that_knows_no_letters_is_refused(tmp_path):
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.BPE({"!": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtefactError, match="no token for the letter a"):
        Tokenizer.open(tmp_path / "tokenizer.json", TokenFacts(16, "!"))


def test_rows_without_room_for_words_are_refused(pair, tmp_path):
    pair[0].backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtefactError, match="rows of 2 ids leave no room"):
        Tokenizer.open(tmp_path / "tokenizer.json", TokenFacts(2, "!"))


def test_the_words_that_are_cut_are_named_as_they_stand_in_the_prompt(pair):
    _, ours = pair  # 16 ids: 14 besides the two special ones, and "a" is one
    assert ours.cut("a " * 14 + "Cat dog,\nHOUSE") == "Cat dog,\nHOUSE"
    assert not ours.cut("a " * 14)


def test_a_word_that_is_cut_in_two_counts_as_cut(pair):
    _, ours = pair
    assert ours.encode("a " * 13 + "x")[-2] == ours.encode("x")[1]  # there is room for one more id, not for three
    assert ours.cut("a " * 13 + "xyz end") == "xyz end"


def test_a_file_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ArtefactError, match=r"cannot use tokenizer\.json"):
        Tokenizer.open(tmp_path / "tokenizer.json", TokenFacts(16, "!"))


def test_a_padding_token_that_does_not_exist_is_named(pair, tmp_path):
    pair[0].backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtefactError, match=r"no token '\[PAD\]'"):
        Tokenizer.open(tmp_path / "tokenizer.json", TokenFacts(16, "[PAD]"))


def test_bytes_that_are_not_utf8_are_refused_with_their_place():
    text = b"caf\xe9 noir".decode("utf-8", "surrogateescape")  # how Python hands a program such an argument
    with pytest.raises(UsageError, match=r"the prompt is not UTF-8: .*udce9.* at character 3"):
        check_text(text, what="the prompt")


def test_what_is_not_text_is_refused():
    with pytest.raises(UsageError, match="prompt 2 is int"):
        check_text(7, what="prompt 2")
