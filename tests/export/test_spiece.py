"""T5's tokenizer from spiece.model against what transformers makes of the same file, rows and masks included."""

from importlib import import_module

import numpy as np
import pytest
from tokenizers import Tokenizer as Library

from trtdiff.checkpoint import _tokenizer_from_parts
from trtdiff.errors import CheckpointError, MissingDependency
from trtdiff.export import spiece
from trtdiff.families.base import TokenFacts
from trtdiff.tokens import Tokenizer

WORDS = ("a", "cat", "red", "the", "house", "12", "größe", ",", ".", "s", "ing", "(", ")")
LETTERS = "abcdefghijklmnopqrstuvwxyzöß0123456789',.!:()-"


def character_table():
    """A precompiled character map that makes Q an x: a double-array trie of one key, then its replacement.

    The format is sentencepiece's normalizer.cc: the trie's size in bytes, its units, and strings that end with zero.
    """
    units = np.zeros(512, "<u4")
    units[ord("Q")] = ord("Q") | 1 << 8 | 256 << 10  # label, "a value follows", where
    units[ord("Q") ^ 256] = 0  # where in the strings the replacement starts
    return np.uint32(units.nbytes).tobytes() + units.tobytes() + b"x\0"


def write_spiece(file, **changes):
    from transformers.convert_slow_tokenizer import import_protobuf

    definitions = import_protobuf()
    message = definitions.ModelProto()
    kinds = {"<pad>": 3, "</s>": 3, "<unk>": 2}
    scores = {**dict.fromkeys(kinds, 0.0), "▁": -3.0}
    scores |= {f"▁{word}": -2.0 - len(word) / 100 for word in WORDS} | {word: -4.0 for word in WORDS if word != "a"}
    scores |= {letter: -9.0 for letter in LETTERS if letter not in scores}
    for piece, score in scores.items():
        message.pieces.add(piece=piece, score=score, type=kinds.get(piece, 1))
    facts = {"model_type": 1, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} | changes
    for name, value in facts.items():
        setattr(message.trainer_spec, name, value)
    message.normalizer_spec.precompiled_charsmap = character_table()
    file.write_bytes(message.SerializeToString())


@pytest.fixture
def folder(tmp_path):
    write_spiece(tmp_path / "spiece.model")
    return tmp_path


@pytest.fixture
def theirs(folder, monkeypatch):
    """transformers' own; it asks for sentencepiece before it reads the file, and then does not use it."""
    import transformers

    convert_slow_tokenizer = import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(convert_slow_tokenizer, "requires_backends", lambda *_: None)
    return transformers.T5TokenizerFast.from_pretrained(folder, local_files_only=True)


@pytest.fixture
def ours(folder, tmp_path):
    (tmp_path / "ours.json").write_bytes(_tokenizer_from_parts(folder))
    return Tokenizer.open(tmp_path / "ours.json", TokenFacts(12, "<pad>"))


PROMPTS = [
    "",
    " ",
    "a red cat",
    "  the  RED\tcat,\n\nthe house.  ",
    "größe 12 naïve 日本語 🐱",
    "Qing the Q",
    "cat's (red:1.2) housing",
    "</s> the cat <pad> <unk> a",
    "a cat \u2581 house",
    "the cat " * 20,
    "x" * 50,
    "\u00a0the\u3000cat\u2028house",
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_rows_and_masks_are_transformers(ours, theirs, prompt):
    expected = theirs(prompt, padding="max_length", max_length=12, truncation=True, add_special_tokens=True)
    row, mask = ours.encode_with_mask(prompt)
    assert row.tolist() == expected.input_ids
    assert mask.tolist() == expected.attention_mask
    assert ours.encode(prompt).tolist() == expected.input_ids


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: ascii(prompt[:12]))
def test_pieces_are_transformers_ids_without_the_end_token(ours, theirs, prompt):
    assert [number for number, _, _ in ours.pieces(prompt)] == theirs(prompt, add_special_tokens=False).input_ids


def test_a_row_ends_with_the_end_token_and_begins_with_none(ours, theirs):
    assert ours.begin == ()
    assert ours.end == (theirs.eos_token_id,) == (1,)
    assert ours.pad == theirs.pad_token_id == 0


def test_the_table_of_characters_is_applied(ours):
    assert ours.encode("Qing").tolist() == ours.encode("xing").tolist()
    assert ours.encode("xing").tolist() != ours.encode("zing").tolist()


def test_sentinels_have_the_numbers_they_were_trained_with(ours, folder):
    made = Library.from_buffer(spiece.t5_tokenizer_json(folder / "spiece.model"))
    size = made.get_vocab_size()
    assert made.token_to_id("<extra_id_0>") == size - 1  # 32099 of T5's 32100
    assert made.token_to_id("<extra_id_99>") == size - 100


def test_the_words_that_are_cut_are_named_as_they_stand_in_the_prompt(ours):
    assert ours.cut("the cat " * 5 + "a Red, house") == "Red, house"  # 12 ids, the last of them the end token
    assert ours.cut("the cat " * 5 + "a") == ""


def test_a_damaged_file_is_named(folder):
    whole = (folder / "spiece.model").read_bytes()
    (folder / "spiece.model").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"spiece\.model"):
        _tokenizer_from_parts(folder)


@pytest.mark.parametrize("content", [b"", b"\x0a\xff\xff", b"<html>"])
def test_what_is_no_such_file_is_named(folder, content):
    (folder / "spiece.model").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"spiece\.model"):
        _tokenizer_from_parts(folder)


@pytest.mark.parametrize("changes", [{"model_type": 2}, {"eos_piece": "<end>"}, {"unk_id": 0}])
def test_another_kind_of_model_is_refused(folder, changes):
    write_spiece(folder / "spiece.model", **changes)
    with pytest.raises(CheckpointError, match="not a T5 tokenizer"):
        _tokenizer_from_parts(folder)


def test_without_protobuf_the_library_is_named(folder, monkeypatch):
    convert_slow_tokenizer = import_module("transformers.convert_slow_tokenizer")
    monkeypatch.setattr(convert_slow_tokenizer, "is_sentencepiece_available", lambda: False)
    monkeypatch.setattr(convert_slow_tokenizer, "is_protobuf_available", lambda: False)
    with pytest.raises(MissingDependency, match="protobuf"):
        _tokenizer_from_parts(folder)
