"""The file of a timing cache. The library's side is a double: what is tested is the bookkeeping, not TensorRT."""

import threading

import pytest

from trtdiff.backends.timing_cache import HEADER, Key, keep_times, read_times, use_times, write_times
from trtdiff.errors import ArtefactError, StorageError

L4 = Key("NVIDIA L4", "sm89", "10.13.0.35")
H200 = Key("NVIDIA H200", "sm90", "10.13.0.35")
NEWER = Key("NVIDIA L4", "sm89", "11.4.0.106")


class Times:
    """Words that are joined; the first byte says which library made them."""

    def __init__(self, content):
        self.words = set(content.split())

    def combine(self, other, ignore_mismatch):
        assert ignore_mismatch is False
        self.words |= other.words
        return b"foreign" not in other.words

    def serialize(self):
        return b" ".join(sorted(self.words))


class Config:
    def __init__(self):
        self.set = None

    def create_timing_cache(self, content):
        return Times(content)

    def set_timing_cache(self, cache, ignore_mismatch):
        assert ignore_mismatch is False
        self.set = cache
        return b"foreign" not in cache.words


def measure(path, key, *words):
    config = Config()
    cache = use_times(config, path, key)
    assert config.set is cache
    cache.words |= set(words)
    keep_times(config, cache, path, key)


def test_entries_are_kept_by_gpu_and_version_and_added_to(tmp_path):
    path = tmp_path / "times"
    assert read_times(path) == {}
    measure(path, L4, b"conv")
    measure(path, H200, b"other")
    measure(path, NEWER, b"new")
    measure(path, L4, b"gemm")
    assert read_times(path) == {L4: b"conv gemm", H200: b"other", NEWER: b"new"}


def test_what_another_build_wrote_meanwhile_is_kept(tmp_path):
    path, config = tmp_path / "times", Config()
    slow = use_times(config, path, L4)
    measure(path, L4, b"quick")
    slow.words.add(b"slow")
    keep_times(config, slow, path, L4)
    assert read_times(path) == {L4: b"quick slow"}


def test_builds_at_the_same_time_lose_nothing(tmp_path):
    path = tmp_path / "times"
    words = [b"w%d" % number for number in range(8)]
    threads = [threading.Thread(target=measure, args=(path, L4, word)) for word in words]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read_times(path)[L4].split() == sorted(words)


@pytest.mark.parametrize(
    ("method", "reason"), [("serialize", "does not give what it measured"), ("combine", "does not take")]
)
def test_a_library_that_gives_nothing_leaves_the_file_as_it_is(tmp_path, monkeypatch, method, reason):
    path, config = tmp_path / "times", Config()
    measure(path, L4, b"conv")
    cache = use_times(config, path, L4)
    if method == "combine":
        monkeypatch.setattr(config, "create_timing_cache", lambda content: None)
    else:
        monkeypatch.setattr(cache, "serialize", lambda: None)
    with pytest.raises(ArtefactError, match=reason):
        keep_times(config, cache, path, L4)
    assert read_times(path) == {L4: b"conv"}


def test_a_library_that_does_not_take_its_entry_says_what_is_held(tmp_path):
    path = tmp_path / "times"
    write_times(path, {L4: b"foreign", H200: b"fine"})
    with pytest.raises(ArtefactError, match=r"entry for TensorRT 10\.13\.0\.35 on NVIDIA L4 \(sm89\)") as caught:
        use_times(Config(), path, L4)
    assert "TensorRT 10.13.0.35 on NVIDIA H200 (sm90)" in caught.value.where
    assert "--timing-cache" in caught.value.hint
    assert use_times(Config(), path, H200).words == {b"fine"}


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: b"ptrt" + raw, "no timing cache of trtdiff"),
        (lambda raw: b"", "no timing cache of trtdiff"),
        (lambda raw: raw[:-1], "not what was written"),
        (lambda raw: raw[:-1] + b"x", "not what was written"),
        (lambda raw: raw + b"more", "ends elsewhere"),
        (lambda raw: raw[: len(HEADER) + 10], "damaged"),
        (lambda raw: HEADER, "damaged"),
        (lambda raw: raw.replace(b'"size":4', b'"size":-4'), "damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_and_left_alone(tmp_path, damage, reason):
    path = tmp_path / "times"
    write_times(path, {L4: b"conv"})
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    with pytest.raises(ArtefactError, match=reason) as caught:
        use_times(Config(), path, L4)
    assert str(path) in caught.value.where
    assert path.read_bytes() == damaged


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is_measured(tmp_path):
    (tmp_path / "times").write_text("a file, no folder")
    with pytest.raises(StorageError, match="cannot write"):
        use_times(Config(), tmp_path / "times/cache", L4)
