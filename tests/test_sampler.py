"""The runtime side of samplers: tables, the latent log, batches, strength, and the file; no torch, no diffusers."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from trtdiff.errors import ArtefactError, UsageError
from trtdiff.export.sampler_pages import SamplerPages, write_book
from trtdiff.export.scheduler_rows import Run
from trtdiff.latent_log import LAP, LatentLog, slots_for
from trtdiff.sampler import SamplerTable, run_loop, stack_tables, start_of_fraction, start_of_strength
from trtdiff.sampler_book import SamplerBook, ranges

SHAPE = (1, 2, 3, 4)


def make_table(window, calls, *, seed=0, start=None, stochastic=True):
    """Make a random table: every coefficient that may be non-zero is, but small, so that rounding does not grow."""
    random = np.random.default_rng(seed)
    coefficients = random.uniform(-0.5, 0.5, (calls + 1, 3 * window)) / window
    for row in range(calls + 1):
        entries = np.repeat(np.arange(row - window, row), 3)
        coefficients[row, entries < -1] = 0
        coefficients[row, (entries == -1) & (np.tile([0, 1, 2], window) == 1)] = 0
    draws = np.full(calls, stochastic)
    if not stochastic:
        coefficients[1:, 2::3] = 0
    return SamplerTable(
        name="random", digest="", steps=calls, start=start, coefficients=coefficients,
        scales=random.uniform(0.1, 1, calls), timesteps=np.arange(calls, 0, -1, dtype=np.float32), draws=draws,
        residual=0.0,
    )  # fmt: skip


def model(latent, timestep, _call):
    return np.tanh(latent) + 0.01 * timestep


def with_known(table, seed=0):
    """Give the table random rows for a mask."""
    known = np.random.default_rng(seed).uniform(-1, 1, (table.calls + 1, 2))
    known[0], known[-1] = table.coefficients[0, [-3, -1]], (1, 0)
    return replace(table, known=known)


def plain_loop(table, noise, clean, noises):
    """The recurrence as it is written in the module's docstring, over a dictionary that forgets nothing."""
    zero = np.zeros_like(noise)
    log = {(-1, 0): clean, (-1, 1): zero, (-1, 2): noise}
    for i in range(table.calls + 1):
        x = zero.copy()
        for k in range(3 * table.window):
            x += table.coefficients[i, k] * log.get((i - table.window + k // 3, k % 3), zero)
        if i == table.calls:
            return x
        log |= {(i, 0): x, (i, 1): model(table.scales[i] * x, float(table.timesteps[i]), i), (i, 2): noises[i]}
    raise AssertionError


@settings(max_examples=60, deadline=None)
@given(window=st.integers(1, 6), calls=st.integers(1, 3 * LAP), seed=st.integers(0, 99))
def test_the_log_computes_the_recurrence_over_any_number_of_laps(window, calls, seed):
    random = np.random.default_rng(seed)
    table = make_table(window, calls, seed=seed, start=0)
    noise, clean, *noises = random.standard_normal((calls + 2, *SHAPE))
    draws = iter(noises)
    got = run_loop(table, model, noise, clean=clean, draw=lambda: next(draws))
    np.testing.assert_allclose(got, plain_loop(table, noise, clean, noises), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("calls", [1, 2, 20])
def test_a_mask_replaces_every_latent_that_the_model_sees(calls):
    table = with_known(make_table(2, calls, start=0, stochastic=False))
    noise, clean = np.random.default_rng(1).standard_normal((2, *SHAPE))
    mask = np.arange(12).reshape(1, 1, 3, 4) % 2
    kept = np.broadcast_to(mask == 0, SHAPE)
    seen = []

    def watching(latent, timestep, call):
        seen.append(latent / table.scales[call])
        return model(latent, timestep, call)

    got = run_loop(table, watching, noise, clean=clean, mask=mask)
    for latent, (c, n) in zip([*seen, got], table.known, strict=True):
        np.testing.assert_allclose(latent[kept], (c * clean + n * noise)[kept], rtol=1e-12, atol=1e-12)
    pointwise = run_loop(table, model, noise, clean=clean)
    np.testing.assert_allclose(got[~kept], pointwise[~kept], rtol=1e-12, atol=1e-12)
    for without in ({"table": table}, {"table": replace(table, known=None), "clean": clean}):
        with pytest.raises(UsageError, match="part of a picture"):
            run_loop(**without, predict=model, noise=noise, mask=mask)


@pytest.mark.parametrize("window", [1, 2, 4, 20])
@pytest.mark.parametrize("extra", [0, 3, 30])
def test_outputs_lie_outside_the_window_and_the_window_moves_on_unchanged(window, extra):
    array = np.full((6 * window + extra, *SHAPE), np.nan, np.float32)
    log = LatentLog(array, window)
    log.start(np.ones(SHAPE, np.float32))
    assert np.isfinite(array).all()
    for call in range(100):
        assert log.window.base is array or log.window.base is array.base
        assert np.shares_memory(log.window, array)
        assert np.array_equal(log.window, array[log.offset : log.offset + 3 * window])
        for slot, value in ((log.latent, 3 * call + 1), (log.prediction, 3 * call + 2), (log.noise, 3 * call + 3)):
            assert not np.shares_memory(slot, log.window)
            slot[...] = value
        log.advance()
        newest = np.arange(3 * call + 3, 0, -1)[: 3 * window][::-1]
        assert np.array_equal(log.window[-len(newest) :, 0, 0, 0, 0], newest)


def test_a_log_allocates_no_arrays_in_its_loop():
    import tracemalloc

    log = LatentLog(np.empty((slots_for(3), 1, 4, 64, 64), np.float32), 3)
    log.start(np.zeros((1, 4, 64, 64), np.float32))

    def lap():
        for _ in range(50):
            _ = log.window, log.latent, log.prediction, log.noise
            log.advance()

    lap()
    tracemalloc.start()
    lap()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096  # one slot is 64 KiB


@pytest.mark.parametrize(("slots", "window"), [(5, 1), (3, 1), (15, 3), (19, 3), (6, 0)])
def test_a_log_that_is_too_small_says_what_to_give(slots, window):
    with pytest.raises(UsageError, match="latent log"):
        LatentLog(np.zeros((slots, *SHAPE), np.float32), window)


def test_images_with_different_tables_share_a_batch():
    tables = [make_table(1, 3, seed=1, stochastic=False), make_table(4, 9, seed=2), make_table(2, 40, seed=3)]
    batch = stack_tables(tables)
    assert batch.coefficients.shape == (41, 12, 3)
    assert batch.coefficients.dtype == batch.scales.dtype == batch.timesteps.dtype == np.float32
    assert batch.known is None
    masked = stack_tables([with_known(table) for table in tables]).known
    assert masked.shape == (41, 2, 3)
    assert masked.dtype == np.float32
    assert np.array_equal(masked[:10, :, 1], with_known(tables[1]).known.astype(np.float32))
    assert (masked[3:, :, 0] == [1, 0]).all()
    random = np.random.default_rng(0)
    noises = random.standard_normal((3, 41, *SHAPE[1:])).astype(np.float32)
    log = LatentLog(np.empty((slots_for(batch.window), 3, *SHAPE[1:]), np.float32), batch.window)
    log.start(noises[:, 0])
    for call in range(batch.calls):
        log.latent[...] = np.einsum("kb,kb...->b...", batch.coefficients[call], log.window)
        for image in range(3):
            log.prediction[image] = model(
                batch.scales[call, image] * log.latent[image], batch.timesteps[call, image], call
            )
            if batch.draws[call, image]:
                log.noise[image] = noises[image, call + 1]
        log.advance()
    final = np.einsum("kb,kb...->b...", batch.coefficients[-1], log.window)
    for image, table in enumerate(tables):
        draws = iter(noises[image, 1:, None])
        alone = run_loop(table, model, noises[image, :1], draw=lambda draws=draws: next(draws))
        np.testing.assert_allclose(final[image], alone[0], rtol=2e-5, atol=2e-5)


def test_an_image_may_join_while_the_others_are_under_way():
    first, late = make_table(2, 30, seed=4, stochastic=False), make_table(3, 12, seed=5, stochastic=False, start=2)
    noises, clean = np.random.default_rng(1).standard_normal((2, *SHAPE[1:])), np.ones(SHAPE[1:])
    log = LatentLog(np.empty((slots_for(3), 2, *SHAPE[1:])), 3)
    log.start(np.stack([noises[0], np.full(SHAPE[1:], 7.0)]))
    for call in range(30):
        if call == 15:
            log.join(1, noises[1], clean)
        for image, (table, at) in enumerate(((first, call), (late, call - 15))):
            if 0 <= at < table.calls:
                row = table.widened(3).coefficients[at]
                log.latent[image] = np.einsum("k,k...->...", row, log.window[:, image])
                log.prediction[image] = model(table.scales[at] * log.latent[image], float(table.timesteps[at]), at)
            elif at == table.calls:
                result = np.einsum("k,k...->...", table.coefficients[-1], log.window[:, image])
        log.advance()
    expected = run_loop(late, model, noises[1:], clean=clean[None])
    np.testing.assert_allclose(result, expected[0], rtol=1e-12, atol=1e-12)


def test_a_batch_can_be_given_a_longer_window_but_not_a_shorter_one():
    table = make_table(2, 5)
    assert stack_tables([table], window=4).window == 4
    assert not stack_tables([table], window=4).coefficients[:, :6].any()
    with pytest.raises(UsageError, match="looks back 2"):
        stack_tables([table], window=1)
    with pytest.raises(UsageError):
        stack_tables([])


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"coefficients": np.full((3, 3), np.nan)}, "finite"),
        ({"coefficients": np.ones((3, 4))}, "shapes"),
        ({"scales": np.ones(3)}, "shapes"),
        ({"coefficients": np.ones((3, 6))}, "before the start"),
        ({"coefficients": np.ones((3, 3))}, "pred_"),
        ({"coefficients": np.array([[0, 0, 1], [1, 1, 1], [1, 1, 0.0]])}, "not drawn"),
        ({"scales": np.array([1.0, 0.0])}, "scale"),
        ({"known": np.zeros((2, 2))}, "mask"),
        ({"known": np.array([[0, 1], [np.nan, 0], [1, 0]])}, "mask"),
        ({"known": np.array([[1, 1], [0, 0], [1, 0]])}, "x_0"),
        ({"known": np.array([[0, 1], [0, 0], [1, 1]])}, "clean"),
        ({"coefficients": np.ones((1, 3)), "scales": np.ones(0), "timesteps": np.ones(0), "draws": np.ones(0)}, "call"),
    ],
)
def test_what_is_not_a_table_cannot_be_made(change, fault):
    good = {
        "coefficients": np.array([[0, 0, 1], [1, 1, 0], [1, 1, 0.0]]), "scales": np.ones(2),
        "timesteps": np.ones(2, np.float32), "draws": np.zeros(2, bool),
    }  # fmt: skip
    common = {"name": "x", "digest": "", "steps": 2, "start": None, "residual": 0.0}
    assert SamplerTable(**common, **good).calls == 2
    with pytest.raises(UsageError, match=fault):
        SamplerTable(**common, **{**good, **change})


@pytest.mark.parametrize("strength", [0, 0.019, 0.02, 0.3, 1 / 3, 0.5, 0.75, 0.999, 1])
@pytest.mark.parametrize("steps", [1, 2, 3, 20, 50, 99])
def test_strength_is_read_as_the_image_to_image_pipeline_reads_it(steps, strength):
    from types import SimpleNamespace

    import torch
    from diffusers import StableDiffusionImg2ImgPipeline

    pipeline = SimpleNamespace(scheduler=SimpleNamespace(timesteps=torch.arange(steps), order=1))
    timesteps, left = StableDiffusionImg2ImgPipeline.get_timesteps(pipeline, steps, strength, "cpu")
    if left == 0:
        with pytest.raises(UsageError, match="no step"):
            start_of_strength(steps, strength)
    else:
        assert start_of_strength(steps, strength) == steps - left == int(timesteps[0])


@pytest.mark.parametrize(("steps", "strength"), [(0, 0.5), (-1, 1), (20, -0.1), (20, 1.01), (20, float("nan"))])
def test_steps_and_strengths_that_cannot_be_meant(steps, strength):
    with pytest.raises(UsageError):
        start_of_strength(steps, strength)


@pytest.mark.parametrize("steps", [1, 3, 7, 30, 64, 99])
def test_the_strength_that_the_error_proposes_is_enough(steps):
    with pytest.raises(UsageError) as caught:
        start_of_strength(steps, 0.001)
    proposed = float(caught.value.hint.split()[4].rstrip(","))
    assert start_of_strength(steps, proposed) == steps - 1


def test_a_table_is_cut_by_its_timesteps_and_ends_clean_under_a_mask():
    table = with_known(make_table(3, 4, start=0))  # timesteps 4, 3, 2, 1 of 4
    cut = table.until(0.5, 4)
    assert cut.timesteps.tolist() == [4, 3, 2]  # those of 2 and more
    assert np.array_equal(cut.coefficients, table.coefficients[:4])
    assert np.array_equal(cut.known, [*table.known[:3], (1, 0)])
    assert start_of_fraction(table, 0.5, 4) == 3
    over = table.taken_over()
    assert over.coefficients[0].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0]
    assert np.array_equal(over.coefficients[1:], table.coefficients[1:])
    assert np.array_equal(over.known, [(1, 0), *table.known[1:]])


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda table: table.until(0.0, 4), "leaves one of two models nothing"),
        (lambda table: table.until(float("nan"), 4), "leaves one of two models nothing"),
        (lambda table: start_of_fraction(table, 1.0, 4), "leaves one of two models nothing"),
        (lambda table: table.until(0.1, 1000), "before the fraction 0.1"),
        (lambda table: start_of_fraction(table, 0.9, 4), "after the fraction 0.9"),
        (lambda table: replace(table, order=2).until(0.5, 4), "2 times a step"),
        (lambda table: start_of_fraction(replace(table, order=2), 0.5, 4), "2 times a step"),
        (lambda table: table.taken_over(), "only a table with a start"),
    ],
)
def test_what_cannot_be_cut_or_taken_over(act, says):
    with pytest.raises(UsageError, match=says):
        act(make_table(1, 4))


def ab2_run(calls, first=0, rows=None):
    """Two-step Adams-Bashforth x' = -pred, with an Euler step to warm up: rows known in closed form."""
    run = Run(first, float(first > 0), 2.0, np.arange(calls - first, 0, -1, dtype=float))
    for call in range(first, calls if rows is None else first + rows):
        row = np.zeros(3 * (calls + 1))
        row[3 * call] = 1
        row[3 * call + 1] = -1.0 if call == first else -1.5
        if call > first:
            row[3 * call - 2] = 0.5
        run.rows.append(row)
        run.scales.append(1.0)
        run.draws.append(False)
        if call + 1 < calls:
            run.known.append((call + 1.0, 2.0 - call))
    return run


@pytest.fixture
def book_path(tmp_path):
    pages = SamplerPages("ab2", "AdamsBashforth", {"order": 2}, 2, {5: "no fives"}, order=2)
    for steps in (1, 2, 3, 4, 8):
        pages.add(steps, None, ab2_run(steps))
        for start in range(steps):
            pages.add(steps, start, ab2_run(steps, start, min(3, steps - start)))
    other = SamplerPages("euler", "Euler", {}, 1, {})
    one = Run(0, 0, 1, np.array([1.0]), [np.array([1.0, -1, 0, 0, 0, 0])], [1.0], [False])
    other.add(1, None, one)
    path = tmp_path / "samplers.safetensors"
    write_book(path, [pages, other], {"diffusers": "0"})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    return path


def test_a_book_gives_back_what_was_added(book_path):
    book = SamplerBook.open(book_path)
    assert book.names == ("ab2", "euler")
    assert book.steps("ab2") == (1, 2, 3, 4, 8)
    for steps in book.steps("ab2"):
        for start in (None, *range(steps)):
            table = book.table("ab2", steps, start)
            run = ab2_run(steps, start or 0)
            assert (table.steps, table.start, table.calls, table.window) == (steps, start, steps - (start or 0), 2)
            assert np.array_equal(table.coefficients[1:], run.coefficients(2)[0])
            assert np.array_equal(table.coefficients[0], [0, 0, 0, float((start or 0) > 0), 0, 2])
            assert np.array_equal(table.timesteps, run.timesteps)
            assert np.array_equal(table.known, [(run.clean, run.noise), *run.known, (1, 0)])
            assert table.order == 2
            assert not table.stochastic


def test_rows_that_starts_share_are_stored_once(book_path):
    index, rows = (load_file(book_path)[f"ab2/{name}"] for name in ("index", "rows"))
    owned = {(steps, start): count for steps, start, _, _, _, count, _ in index.tolist()}
    assert owned[8, 0] == 0
    assert owned[8, 3] == 1  # one Euler step to warm up
    assert len(rows) == sum(owned.values())
    assert rows.shape[1] == 3  # x_{i-2} never appears, nor do noises


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (("abs2", 4), "did you mean 'ab2'"),
        (("ab2", 0), "1 … 4, 8"),
        (("ab2", 101), "1 … 4, 8"),
        (("ab2", 5), "no fives"),
        (("ab2", 4, 4), "0 … 3"),
        (("ab2", 4, -1), "0 … 3"),
    ],
)
def test_a_request_that_the_book_cannot_meet_says_what_it_can(book_path, ask, says):
    with pytest.raises(UsageError, match=says):
        SamplerBook.open(book_path).table(*ask)


def test_ranges():
    assert ranges([1, 2, 3, 5, 7, 8]) == "1 … 3, 5, 7 … 8"


def test_a_truncated_file_is_an_artefact_error(book_path):
    whole = book_path.read_bytes()
    for size in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        book_path.write_bytes(whole[:size])
        with pytest.raises(ArtefactError, match="sampler file"):
            SamplerBook.open(book_path)
    with pytest.raises(ArtefactError):
        SamplerBook.open(book_path.with_name("missing"))


def test_an_edited_file_is_an_artefact_error(book_path):
    tensors = load_file(book_path)
    from safetensors import safe_open

    about = json.loads(safe_open(book_path, "numpy").metadata()["about"])

    def rewrite(change=None, drop=None, **metadata):
        edited = {name: values for name, values in {**tensors, **(change or {})}.items() if name != drop}
        save_file(edited, book_path, {"about": json.dumps({**about, **metadata})})

    nan, far = tensors["ab2/rows"].copy(), tensors["ab2/index"].copy()
    nan[:] = np.nan
    far[:, 4] = 10**6
    rewrite()
    assert SamplerBook.open(book_path).table("ab2", 4).calls == 4
    for edit in (
        {"drop": "euler/rows"}, {"schema": 1}, {"samplers": [{"name": "ab2"}]}, {"samplers": []}, {"format": 3},
        {"change": {"ab2/rows": nan}}, {"change": {"ab2/index": far}}, {"change": {"ab2/first": far}},
        {"change": {"ab2/draws": np.zeros(3, np.uint8)}}, {"change": {"ab2/known": tensors["ab2/known"][:, :1]}},
        {"change": {"ab2/rows": tensors["ab2/rows"].astype(np.float64)}},
    ):  # fmt: skip
        rewrite(**edit)
        with pytest.raises(ArtefactError):
            SamplerBook.open(book_path).table("ab2", 4)
    book_path.write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    with pytest.raises(ArtefactError):
        SamplerBook.open(book_path)


def test_the_runtime_imports_neither_torch_nor_diffusers():
    code = (
        "import sys, trtdiff.noise, trtdiff.flow, trtdiff.sampler, trtdiff.sampler_book, trtdiff.latent_log;"
        "sys.exit(bool({'torch', 'diffusers', 'onnx', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
