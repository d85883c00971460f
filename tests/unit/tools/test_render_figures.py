"""The pages' tables are what the committed results say."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_figures", ROOT / "tools" / "render_figures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_show_what_the_results_say(figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_table_is_found_and_rendered(figures: ModuleType) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    name = figures.BEGIN + "summary" + figures.NAME_END
    wrong = re.sub(r"(?<=over vLLM \| )[\d.]+", "9.99", page)
    assert wrong != page
    assert name in page
    assert figures.render(wrong, "benchmarks/results") == page


@pytest.mark.parametrize("text", ["<!-- figures: nothing -->\n<!-- end -->", "<!-- figures: peers -->\nno end"])
def test_a_broken_mark_is_an_error(figures: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="broken"):
        figures.render(text, "results")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_says_when_where_and_with_which_code(path: Path) -> None:
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["claim"]
    names = [run["run"] for run in result["runs"]]
    assert names
    assert len(set(names)) == len(names)
    for run in result["runs"]:
        machine = run["machine"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", machine["date"])
        assert re.match(r"[0-9a-f]{12}", machine["commit"])
        for key in ("command", "cpu", "cores", "threads", "python", "torch"):
            assert machine[key], f"{run['run']}: {key}"


def test_results_are_few_and_each_is_used() -> None:
    files = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert len(files) <= 15
    assert sum(file.stat().st_size for file in files) <= 1_500_000
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for file in files:
        assert f"benchmarks/results/{file.name}" in pages, f"no page links {file.name}"
