"""`tools/check_docstrings.py`: the first words of docstrings."""

import importlib.util

import pytest


@pytest.fixture
def check(repo_root, tmp_path):
    """The complaints about the text of one module."""
    spec = importlib.util.spec_from_file_location("check_docstrings", repo_root / "tools" / "check_docstrings.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def complaints(text):
        (tmp_path / "x").mkdir(exist_ok=True)
        (tmp_path / "x" / "a.py").write_text(text, encoding="utf-8")
        return module.check(tmp_path, ("x",))

    return complaints


@pytest.mark.parametrize(
    "words",
    ["Of rows.", "What it is.", "Those given.", "That it is.", "So many.", "The same again.", "...and.", "…and."],
)
def test_a_docstring_continues_nothing(check, words):
    module, function = f'"""{words}"""\n', f'def f():\n    """{words}"""\n'
    attribute = f'class C:\n    """Thing."""\n    size: int\n    """{words}"""\n'
    assert [len(check(text)) for text in (module, function, attribute)] == [1, 1, 1]


@pytest.mark.parametrize("words", ["Whether it is."])
def test_a_functions_docstring_has_its_verb(check, words):
    assert len(check(f'class C:\n    """Thing."""\n    def f(self):\n        """{words}"""\n')) == 1
    assert check(f'class C:\n    """Thing."""\n    @property\n    def f(self):\n        """{words}"""\n') == []


@pytest.mark.parametrize("words", ["rows of a table.", "and more."])
def test_lower_case_is_for_tensors(check, words):
    assert len(check(f'"""{words}"""\n')) == 1
    assert check('"""hidden [T, H] to logits."""\n') == check('"""`tensor` in its place."""\n') == []


def test_what_is_private_is_free(check):
    assert check('def _f():\n    """Of it."""\n\n_SIZE = 1\n"""Of it."""\n') == []


def test_a_complaint_names_the_place(check):
    assert check('"""Good."""\n\n\ndef f():\n    """Of it."""\n') == ["x/a.py:5: a docstring begins with 'Of': Of it."]
