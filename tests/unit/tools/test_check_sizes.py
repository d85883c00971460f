"""The size check: what it counts, what it lets through, and that its exceptions are real."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def sizes(repo_root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_sizes", repo_root / "tools" / "check_sizes.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_sizes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def values(sizes, source: str) -> dict[tuple[str, str], int]:
    return {(s.kind, s.place.removeprefix("m.py::")): s.value for s in sizes.measure(source, "m.py")}


def test_counts_lines_without_the_docstring(sizes):
    source = 'def f():\n    """One.\n\n    Two.\n    """\n    a = 1\n    return a\n'
    assert values(sizes, source)[("function lines", "f")] == 3
    assert values(sizes, source)[("file lines", "m.py")] == 7


def test_counts_every_parameter_but_self(sizes):
    source = "class C:\n    def f(self, a, /, b, *c, d, **e): ...\n\ndef g(self): ...\n"
    assert values(sizes, source)[("parameters", "C.f")] == 5
    assert values(sizes, source)[("parameters", "g")] == 1


def test_names_nested_functions_and_finds_them_below_conditions(sizes):
    source = "if True:\n    async def f():\n        def g(a): ...\n"
    assert values(sizes, source)[("parameters", "f.g")] == 1


@pytest.mark.parametrize("decorator", ["@triton.jit", "@triton.jit(debug=True)"])
def test_triton_kernels_may_have_many_parameters(sizes, decorator):
    assert ("parameters", "k") not in values(sizes, f"{decorator}\ndef k(a, b): ...\n")


def test_dataclass_fields_are_no_parameters(sizes):
    fields = "\n".join(f"    f{i}: int" for i in range(20))
    assert [kind for kind, _ in values(sizes, f"@dataclass\nclass Config:\n{fields}\n")] == ["file lines"]


@pytest.fixture
def tree(tmp_path):
    """A tree with one breach of each kind, and some where nobody looks."""
    long_file = "x = 1\n" * 401
    (tmp_path / "long_file.py").write_text(long_file)
    (tmp_path / "long_function.py").write_text("class C:\n    def f(self):\n" + "        x = 1\n" * 60)
    (tmp_path / "parameters.py").write_text("def f(a, b, c, d, e, f, g, h, i): ...\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text("def f(a, b, c, d, e, f, g, h, i): ...\n" + long_file)
    for skipped in (".venv", "build"):
        (tmp_path / skipped).mkdir()
        (tmp_path / skipped / "long_file.py").write_text(long_file)
    return tmp_path


def test_complains_about_each_breach(sizes, tree):
    assert sizes.check(tree, {}) == [
        "long_file.py:1: 401 file lines, at most 400",
        "long_function.py:2: C.f: 61 function lines, at most 60",
        "parameters.py:1: f: 9 parameters, at most 8",
        "tests/test_it.py:1: 402 file lines, at most 400",
    ]


def test_exceptions_raise_a_limit_and_must_be_needed(sizes, tree):
    exceptions = {
        ("file lines", "long_file.py"): sizes.Allowance(401, "a test"),
        ("parameters", "parameters.py::f"): sizes.Allowance(8, "not enough"),
        ("function lines", "gone.py::f"): sizes.Allowance(100, "stale"),
    }
    complaints = sizes.check(tree, exceptions)
    assert not any(c.startswith("long_file.py") for c in complaints)
    assert "parameters.py:1: f: 9 parameters, at most 8" in complaints
    assert complaints[-1] == "tools/check_sizes.py: the exception ('function lines', 'gone.py::f') is no longer needed"


def test_main_returns_the_exit_status(sizes, tree, tmp_path_factory, capsys):
    assert sizes.main([str(tree)]) == 1
    assert sizes.main([str(tmp_path_factory.mktemp("empty"))]) == 0
    assert "all within limits" in capsys.readouterr().out


def test_every_exception_has_a_reason_and_a_larger_limit(sizes):
    for (kind, _), allowance in sizes.EXCEPTIONS.items():
        assert allowance.reason.strip()
        assert allowance.limit > sizes.LIMITS[kind]
