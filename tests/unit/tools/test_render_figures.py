"""The pages' tables equal the committed results."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from outrider.platform.cli.main import build_parser

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


@pytest.mark.slow
def test_pages_match_the_results(figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_result_has_date_machine_and_commit(path: Path) -> None:
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


def result_commands() -> list[str]:
    results = (json.loads(path.read_text(encoding="utf-8")) for path in RESULTS)
    return list(dict.fromkeys(run["machine"]["command"] for result in results for run in result["runs"]))


def read_source(script: str) -> str:
    """Text of a script with the options that all benchmarks share, or of the package that a folder is."""
    path = ROOT / script
    if script.startswith("benchmarks/") and path.is_file():
        return path.read_text(encoding="utf-8") + (ROOT / "benchmarks" / "script.py").read_text(encoding="utf-8")
    return "".join(file.read_text(encoding="utf-8") for file in (path.glob("*.py") if path.is_dir() else [path]))


def test_scripts_of_pages_exist_with_their_options() -> None:
    """A result's script may be gone: it is that of the result's commit."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    found = [match for text in texts for match in re.findall(r"\b((?:benchmarks|tools)/\w+(?:\.\w+)?)\b([^`|]*)", text)]
    commands = [(script, options) for script, options in found if not script.startswith("benchmarks/results")]
    assert len(commands) > 10
    for script, options in commands:
        source = read_source(script)
        assert source, script
        for option in re.findall(r"--[a-z-]+", options.split("\n\n")[0].split("outrider")[0]):
            names = (option, option[2:], option[2:].replace("-", "_"))
            assert any(f'"{name}"' in source for name in names), f"{script} {option}"


@pytest.mark.slow
def test_commands_of_results_are_understood() -> None:
    commands = [command.split()[1:] for command in result_commands() if command.startswith("outrider ")]
    assert commands
    for command in commands:
        build_parser().parse_args(command)
