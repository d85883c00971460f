"""The cache of downloads: its bound, files in use, other processes, crashes."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.platform.client.adapters.sources.cache import DownloadCache
from outrider.platform.core.errors import AdapterError, AdapterSourceError


def fill(size: int):
    return lambda folder: (folder / "file").write_bytes(b"x" * size)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_nothing_is_made_before_it_is_used(tmp_path):
    DownloadCache(str(tmp_path / "cache"))
    assert not list(tmp_path.iterdir())


def test_an_entry_is_filled_once(tmp_path):
    cache = DownloadCache(str(tmp_path / "cache"), 100)
    folder = cache.fetch("a", 10, fill(10))
    assert cache.fetch("a", 10, fill(99)) == folder
    assert os.path.getsize(os.path.join(folder, "file")) == 10
    assert os.stat(tmp_path / "cache").st_mode & 0o777 == 0o700


def test_the_least_recently_used_goes_first(tmp_path):
    cache = DownloadCache(str(tmp_path), 30)
    for age, key in enumerate("abc"):
        cache.release(cache.fetch(key, 10, fill(10)))
        os.utime(tmp_path / key, (age, age))
    cache.release(cache.fetch("a", 10, fill(10)))
    cache.release(cache.fetch("d", 10, fill(10)))
    assert entries(tmp_path) == {"a", "c", "d"}


def test_more_than_fits(tmp_path):
    cache = DownloadCache(str(tmp_path), 30)
    with pytest.raises(AdapterError, match="31 bytes"):
        cache.fetch("a", 31, fill(31))
    cache.fetch("a", 20, fill(20))
    with pytest.raises(AdapterSourceError, match="full"):
        cache.fetch("b", 20, fill(20))
    assert cache.num_held() == 1


def test_a_failed_download_leaves_nothing(tmp_path):
    cache = DownloadCache(str(tmp_path), 30)

    def fail(folder: Path) -> None:
        fill(10)(folder)
        raise AdapterError("broken")

    for _ in range(5):  # nor is room lost
        with pytest.raises(AdapterError, match="broken"):
            cache.fetch("a", 20, fail)
    assert entries(tmp_path) == set()
    assert not list(tmp_path.glob(".tmp-*"))
    assert cache.num_held() == 0
    assert cache.fetch("a", 30, fill(30))


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(AdapterSourceError, match="cannot be used"):
        DownloadCache(str(tmp_path / "file" / "cache")).fetch("a", 1, fill(1))


def test_two_downloads_at_once_share_the_room(tmp_path):
    cache = DownloadCache(str(tmp_path), 30)
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        begun.set()
        assert go_on.wait(10)
        fill(20)(folder)

    thread = threading.Thread(target=cache.fetch, args=("a", 20, slow))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(AdapterSourceError, match="full"):
        cache.fetch("b", 20, fill(20))
    go_on.set()
    thread.join()
    assert entries(tmp_path) == {"a"}


def test_leftovers_of_a_dead_process_are_removed(tmp_path):
    for name, age in ((".tmp-old", 2 * 86400), (".tmp-new", 60)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    DownloadCache(str(tmp_path)).fetch("a", 1, fill(1))
    assert {path.name for path in tmp_path.glob(".tmp-*")} == {".tmp-new"}


OTHER_PROCESS = """
import sys
from outrider.platform.client.adapters.sources.cache import DownloadCache
cache = DownloadCache(sys.argv[1], 30)
cache.fetch("a", 10, lambda folder: (folder / "file").write_bytes(b"x" * 10))
print("held", flush=True)
sys.stdin.read()
"""


def test_files_of_a_live_process_are_kept(tmp_path):
    arguments = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)]
    cache = DownloadCache(str(tmp_path), 30)
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        cache.release(cache.fetch("b", 20, fill(20)))
        cache.release(cache.fetch("c", 20, fill(20)))
        assert entries(tmp_path) == {"a", "c"}
        with pytest.raises(AdapterSourceError, match="full"):
            cache.fetch("d", 30, fill(30))
        other.kill()
    cache.fetch("d", 30, fill(30))
    assert entries(tmp_path) == {"d"}, "the kernel has dropped its locks"


class CacheMachine(RuleBasedStateMachine):
    """Two caches over one folder, as two processes have them: never too much, and nothing held is lost."""

    def __init__(self) -> None:
        super().__init__()
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.caches = [DownloadCache(self.folder.name, 100) for _ in range(2)]
        self.held: list[tuple[DownloadCache, str]] = []

    @rule(which=st.integers(0, 1), key=st.integers(0, 5))
    def fetch(self, which: int, key: int) -> None:
        size = 10 * key + 10
        try:
            folder = self.caches[which].fetch(str(key), size, fill(size))
        except AdapterSourceError:
            return
        self.held.append((self.caches[which], folder))

    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        if self.held:
            cache, folder = self.held.pop(index % len(self.held))
            cache.release(folder)

    @invariant()
    def bounded_and_safe(self) -> None:
        paths = [path for path in Path(self.folder.name).iterdir() if path.is_dir()]
        assert not [path for path in paths if path.name.startswith(".")]
        assert sum((path / "file").stat().st_size for path in paths) <= 100
        assert all(os.path.exists(os.path.join(folder, "file")) for _, folder in self.held)

    def teardown(self) -> None:
        for cache in self.caches:
            os.close(cache._locks) if cache._locks >= 0 else None
        self.folder.cleanup()


CacheMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25)
TestCache = CacheMachine.TestCase
