"""Ranks of an adapter, from its files."""

from __future__ import annotations

from pathlib import Path

from ...models.checkpoint.json_files import read_json
from ..core.errors import OutriderError


def largest_rank(folder: Path) -> int:
    """The largest rank of an adapter, its draft weights included. It is 1 if the files do not say: the error comes
    when the adapter is loaded."""
    ranks = [1]
    for file in folder.rglob("adapter_config.json"):
        try:
            config = read_json(file)
            ranks += [int(config.get("r", 1)), *map(int, (config.get("rank_pattern") or {}).values())]
        except (OutriderError, ValueError, TypeError, AttributeError):
            continue
    return max(ranks)
