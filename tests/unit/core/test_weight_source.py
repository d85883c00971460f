"""Names of weights in shared memory, and their bounds."""

from pathlib import Path

import pytest

from outrider.platform.core import weight_source
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.core.weight_source import WeightSource


@pytest.mark.parametrize(
    ("source", "param"),
    [
        (WeightSource(), "path"),
        (WeightSource("/a", "b"), "path"),
        (WeightSource("a\0b"), "path"),
        (WeightSource("p" * 4097), "path"),
        *[
            (WeightSource(shared_memory=name), "shared_memory")
            for name in ("../a", "a/b", "..", ".a", "a b", "a" * 256)
        ],
    ],
)
def test_wrong_sources(source: WeightSource, param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        source.locate(1)
    assert caught.value.param == param


def test_files_in_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_source, "SHARED_MEMORY", str(tmp_path))
    name = "a" * 255
    with pytest.raises(NotFoundError):
        WeightSource(shared_memory=name).locate(5)
    (tmp_path / name).write_bytes(b"12345")
    assert WeightSource(shared_memory=name).locate(5) == str(tmp_path / name)
    with pytest.raises(InvalidRequestError, match="has 5 bytes"):
        WeightSource(shared_memory=name).locate(4)
    (tmp_path / "link").symlink_to(tmp_path / name)
    (tmp_path / "folder").mkdir()
    for other in ("link", "folder"):
        with pytest.raises(InvalidRequestError, match="no plain file"):
            WeightSource(shared_memory=other).locate(5)


def test_paths(tmp_path: Path) -> None:
    assert WeightSource(str(tmp_path)).locate(0) == str(tmp_path)
    with pytest.raises(NotFoundError, match="does not exist"):
        WeightSource(str(tmp_path / "gone")).locate(0)
