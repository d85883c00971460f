"""Hooks of mkdocs: pages outside docs/, links to the repository's files, and the package for the reference.

Pages are written so that their links work in the repository. A link from a page to a file that is no page becomes the
file's path as code; `PAGES` and results are copied into the site.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "examples/README.md": "examples.md",
    "deploy/README.md": "deploy.md",
}
"""Pages outside docs/: path in the repository -> path in the site."""
RESULTS = "benchmarks/results"
PACKAGED = ("__init__.py", "kernels", "lora", "models", "platform", "spec_decode")
PACKAGE = ROOT / "build" / "reference" / "outrider"
"""mkdocs.yml names the folder above it as the path of sources."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_startup(**_: Any) -> None:
    """Let mkdocstrings find the package: a folder `outrider` with links to what it is made of."""
    PACKAGE.mkdir(parents=True, exist_ok=True)
    for name in PACKAGED:
        link = PACKAGE / name
        if not link.is_symlink():
            link.symlink_to(ROOT / name)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages outside docs/ and the results."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=text))
    for path in sorted((ROOT / RESULTS).iterdir()):
        files.append(File.generated(config, f"results/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite links for the site."""
    by_target = {target: source for source, target in PAGES.items()}
    here = page.file.src_uri
    source = by_target.get(here, f"docs/{here}")

    def rewritten(match: re.Match[str]) -> str:
        mark, text, link, anchor = match[1], match[2], match[3], match[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        target = site_path(path)
        if target is None:
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        return f"{mark}[{text}]({os.path.relpath(target, posixpath.dirname(here) or '.')}{anchor})"

    return LINK.sub(rewritten, markdown)


def site_path(path: str) -> str | None:
    """Path in the site of a file of the repository; None when it is not part of the site."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    return f"results/{posixpath.basename(path)}" if path.startswith(RESULTS + "/") else None
