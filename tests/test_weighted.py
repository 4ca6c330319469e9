"""Weighted and long prompts: the syntax against hand-made spans, rows against transformers, weights in closed form."""

import numpy as np
import pytest

from trtdiff.errors import UsageError
from trtdiff.families.base import TokenFacts
from trtdiff.tokens import Tokenizer
from trtdiff.weighted import Chunks, Span, apply_weights, chunked, padded, parse

# --- the syntax -------------------------------------------------------------------------------------------------------


def spans(prompt):
    return [[(span.text, pytest.approx(span.weight)) for span in part] for part in parse(prompt)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red cat", [("a red cat", 1)]),
        ("", []),
        ("()", []),
        ("a (red) cat", [("a ", 1), ("red", 1.1), (" cat", 1)]),
        ("a (red:1.3) cat", [("a ", 1), ("red", 1.3), (" cat", 1)]),
        ("(red:.5)(red: +2. )(red :0)(red:-1)", [("red", 0.5), ("red", 2), ("red ", 0), ("red", -1)]),
        ("[red]", [("red", 1 / 1.1)]),
        ("((red))", [("red", 1.1**2)]),
        ("[[[red]]]", [("red", 1.1**-3)]),
        ("(a (red:1.5) cat:0.5)", [("a ", 0.5), ("red", 0.75), (" cat", 0.5)]),
        ("((red:1.3) cat)", [("red", 1.3 * 1.1), (" cat", 1.1)]),
        ("(a [red])", [("a ", 1.1), ("red", 1)]),
        ("(red)(cat)", [("redcat", 1.1)]),
        (r"\(red\) \[cat\] \\", [(r"(red) [cat] " + "\\", 1)]),
        (r"(red \(cat\):1.2)", [("red (cat)", 1.2)]),
        (r"a\b", [(r"a\b", 1)]),
        ("10:30 a:b", [("10:30 a:b", 1)]),
        ("(a: b)", [("a: b", 1.1)]),
        ("(a:1.2.3)", [("a:1.2.3", 1.1)]),
        ("[red:0.5]", [("red:0.5", 1 / 1.1)]),
        ("(red\n,cat:1.2)", [("red\n,cat", 1.2)]),
        ("(größe 🐱:1.2)", [("größe 🐱", 1.2)]),
        ("BREAKFAST aBREAK break", [("BREAKFAST aBREAK break", 1)]),
    ],
)
def test_spans_and_their_weights(prompt, expected):
    assert spans(prompt) == [expected]


def test_neighbours_of_one_weight_are_one_span():
    assert parse("a (b:1) c") == [[Span("a b c", 1.0)]]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("red BREAK cat", [[("red ", 1)], [(" cat", 1)]]),
        ("BREAK", [[], []]),
        ("(red BREAK cat:1.2)", [[("red ", 1.2)], [(" cat", 1.2)]]),
        ("red,BREAK,BREAKcat", [[("red,", 1)], [(",BREAKcat", 1)]]),
    ],
)
def test_break_parts_a_prompt(prompt, expected):
    assert spans(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "bracket", "place"),
    [
        ("a (red", "(", 3),
        ("a red)", ")", 6),
        ("[a (b]", "]", 6),
        ("smile :)", ")", 8),
        ("((a)", "(", 1),
        ("a:1.3)", ")", 6),
    ],
)
def test_a_bracket_without_its_partner_is_refused_with_its_place(prompt, bracket, place):
    with pytest.raises(UsageError) as caught:
        parse(prompt)
    assert caught.value.message == f"the bracket {bracket} at character {place} of the prompt has no partner"
    assert rf"\{bracket}" in caught.value.hint


@pytest.mark.parametrize("prompt", ["at (10:30)", "(a:-11)", "((a:4):4)", "(" * 25 + "a" + ")" * 25])
def test_a_weight_beyond_use_is_refused(prompt):
    with pytest.raises(UsageError, match="is beyond 10"):
        parse(prompt)


def test_long_prompts_of_blanks_and_brackets_are_read_at_once():
    assert parse(" " * 50_000 + ":" * 50_000)[0][0].weight == 1
    with pytest.raises(UsageError, match="no partner"):
        parse("(" * 50_000)


# --- the rows ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(tiny_checkpoint):
    """A CLIP tokenizer of 16 ids, 14 without begin and end; every word of its list is one id, and so is a comma."""
    return Tokenizer.open(tiny_checkpoint / "tokenizer/tokenizer.json", TokenFacts(16, "!"))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A Unigram tokenizer of 9 ids, 8 without the end token; there is none to begin with."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, processors

    words = ["<pad>", "</s>", "<unk>", "▁", "▁a", "▁red", "▁cat", "s", ",", *"acdert"]
    made = Library(models.Unigram([(word, -2.0 if len(word) > 1 else -6.0) for word in words], 2))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.post_processor = processors.TemplateProcessing(single=["$A", "</s>"], special_tokens=[("</s>", 1)])
    file = tmp_path_factory.mktemp("t5") / "tokenizer.json"
    made.save(str(file))
    return Tokenizer.open(file, TokenFacts(9, "<pad>"))


@pytest.fixture(params=["clip", "t5"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


PLAIN = ["", " ", "a red cat", "a  cat, red\ncat", "cats", "ü 🐱", " 日本 cat\n"]


@pytest.mark.parametrize("prompt", PLAIN)
def test_a_short_prompt_without_weights_is_the_tokenizers_own_row(tokenizer, prompt):
    made = chunked(prompt, tokenizer)
    row, mask = tokenizer.encode_with_mask(prompt)
    assert made.ids.tolist() == [row.tolist()]
    assert made.mask.tolist() == [mask.tolist()]
    assert (made.weights == 1).all()
    assert (made.ids.dtype, made.weights.dtype, made.mask.dtype) == ("int64", "float32", "int64")


@pytest.mark.parametrize(
    ("weighted", "plain"),
    [
        ("a (red:1.3) cat", "a red cat"),
        ("(a) [red] ((cat))", "a red cat"),
        ("a (red), (cat)s", "a red, cats"),
        ("r(ed c:1.2)at", "red cat"),
        (r"a \(cat\)", "a (cat)"),
        ("((a:0.5) red:2)", "a red"),
    ],
)
def test_weights_change_no_ids(tokenizer, weighted, plain):
    made = chunked(weighted, tokenizer)
    row, mask = tokenizer.encode_with_mask(plain)
    assert made.ids.tolist() == [row.tolist()]
    assert made.mask.tolist() == [mask.tolist()]


def test_between_words_ids_are_those_of_the_spans_alone(clip, tiny_checkpoint):
    """As the front ends tokenise: every span by itself, one after another."""
    from transformers import CLIPTokenizer

    theirs = CLIPTokenizer.from_pretrained(tiny_checkpoint / "tokenizer")
    alone = [
        (number, weight)
        for text, weight in [("a ", 1), ("red, small", 1.5), (" ", 1), ("cat", 1.1), (" of xyz 🐱", 1)]
        for number in theirs(text, add_special_tokens=False).input_ids
    ]
    made = chunked("a (red, small:1.5) (cat) of xyz 🐱", clip)
    assert made.ids[made.mask == 1].tolist()[1:-1] == [number for number, _ in alone]
    np.testing.assert_allclose(made.weights[0, 1 : 1 + len(alone)], [weight for _, weight in alone])


def test_every_id_has_its_spans_weight_and_special_tokens_and_padding_have_one(clip, t5):
    words = [1, 1.3, 1.3, 1.1, 1]
    np.testing.assert_allclose(chunked("a (red cat:1.3) (dog) of", clip).weights, [[1, *words, *[1] * 10]])
    np.testing.assert_allclose(chunked("a (red cat:1.3) (red) a", t5).weights, [[*words, *[1] * 4]])


def test_inside_a_word_an_id_has_the_weight_of_the_span_it_begins_in(clip, t5):
    assert len(clip.pieces("cat")) == 1
    np.testing.assert_allclose(chunked("(c:2)at", clip).weights[0, 1], 2)
    np.testing.assert_allclose(chunked("c(at:2)", clip).weights[0, 1], 1)
    np.testing.assert_allclose(chunked("(cat:2)s", t5).weights[0, :2], [2, 1])


def test_a_character_of_several_ids_has_one_weight(clip):
    np.testing.assert_allclose(chunked("a (🐱:2) a", clip).weights[0, :7], [1, 1, 2, 2, 2, 2, 1])


def words(row, tokenizer):
    """The ids of a row between begin and end."""
    inner = row[len(tokenizer.begin) :].tolist()
    return inner[: inner.index(tokenizer.end[0])]


def numbers(text, tokenizer):
    return [number for number, _, _ in tokenizer.pieces(text)]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a " * 14, ["a " * 14]),
        ("a " * 15, ["a " * 14, "a"]),
        ("a " * 28, ["a " * 14, "a " * 14]),
        ("a " * 10 + ", " + "cat " * 5, ["a " * 10 + ",", "cat " * 5]),  # the last comma
        ("a, a, a, " + "cat " * 10, ["a, a, a,", "cat " * 10]),
        ("a " * 13 + "," + "cat", ["a " * 13 + ",", "cat"]),  # full, and ends with a comma
        ("a, " + "cat " * 12 + ", dog", ["a, " + "cat " * 12, ", dog"]),  # a comma follows: full
        ("a, a " + "cat " * 26, ["a,", "a " + "cat " * 13, "cat " * 13]),  # a comma is looked for in every chunk
        ("red BREAK cat", ["red", "cat"]),
        ("red BREAK", ["red"]),
        ("red BREAK  ", ["red"]),
        ("BREAK red", ["", "red"]),
        ("red BREAK BREAK cat", ["red", "", "cat"]),
        ("BREAK", [""]),
        ("a " * 14 + "BREAK cat", ["a " * 14, "cat"]),
    ],
)
def test_long_prompts_are_cut_where_the_rule_says(clip, prompt, expected):
    made = chunked(prompt, clip)
    assert [words(row, clip) for row in made.ids] == [numbers(text, clip) for text in expected]
    assert (made.ids[:, 0] == clip.begin[0]).all()
    assert (made.mask.sum(1) == [len(numbers(text, clip)) + 2 for text in expected]).all()
    assert (made.ids[made.mask == 0] == clip.pad).all()


def test_a_comma_further_back_than_the_rule_looks_is_no_place_to_cut(tiny_checkpoint):
    large = Tokenizer.open(tiny_checkpoint / "tokenizer/tokenizer.json", TokenFacts(77, "!"))
    near, far = "a " * 55 + "," + "cat " * 30, "a " * 54 + "," + "cat " * 30  # the comma is id 55 or 54 of 75
    assert [len(words(row, large)) for row in chunked(near, large).ids] == [56, 30]
    assert [len(words(row, large)) for row in chunked(far, large).ids] == [75, 10]


def test_rows_without_a_begin_token_hold_one_word_more(t5):
    made = chunked("a red, (cat:1.5) a a a red red", t5)
    assert [words(row, t5) for row in made.ids] == [numbers("a red,", t5), numbers("cat a a a red red", t5)]
    assert made.ids[:, 0].tolist() == [numbers("a", t5)[0], numbers("cat", t5)[0]]
    np.testing.assert_allclose(made.weights[1], [1.5, *[1] * 8])


def test_weights_go_with_their_ids_into_the_next_chunk(clip):
    made = chunked("a " * 10 + ", " + "(cat:1.5) dog (cat dog:0.5)", clip)
    np.testing.assert_allclose(made.weights, [[1] * 16, [1, 1.5, 1, 0.5, 0.5, *[1] * 11]])


def test_empty_chunks_make_two_prompts_equally_long(tokenizer):
    long, short = chunked("(cat:1.2) " * 20, tokenizer), chunked("red", tokenizer)
    made = padded(short, len(long.ids))
    assert made.ids.shape == made.weights.shape == made.mask.shape == long.ids.shape
    np.testing.assert_array_equal(made.ids[:1], short.ids)
    row, mask = tokenizer.encode_with_mask("")
    assert (made.ids[1:] == row).all()
    assert (made.mask[1:] == mask).all()
    assert (made.weights[1:] == 1).all()
    assert isinstance(padded(made, len(made.ids)), Chunks)


# --- what weights do --------------------------------------------------------------------------------------------------


def embeddings(chunks=3):
    return (np.random.default_rng(0).standard_normal((chunks, 16, 24)) + 0.3).astype(np.float32)


def test_weights_of_one_change_nothing():
    given = embeddings()
    np.testing.assert_array_equal(apply_weights(given, np.ones((3, 16), np.float32)), given.reshape(48, 24))


def test_weights_multiply_and_the_mean_of_every_chunk_stays():
    given = embeddings()
    weights = np.ones((3, 16), np.float32)
    weights[1, 2:7], weights[2, 5] = 1.5, 0
    got = apply_weights(given, weights)
    assert got.dtype == np.float32
    weighed = given.astype(np.float64) * weights[..., None]
    scale = given.mean((1, 2), np.float64, keepdims=True) / weighed.mean((1, 2), keepdims=True)
    np.testing.assert_allclose(got, (weighed * scale).reshape(48, 24), rtol=3e-7)
    np.testing.assert_allclose(got.reshape(3, -1).mean(1, np.float64), given.mean((1, 2), np.float64), rtol=1e-6)
    np.testing.assert_array_equal(got[:16], given[0])


def test_weights_given_stay_as_they_were():
    given, weights = embeddings(1), np.full((1, 16), 2, np.float32)
    before = given.copy()
    apply_weights(given, weights)
    np.testing.assert_array_equal(given, before)


@pytest.mark.parametrize("weight", [0, -1, 1e-3])
def test_weights_that_cancel_each_other_out_are_refused(weight):
    with pytest.raises(UsageError, match="cancel each other out"):
        apply_weights(embeddings(1), np.full((1, 16), weight, np.float32))
