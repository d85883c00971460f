"""`tools/check_test_writes.py`: tests that write attributes which nothing has."""

import importlib.util
import sys

import pytest


@pytest.fixture
def check(repo_root, tmp_path, monkeypatch):
    """The complaints about a test, next to a package of one class with `num_kept`, `_inner` and slots."""
    spec = importlib.util.spec_from_file_location("check_test_writes", repo_root / "tools" / "check_test_writes.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    package = "class Table:\n    def __init__(self):\n        self.num_kept = self._inner = 1\n"
    package += "class Row:\n    __slots__ = ('place',)\n    size: int\nSECONDS = 3\n"
    for folder, text in (("platform", package), ("tests", "")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(text)

    def complaints(text, external=()):
        (tmp_path / "tests" / "b.py").write_text(text)
        return [line.split(": ", 1)[1] for line in module.check(tmp_path, dict.fromkeys(external, "some object"))]

    return complaints


@pytest.mark.parametrize(
    "text",
    [
        "setting.limiter._num_kept = 2",  # of a test that could not fail: the attribute had moved
        "setattr(limiter, '_num_kept', 2)",
        "limiter.a._num_kept += 1",
        "limiter.one, limiter._num_kept = 1, 2\nclass Fake:\n    one = 1\n    _num_kept = 2",
        "for row.other in (1, 2): pass",
    ],
)
def test_writes_to_undefined_attributes_are_errors(check, text):
    [complaint] = check(text)
    assert complaint.startswith("nothing defines the attribute ")


@pytest.mark.parametrize(
    "text",
    [
        "a.num_kept = a._inner = 2",
        "a.b().size, row.place = 1, 2",
        "module.SECONDS = 4",
        "class Fake:\n    reply = ''\nfake.reply = 'x'",
        "fake = SimpleNamespace(fill=1)\nfake.fill = 2",
        "class Fake:\n    def __init__(self):\n        self._mine = 1",
        "monkeypatch.delenv('A', raising=False)",
    ],
)
def test_defined_attributes_may_be_written(check, text):
    assert check(text) == []


def test_monkeypatch_must_raise(check):
    [complaint] = check("monkeypatch.setattr(a, 'b', 1, raising=False)")
    assert "raising=False" in complaint


def test_attributes_of_other_libraries_are_listed_while_they_are_written(check):
    assert check("tokenizer.eos_token = 'x'", ["eos_token"]) == []
    assert check("", ["eos_token"]) == ["no test writes 'eos_token'"]
