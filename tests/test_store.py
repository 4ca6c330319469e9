"""The store: keys cover everything, entries are whole or absent, damage is found and named."""

import errno
import json
import os
import resource
import subprocess
import sys
import textwrap
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtdiff.digest import file_digest, remember
from trtdiff.errors import ArtefactError, BuildError, StorageError
from trtdiff.files import copy_file
from trtdiff.manifest import EngineSpec, Made, as_json, differences, key_of, spec_json
from trtdiff.store import Store
from trtdiff.types import TensorSpec

SPEC = EngineSpec(
    component="denoiser",
    graph="a" * 64,
    weights={"weights/unet.safetensors": "b" * 64},
    profile={"batch": "1:1:4", "height": "256:512:1024"},
    recipe={"name": "fp32", "passes": ["one", "two"]},
    islands={},
    ranges="",
    calibration="",
    passes=("one", "two", "three"),
    options={"level": 3},
    backend="onnxruntime",
    backend_version="1.32.0",
    device="cpu",
    device_details={},
    trtdiff="0.1.0",
    trtdiff_code="c" * 64,
    libraries={"onnx-ir": "1.1.0"},
)
MADE = Made((TensorSpec("sample", "float32", ("batch", 4)),), (), {"layers": 3}, 1.5, 1 << 20)


def fill(folder):
    (folder / "engine").mkdir()
    (folder / "engine/model.onnx").write_bytes(b"graph")
    (folder / "engine/weights.safetensors").write_bytes(bytes(range(256)) * 64)
    return MADE


def never(folder):
    raise AssertionError("this is built already")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "engines")


@pytest.fixture
def entry(store):
    return store.put(SPEC, fill)


def names(path):
    return sorted(file.name for file in path.iterdir() if file.name != ".locks")


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [field.name for field in fields(EngineSpec)])
def test_every_field_of_a_spec_changes_the_key(name):
    old = getattr(SPEC, name)
    new = (
        {**old, "new": "1"}
        if isinstance(old, dict)
        else (*old, "x")
        if isinstance(old, tuple)
        else old + 1
        if isinstance(old, int)
        else old + "x"
    )
    changed = replace(SPEC, **{name: new})
    assert key_of(changed) != key_of(SPEC)
    assert [path.partition(".")[0] for path, *_ in differences(spec_json(SPEC), spec_json(changed))] == [name]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
specs = st.dictionaries(st.text(min_size=1), json_values, max_size=5)


@given(specs)
def test_a_key_survives_json_and_the_order_of_fields(spec):
    again = json.loads(json.dumps(spec))
    turned = dict(reversed(again.items()))
    assert key_of(spec) == key_of(again) == key_of(turned)
    assert list(differences(as_json(spec), as_json(turned))) == []


@given(specs, specs)
def test_keys_are_equal_exactly_where_specs_do_not_differ(one, other):
    one, other = as_json(one), as_json(other)
    assert (key_of(one) == key_of(other)) == (list(differences(one, other)) == [])


def test_none_is_a_value_and_absence_is_not():
    assert list(differences({"x": None}, {})) == [("x", None, "(absent)")]


def test_a_difference_names_the_nested_field():
    changed = replace(
        SPEC, weights={"weights/unet.safetensors": "d" * 64}, recipe={**SPEC.recipe, "passes": ["one", "three"]}
    )
    assert list(differences(spec_json(SPEC), spec_json(changed))) == [
        ("weights.weights/unet.safetensors", "b" * 64, "d" * 64),
        ("recipe.passes[1]", "two", "three"),
    ]
    absent = replace(SPEC, options={})
    assert list(differences(spec_json(SPEC), spec_json(absent))) == [("options.level", 3, "(absent)")]


# --- put and get -----------------------------------------------------------------------------------------------------


def test_nothing_there(store):
    assert store.get(key_of(SPEC)) is None


def test_an_entry_is_found_again_with_all_it_says(store, entry):
    found = store.get(key_of(SPEC))
    assert found == entry
    assert found.manifest.spec == spec_json(SPEC)
    assert found.manifest.inputs == MADE.inputs
    assert (found.manifest.realised, found.manifest.seconds, found.manifest.peak_memory) == (
        {"layers": 3},
        1.5,
        1 << 20,
    )
    assert set(found.manifest.files) == {"engine/model.onnx", "engine/weights.safetensors"}
    assert found.path == store.path / key_of(SPEC)
    assert names(store.path) == [key_of(SPEC)]


def test_what_is_there_is_not_made_again(store, entry):
    assert store.put(SPEC, never) == entry


def test_force_makes_it_again(store, entry):
    calls = []
    store.put(SPEC, lambda folder: calls.append(1) or fill(folder), force=True)
    assert calls == [1]


def test_a_copy_is_whole(entry, tmp_path):
    entry.copy_to(tmp_path / "bundle")
    moved = Store(tmp_path)
    (tmp_path / "bundle").rename(tmp_path / entry.manifest.key)
    assert moved.get(entry.manifest.key, fresh=True).manifest == entry.manifest


# --- damage ----------------------------------------------------------------------------------------------------------


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    with path.open("r+b") as file:
        file.write(data)


def test_a_flipped_bit_is_found_and_its_file_named(store, entry):
    time.sleep(0.01)
    flip(entry.path / "engine/weights.safetensors")
    with pytest.raises(ArtefactError, match=r"engine/weights.safetensors is damaged") as caught:
        store.get(entry.manifest.key)
    assert "build again" in caught.value.hint
    assert caught.value.exit_code == 4


def test_a_flipped_bit_that_changed_no_time_is_found_by_reading_everything(store, entry):
    path = entry.path / "engine/weights.safetensors"
    known = file_digest(path)
    flip(path)
    remember(path, known)  # a failing disk changes bytes, and no time
    assert store.get(entry.manifest.key) is not None
    with pytest.raises(ArtefactError, match=r"engine/weights.safetensors is damaged"):
        store.get(entry.manifest.key, fresh=True)


DAMAGE = {
    "has 1000 bytes, 16384": lambda folder: os.truncate(folder / "engine/weights.safetensors", 1000),
    "engine/model.onnx cannot be read: No such file": lambda folder: (folder / "engine/model.onnx").unlink(),
    "has no manifest.json": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is damaged": lambda folder: os.truncate(folder / "manifest.json", 50),
    "the manifest was edited": lambda folder: edit(folder, "1.32.0", "1.33.0"),
    "has schema 99": lambda folder: edit(folder, '"schema": 1', '"schema": 99'),
    "lies outside": lambda folder: edit(folder, "engine/model.onnx", "../model.onnx"),
}


def edit(folder, old, new):
    text = (folder / "manifest.json").read_text()
    assert old in text
    (folder / "manifest.json").write_text(text.replace(old, new))


@pytest.mark.parametrize("says", DAMAGE)
def test_damage_is_named_and_the_entry_is_made_again_not_silently(store, entry, says):
    DAMAGE[says](entry.path)
    with pytest.raises(ArtefactError, match=says):
        store.get(entry.manifest.key)
    warnings = []
    store.put(SPEC, fill, discarding=warnings.append)
    assert len(warnings) == 1
    assert says in warnings[0]
    assert store.get(entry.manifest.key, fresh=True) is not None


def test_an_entry_under_another_key_is_refused(store, entry):
    entry.path.rename(store.path / ("0" * 32))
    with pytest.raises(ArtefactError, match="renamed"):
        store.get("0" * 32)


# --- whole or absent -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [BuildError("no kernel"), KeyboardInterrupt(), SystemExit(1)])
def test_a_failed_build_leaves_nothing(store, error):
    def make(folder):
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        store.put(SPEC, make)
    assert names(store.path) == []
    assert store.put(SPEC, fill)


def test_a_failed_rebuild_leaves_what_was_there(store, entry):
    def make(folder):
        raise BuildError("no kernel")

    with pytest.raises(BuildError):
        store.put(SPEC, make, force=True)
    assert store.get(entry.manifest.key, fresh=True) == entry
    assert names(store.path) == [entry.manifest.key]


def test_a_full_disk_is_a_storage_error_and_leaves_nothing(store):
    def make(folder):
        fill(folder)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (10_000, hard)
        )  # the kernel refuses the write, as it does on a full disk
        try:
            copy_file(folder / "engine/weights.safetensors", folder / "copy")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.raises(StorageError, match="cannot write") as caught:
        store.put(SPEC, make)
    assert "free some space" in caught.value.hint
    assert names(store.path) == []


def test_no_space_while_syncing_is_a_storage_error(store, monkeypatch):
    def refuse(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("trtdiff.files.os.fsync", refuse)
    with pytest.raises(StorageError, match="No space left"):
        store.put(SPEC, fill)
    assert names(store.path) == []


def test_a_store_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match="cannot write engines: Not a directory"):
        Store(tmp_path / "file/engines").put(SPEC, fill)


# --- two processes ---------------------------------------------------------------------------------------------------

PROGRAM = """
    import os, sys, time
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_store import SPEC, fill, Store
    folder = Path({folder!r})

    def make(place):
        with (folder / "built").open("a") as log:
            log.write(f"{{os.getpid()}}\\n")
        fill(place)
        if {die}:
            os.kill(os.getpid(), 9)
        time.sleep(1.5)
        return fill.__globals__["MADE"]

    entry = Store(folder / "engines").put(SPEC, make, waiting=lambda text: print(text, flush=True))
    print(entry.manifest.key)
"""


def start(folder, *, die=False):
    program = textwrap.dedent(PROGRAM.format(folder=str(folder), tests=str(Path(__file__).parent), die=die))
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_two_builds_of_one_key_build_once(tmp_path):
    both = [start(tmp_path), start(tmp_path)]
    said = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(key_of(SPEC) in text for text in said)
    assert len((tmp_path / "built").read_text().splitlines()) == 1
    assert sum("waiting for it" in text for text in said) == 1


def test_a_killed_build_blocks_nobody_and_is_cleaned_up(tmp_path):
    killed = start(tmp_path, die=True)
    assert killed.wait(60) == -9
    store = Store(tmp_path / "engines")
    assert names(store.path) == [f".{key_of(SPEC)}.part"]
    assert store.get(key_of(SPEC)) is None
    store.put(SPEC, fill)
    assert names(store.path) == [key_of(SPEC)]


def test_a_build_killed_between_its_two_renames_loses_nothing(store, entry):
    old = entry.path.with_name(f".{entry.manifest.key}.old")
    entry.path.rename(old)
    with pytest.raises(BuildError):
        store.put(SPEC, lambda folder: (_ for _ in ()).throw(BuildError("no kernel")))
    assert store.get(entry.manifest.key) is not None
