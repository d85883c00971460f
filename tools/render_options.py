"""Render the tables of options in docs/reference, and of adapters' fields in docs/guides, from what the code declares.

Usage: python tools/render_options.py [--check]

With --check nothing is written; the exit status is 1 when a page differs from the code.
"""

import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from outrider.lora.files.kinds import KINDS as ADAPTER_KINDS
from outrider.lora.files.kinds import fields_table
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.kv_events import KVEventsConfig
from outrider.platform.core.option import Option, declared_options
from outrider.platform.core.speculative_config import SpeculativeConfig
from outrider.platform.http.server_config import ServerConfig
from outrider.spec_decode.training.options import TrainOptions

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "reference" / "options.md", DOCS / "guides" / "adapters.md")
_OWNERS = (EngineArgs, KVEventsConfig, SpeculativeConfig, ServerConfig, TrainOptions)
OWNERS = {owner.__name__: owner for owner in _OWNERS}
MARK = re.compile(r"(?<=<!-- options: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
KINDS = {bool: "true or false", dict: "object", tuple: "list", str: "text"}
BOUNDLESS = 1e6
"""A bound beyond this is not worth a reader's time."""


def values(option: Option) -> str:
    """Values of an option in words."""
    if option.choices is not None:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    if option.bounds is None:
        return KINDS.get(option.kind, "object") if option.parse is None else "size"
    low, high = option.bounds
    kind, least = "integer" if option.kind is int else "number", "above" if option.low_open else "from"
    if high > BOUNDLESS:
        return kind if low < -BOUNDLESS else f"{kind} {least} {low:,.10g}"
    return f"{kind} {least} {low:,.10g} to {high:,.10g}"


def tables(options: Collection[Option]) -> list[str]:
    """The lines of a Markdown table for each group; several have titles."""
    groups = dict.fromkeys(option.group for option in options)
    lines = []
    for group in groups:
        lines += ["", f"### {group}"] if len(groups) > 1 else []
        lines += ["", "| option | values | meaning |", "| --- | --- | --- |"]
        lines += [f"| `{one.name}` | {values(one)} | {one.help} |" for one in options if one.group == group]
    return lines


def render(text: str) -> str:
    """Render every marked table of the page `text` again."""
    return MARK.sub(lambda mark: f"{mark[1]}{mark[2]}{marked(mark[1])}\n", text)


def marked(name: str) -> str:
    """The tables of a mark: those of a class with options, or of an adapter kind's fields."""
    if name in ADAPTER_KINDS:
        return "\n" + fields_table(ADAPTER_KINDS[name])
    return "\n".join([*tables(declared_options(OWNERS[name]).values()), ""])


def main(arguments: Sequence[str]) -> int:
    """Render the pages; with `--check` only compare."""
    differing = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        rendered = render(text)
        if "--check" not in arguments:
            page.write_text(rendered, encoding="utf-8")
        elif rendered != text:
            print(f"{page}: differs from the code; run python tools/render_options.py")
            differing += 1
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
