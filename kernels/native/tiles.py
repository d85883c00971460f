"""Use of AMX tiles by the native products, once a child process has found them right on this machine.

The code for tiles was checked by emulation and has not run on a processor with AMX. So a child of limited time computes
a few products with tiles first, compares them with references, and times those of integers (`tile_check`). If it
crashes or a product is wrong, the products that serve without tiles stay. What it found is kept beside the compiled
library. Until it has run on such a processor, all of this happens only where OUTRIDER_AMX is 1.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from . import INTEGER, library

logger = logging.getLogger(__name__)

CHECK_SECONDS = 120
"""Longest time of the child; on two busy cores it takes about 5 s, of which most is the import of torch."""
NEVER = (1 << 63) - 1
"""Number of rows that no product has."""


class TileUse(NamedTuple):
    """Which products use tiles."""

    pairs: bool
    """Products of bfloat16 use tiles."""
    byte_rows: int
    """Rows from which products of integers use tiles; NEVER: none do."""


def are_compiled() -> bool:
    """True when the native kernels are compiled for a processor with tiles."""
    kernels = library()
    return kernels is not None and bool(kernels.outrider_has_tiles())


def are_wanted() -> bool:
    """True when the user wants tiles to be tried."""
    return os.environ.get("OUTRIDER_AMX") == "1"


def use(tiles: TileUse) -> bool:
    """Let the kernels of this process use tiles from the next call on; False when the system does not grant them."""
    kernels = library()
    if kernels is None or not kernels.outrider_permit_tiles():
        return False
    kernels.outrider_use_tiles(INTEGER(tiles.pairs), INTEGER(tiles.byte_rows))
    return True


@functools.cache
def prepare() -> TileUse:
    """Let the kernels of this process use tiles as far as the check found them right and, of integers, faster."""
    nothing = TileUse(False, NEVER)
    if not are_wanted() or not are_compiled() or not use(nothing):
        return nothing
    tiles = _parse(recall())
    if tiles is None:
        tiles = _check()
        remember(tiles._asdict())
    use(tiles)
    return tiles


def recall() -> dict[str, Any]:
    """Findings that are kept about this machine; empty at first, or when the file cannot be read."""
    try:
        kept = json.loads(_file().read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def remember(kept: dict[str, Any]) -> None:
    """Keep `kept` for other processes, if the folder can be written."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=_file().parent, delete=False) as scratch:
            json.dump(kept, scratch)
        os.replace(scratch.name, _file())  # atomic: another process may be writing
    except OSError as error:
        logger.warning("what was found about tiles is not kept: %s", error)


def _parse(found: dict[str, Any]) -> TileUse | None:
    pairs, rows = found.get("pairs"), found.get("byte_rows")
    return TileUse(pairs, rows) if isinstance(pairs, bool) and isinstance(rows, int) and 0 < rows <= NEVER else None


def _file() -> Path:
    kernels = library()
    assert kernels is not None, "there are tiles"
    return Path(kernels._name).with_suffix(".tiles.json")


def _check() -> TileUse:
    """Run `tile_check` in a child process."""
    logger.info("checking the products by AMX tiles (once)")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    command = [sys.executable, "-P", "-m", f"{__package__.rpartition('.')[0]}.tile_check"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=CHECK_SECONDS,
            check=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        tiles = _parse(json.loads(done.stdout.rpartition("\n")[2]))
        assert tiles is not None, "the child has printed one"
        return tiles
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        logger.warning("products by AMX tiles are not used, for their check failed: %s", error)
        return TileUse(False, NEVER)
