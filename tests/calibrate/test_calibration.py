"""A calibration counts the samples of the real loop, and is the same whether it was interrupted, resumed or merged."""

import json
from collections import defaultdict
from dataclasses import asdict

import numpy as np
import pytest

from trtdiff.calibrate.cache import read_cache, require_same_model, statistics_of, write_cache
from trtdiff.calibrate.calibration import Calibration, calibrate_export
from trtdiff.calibrate.merge import merge
from trtdiff.calibrate.opened import Opened
from trtdiff.calibrate.settings import calibration_settings, calibration_spec
from trtdiff.errors import ArtefactError, NonFiniteError, UsageError
from trtdiff.export.read import read_export
from trtdiff.manifest import key_of

pytest.importorskip("torch")


@pytest.fixture
def begin(toy_export, few, tmp_path):
    """`begin(start, save, samples=…)` gives a calibration in a folder of its own."""

    def make(start=None, save=lambda cache: None, work="work", **given):
        settings = calibration_settings(read_export(toy_export), {**few, **given})
        return Calibration(toy_export, settings, tmp_path / work, start=start, save=save)

    return make


@pytest.fixture(scope="module")
def whole(toy_export, few, tmp_path_factory):
    """A finished calibration."""
    settings = calibration_settings(read_export(toy_export), few)
    return Calibration(toy_export, settings, tmp_path_factory.mktemp("whole")).run()


def test_statistics_are_those_of_the_samples_alone(begin, toy, monkeypatch):
    """12 of 16 steps count, both branches of each: what was counted is what numpy makes of their inputs."""
    counted, waiting = defaultdict(list), []
    run, count, discard = Opened.run, Opened.count, Opened.discard

    def seen_run(self, feeds):
        waiting.append({name: array.copy() for name, array in feeds.items()})
        return run(self, feeds)

    def seen_count(self, band=0):
        counted[self.component, band] += waiting
        waiting.clear()
        count(self, band)

    def seen_discard(self):
        waiting.clear()
        discard(self)

    for name, function in (("run", seen_run), ("count", seen_count), ("discard", seen_discard)):
        monkeypatch.setattr(Opened, name, function)
    cache = begin(samples=12, method="max", sensitivity=0).run()
    assert [len(counted["denoiser", band]) for band in range(4)] == [6] * 4
    assert cache.components["denoiser"].rows == 24
    for name, statistics in statistics_of(cache, "denoiser").items():
        for band in range(4):
            arrays = [toy.network(feeds)[name] for feeds in counted["denoiser", band]]
            assert statistics.amax[band] == pytest.approx(max(np.abs(one).max() for one in arrays), rel=1e-4)
            assert statistics.squares[band] == pytest.approx(sum(np.sum(one**2) for one in arrays), rel=1e-4)
            assert statistics.elements[band] == sum(one.size for one in arrays)
    timesteps = [sorted({float(one["timestep"][0]) for one in counted["denoiser", band]}) for band in range(4)]
    assert all(250 * band <= t < 250 * (band + 1) for band, of in enumerate(timesteps) for t in of)


def test_the_loop_is_that_of_the_runtime(begin, toy, tmp_path):
    """The last latent is what the sampler's table makes of the network in float64."""
    from trtdiff.noise import TorchStream
    from trtdiff.sampler import run_loop

    calibration = begin(samples=8, method="max", sensitivity=0)
    calibration.run()
    recording, table = calibration._loop._recording, calibration._table

    def predict(sample, timestep, call):
        branches = [
            toy.network({"sample": sample, "timestep": np.full(1, timestep), **states}) for states in conditions
        ]
        return -2 * branches[1]["prediction"] + 3 * branches[0]["prediction"]

    texts = calibration._loop.texts
    conditions = [recording.get(f"text-{texts.index(text)}") for text in (calibration._loop.pictures[0], "x")]
    noise = TorchStream(0).randn((1, 4, 8, 8)).astype(np.float64)
    expected = run_loop(table, predict, noise)
    np.testing.assert_allclose(recording.get("latent-0")["latent"], expected, rtol=1e-3, atol=1e-3)


def test_every_pass_of_every_component_is_done(whole):
    (run,) = whole.runs
    assert run.complete
    assert run.bands == (2, 2, 2, 2)
    assert run.done["range"] == {"text_encoder": 2, "denoiser": 8, "vae_decoder": 1, "vae_encoder": 1}
    assert run.done["noise float8"]["denoiser"] == 4
    assert [(picture.seed, picture.prompt) for picture in run.pictures] == [(0, "bc")]
    assert set(whole.components["denoiser"].noise) == {"int8", "float8"}
    assert len(whole.components["denoiser"].noise["int8"]) == 6  # attention is not computed in int8


def test_the_same_settings_give_the_same_bytes(toy_export, few, tmp_path):
    settings = asdict(calibration_settings(read_export(toy_export), few))
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        ticks = []
        calibrate_export(export=str(toy_export), out=str(tmp_path / name), settings=settings,
                         progress=lambda done, total, ticks=ticks: ticks.append((done, total)))  # fmt: skip
        made.append((tmp_path / name / "calibration.json").read_bytes())
        assert [file.name for file in (tmp_path / name).iterdir()] == ["calibration.json"]
        assert ticks == sorted(ticks)
        assert ticks[-1][0] == pytest.approx(ticks[-1][1], abs=1)
    assert made[0] == made[1]


def test_a_spec_covers_the_settings(toy_export, few):
    export = read_export(toy_export)
    keys = {
        key_of(calibration_spec(export, {**few, **more}))
        for more in ({}, {"samples": 12}, {"bands": 2}, {"method": "max"}, {"formats": ["int8"]}, {"seed": 1})
    }
    assert len(keys) == 6


@pytest.mark.parametrize("at", [3, 14, 19, 26, 33, 40])
def test_an_interrupted_calibration_goes_on_to_the_same_bytes(begin, whole, monkeypatch, tmp_path, at):
    """Ctrl-C early, in the loop, in the second pass, the third, and near the end."""
    kept, run, executions = [], Opened.run, iter(range(1, 1000))

    def interrupted(self, feeds):
        if next(executions) == at:
            raise KeyboardInterrupt
        return run(self, feeds)

    with monkeypatch.context() as patch:
        patch.setattr(Opened, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin(save=kept.append).run()
    write_cache(tmp_path / "half.json", kept[-1])
    half = read_cache(tmp_path / "half.json")
    assert not half.complete
    counted = []
    with monkeypatch.context() as patch:
        patch.setattr(Opened, "run", lambda self, feeds: counted.append(1) or run(self, feeds))
        done = begin(start=half).run()
    assert done == whole
    assert len(counted) <= 47 - at + 3  # nothing that was counted is executed again


def test_what_is_interrupted_before_anything_was_seen_is_not_kept(begin, monkeypatch):
    def interrupted(self, feeds):
        raise KeyboardInterrupt

    kept = []
    monkeypatch.setattr(Opened, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        begin(save=kept.append).run()
    assert kept == []


def test_without_the_recording_a_calibration_goes_on_all_the_same(begin, whole):
    kept = []
    begin(save=kept.append, method="max", sensitivity=0).run()
    done = begin(start=kept[0], work="another place").run()
    for name, component in whole.components.items():
        assert done.components[name] == component  # and what was counted is not counted again


def test_what_is_asked_for_later_is_added(begin, whole):
    first = begin(method="max", sensitivity=0, formats=["int8"]).run()
    assert all(not seen.errors for seen in statistics_of(first, "denoiser").values())
    second = begin(start=first, method="mse", sensitivity=0, formats=["int8"]).run()
    assert {kind for seen in statistics_of(second, "denoiser").values() for kind in seen.errors} == {"int8"}
    third = begin(start=second, method="percentile").run()
    assert third.method == "percentile"
    assert any(seen.beyond for seen in statistics_of(third, "denoiser").values())
    last = begin(start=third).run()
    assert last.method == "mse"
    assert last.components["denoiser"].noise == whole.components["denoiser"].noise
    assert begin(start=last).complete


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"prompts": ["other"]}, "prompts"),
        ({"negative": "y"}, "negative"),
        ({"steps": 9}, "steps"),
        ({"guidance": 2.0}, "guidance"),
        ({"bands": 2}, "bands"),
        ({"samples": 12}, "samples"),
        ({"seed": 3}, "pictures[0].seed"),
    ],
)
def test_going_on_with_something_else_names_the_field(begin, whole, given, field):
    with pytest.raises(ArtefactError) as caught:
        begin(start=whole, **given)
    assert field in caught.value.where
    assert "--force" in caught.value.hint


def test_a_cache_of_another_model_names_the_field(whole, toy_maker, tmp_path):
    other = toy_maker(tmp_path / "toy", {
        "kernel": np.zeros((8, 4, 3, 3), np.float32), "last": np.zeros((4, 8, 1, 1), np.float32),
        **{name: np.zeros((8, width), np.float32) for name, width in (("wq", 8), ("wk", 16), ("wv", 16), ("wo", 8))},
    })  # fmt: skip
    with pytest.raises(ArtefactError, match=r"of another model: graphs\.denoiser is [0-9a-f]{12}") as caught:
        require_same_model(whole, read_export(other))
    assert caught.value.where == "calibration cache: graphs.denoiser"
    assert caught.value.exit_code == 4


def test_a_name_alone_makes_no_other_model(whole, toy_export):
    export = read_export(toy_export)
    about = json.loads((toy_export / "export.json").read_text())
    assert about["name"] == "toy"
    require_same_model(whole, type(export)(**{**vars(export), "name": "renamed"}))


# --- merging ---------------------------------------------------------------------------------------------------------


def close(one, other):
    """Whether two components hold the same numbers, to the digits that are written."""

    def plain(value):
        if isinstance(value, dict):
            return {name: plain(item) for name, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    def walk(a, b):
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for name in a:
                walk(a[name], b[name])
        elif isinstance(a, list):
            assert len(a) == len(b)
            for pair in zip(a, b, strict=True):
                walk(*pair)
        elif isinstance(a, float):
            assert a == pytest.approx(b, rel=1e-6)
        else:
            assert a == b

    walk(plain(asdict(one)), plain(asdict(other)))


def test_two_calibrations_merge_into_what_one_of_both_gives(begin):
    """Every step of one picture each; at clips that one of them did not try, errors are worked out (test_merge)."""
    given = {"prompts": ["ab"], "sensitivity": 0}
    both = begin(samples=16, **given).run()
    one, two = (begin(samples=8, seed=seed, work=str(seed), **given).run() for seed in (0, 1))
    merged, remarks = merge(one, two)
    assert remarks == ()
    assert merged.complete
    assert [run.pictures[0].seed for run in merged.runs] == [0, 1]
    for seen in (both, merged):
        errors = [one.errors for one in statistics_of(seen, "denoiser").values() if one.errors]
        assert len(errors) == 8
    mine, theirs = statistics_of(merged, "denoiser"), statistics_of(both, "denoiser")
    for name, statistics in theirs.items():
        close(
            type(statistics)(**{**vars(mine[name]), "errors": {}}),
            type(statistics)(**{**vars(statistics), "errors": {}}),
        )
        for kind, errors in mine[name].errors.items():
            assert errors.keys() == statistics.errors[kind].keys()
            tried = [statistics_of(run, "denoiser")[name].errors[kind] for run in (one, two)]
            for index in errors:
                measured = all(index in of for of in tried)
                assert errors[index] == pytest.approx(statistics.errors[kind][index], rel=1e-4 if measured else 0.05)
    assert merged.components["denoiser"].rows == both.components["denoiser"].rows == 32
    close(merge(two, one)[0].components["denoiser"], merged.components["denoiser"])


def test_noise_is_merged_where_clips_were_chosen_alike(begin, whole):
    two = begin(seed=5, work="5").run()
    merged, _ = merge(whole, two)
    layer = "blocks.drawn/Conv"
    mine, theirs, sum_ = (cache.components["denoiser"].noise["int8"][layer] for cache in (whole, two, merged))
    assert sum_.noise == pytest.approx(mine.noise + theirs.noise, rel=1e-6)
    assert sum_.signal == pytest.approx(mine.signal + theirs.signal, rel=1e-6)
    other = begin(seed=5, work="6", method="max").run()
    merged, remarks = merge(whole, other)
    assert merged.components["denoiser"].noise == {}
    assert merged.method == ""
    assert any("noise of layers was left out" in remark for remark in remarks)
    assert any("'error int8'" in remark and "--resume" in remark for remark in remarks)
    assert not any(seen.errors for seen in statistics_of(merged, "denoiser").values())


def test_merging_what_does_not_belong_together_is_refused(begin, whole):
    with pytest.raises(ArtefactError, match="both calibrations saw prompt 'bc' with seed 0"):
        merge(whole, whole)
    with pytest.raises(ArtefactError, match=r"other data: guidance is 3\.0 there, 2\.0 here"):
        merge(whole, begin(guidance=2.0, method="max", sensitivity=0).run())
    with pytest.raises(ArtefactError, match="not finished"):
        merge(whole, begin(seed=7).cache())
    merged, _ = merge(whole, begin(seed=7, work="7").run())
    with pytest.raises(ArtefactError, match="merged from several"):
        begin(start=merged)


# --- what goes wrong -------------------------------------------------------------------------------------------------


def test_what_is_not_finite_names_module_prompt_seed_and_step(toy_maker, few, toy, tmp_path):
    """One weight is so large that the convolution overflows; everything before was right."""
    weights = {**toy.weights, "last": np.full((4, 8, 1, 1), 1e38, np.float32)}
    export = toy_maker(tmp_path / "toy", weights)
    settings = calibration_settings(read_export(export), {**few, "seed": 4})
    with pytest.raises(NonFiniteError) as caught:
        Calibration(export, settings, tmp_path / "work").run()
    assert caught.value.where.startswith(
        "denoiser: first in blocks.done (node blocks.done/Conv), prompt 'bc', seed 4, "
    )
    assert "step 1 of 8, timestep 876, negative branch" in caught.value.where


def test_a_step_count_that_misses_a_band_is_refused_with_those_that_do_not(begin):
    with pytest.raises(
        UsageError, match="with 2 steps, no step falls into the timesteps 250 to 499, 750 to 999"
    ) as caught:
        begin(steps=2)
    assert "--steps 4 … 100" in caught.value.hint


@pytest.mark.parametrize(
    "given", [{"samples": 0}, {"bands": 0}, {"formats": []}, {"method": "best"}, {"sensitivity": -1}]
)
def test_settings_that_cannot_be_meant_are_refused(begin, given):
    with pytest.raises(UsageError):
        begin(**given)
