"""The pages name files that exist, and stay as short as they promise to be."""

import posixpath
import re
import tomllib
from pathlib import Path

import pytest

import outrider

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [page for page in (ROOT / "examples" / "README.md",) if page.is_file()]
LINK = re.compile(r"\[[^\]]*\]\((?![a-z]+:|#)([^)#\s]+)(?:#[^)\s]*)?\)")
TOP = (
    "platform",
    "spec_decode",
    "lora",
    "models",
    "kernels",
    "tests",
    "tools",
    "benchmarks",
    "docs",
    "examples",
    "deploy",
)
PATH = re.compile(rf"`((?:{'|'.join(TOP)})/[\w./-]*)`")
PATH_OF_CODE_LINE = re.compile(r"^(?:\.venv/bin/)?python ((?:tests|tools|benchmarks|examples)/[\w./-]+)", re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folder = page.parent.relative_to(ROOT).as_posix()
    linked = [posixpath.normpath(posixpath.join(folder, target)) for target in LINK.findall(text)]
    # The site takes some pages from outside docs/; links between pages name them as they are called there.
    taken = {"docs/contributing.md", "docs/examples.md", "docs/changelog.md", "docs/security.md", "docs/deploy.md"}
    named = [path.rstrip(".") for path in (*PATH.findall(text), *PATH_OF_CODE_LINE.findall(text))]
    missing = [path for path in (*linked, *named) if path not in taken and not (ROOT / path).exists()]
    missing = [path for path in missing if "NAME" not in path and "OPERATION" not in path]  # of files to be written
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_120_characters(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    # Rows of tables, links by themselves, and rendered sources cannot be broken.
    lines = [
        line for line in prose.splitlines() if not line.lstrip().startswith(("|", "[")) and "/results/" not in line
    ]
    assert [line for line in lines if len(line) > 120] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_changelog_is_short_and_has_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _, unreleased, latest, *_ = re.split(r"^## ", text, flags=re.MULTILINE)
    assert unreleased.startswith("[Unreleased]")
    assert len(unreleased.splitlines()) <= 20
    assert re.match(rf"\[{re.escape(outrider.__version__)}\] - 20\d\d-\d\d-\d\d\n", latest)
    assert len(latest.splitlines()) <= 70
    assert [line for line in text.splitlines() if len(line) > 120] == []
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dynamic"]


def test_all_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.relative_to(ROOT / "docs").as_posix() in navigation
