"""Use of AMX tiles by the native products, once they were found right on this machine.

A child process of limited time computes products on the real instructions first. It compares those of bfloat16 with
float64, those of integers with AVX512's, and times the latter (`tile_check`). A product that is wrong is not used, and
if the child fails none is; a warning and the start-up summary say so. `linear.trial` then times each shape of bfloat16.
All results are stored next to the compiled library under a lock, so processes that start together choose alike. A child
that fails, as for lack of time or memory, stores nothing: the next process checks again.

OUTRIDER_AMX: "0" switches our own tiles off, and bfloat16 uses oneDNN's products; "1" uses right ones for every shape
of bfloat16, without a trial.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import INTEGER, library

logger = logging.getLogger(__name__)

SWITCH = "OUTRIDER_AMX"
CHECK_SECONDS = 120
"""Longest time of the child; on two busy cores it takes about 5 s, of which most is the import of torch."""
NEVER = (1 << 63) - 1
"""Number of rows that no product has."""
_CRASHES = {signal.SIGILL, signal.SIGSEGV}
"""Signals of unsupported instructions. Others may come from lack of memory, or from outside."""


class TileUse(NamedTuple):
    """Products that use tiles."""

    pairs: bool
    """Products of bfloat16 use tiles."""
    byte_rows: int
    """Rows from which products of integers use tiles; NEVER: none do."""
    fault: str = ""
    """Description: why some products do not use tiles; "": all were found right."""


NOTHING = TileUse(False, NEVER)


def are_granted() -> bool:
    """True when the native kernels are compiled for a processor with tiles, and the system lets this process use them;
    without that no other library uses them either."""
    kernels = library()
    return kernels is not None and bool(kernels.outrider_has_tiles() and kernels.outrider_permit_tiles())


def are_forced() -> bool:
    """True when the user wants tiles for every shape."""
    return os.environ.get(SWITCH) == "1"


def use(tiles: TileUse) -> None:
    """Let the kernels of this process use tiles from the next call on; `are_granted` must have returned True."""
    kernels = library()
    assert kernels is not None, "there are tiles"
    kernels.outrider_use_tiles(INTEGER(tiles.pairs), INTEGER(tiles.byte_rows))


@functools.cache
def prepare() -> TileUse:
    """Let the kernels of this process use tiles as far as the check found them right and, of integers, faster."""
    if os.environ.get(SWITCH) == "0" or not are_granted():
        return NOTHING
    tiles: TileUse | None = None
    try:
        with findings() as kept:
            tiles = _parse(kept)
            if tiles is None:
                tiles = _check(kept)
    except OSError as error:
        logger.warning("results about AMX tiles cannot be stored, so every start checks them: %s", error)
        tiles = tiles or _check({})
    if tiles.fault:
        logger.warning("AMX tiles: %s", _words(tiles))
    use(tiles)
    return tiles


def describe() -> str:
    """Description of the products by tiles; "": the processor has none, or nothing was packed."""
    if not prepare.cache_info().currsize or not are_granted():
        return ""
    return _words(prepare())


def _words(tiles: TileUse) -> str:
    used = ["bfloat16"] if tiles.pairs else []
    if tiles.byte_rows < NEVER:
        used.append(f"integers from {tiles.byte_rows} rows on")
    text = ", ".join(used) or "not used"
    return f"{text}{'; ' if used else ': '}{tiles.fault}" if tiles.fault else text


@contextmanager
def findings() -> Iterator[dict[str, Any]]:
    """Findings that are kept about this machine, to be added to while other processes wait.

    Raises:
        OSError: they cannot be kept.
    """
    kernels = library()
    assert kernels is not None, "there are tiles"
    file = Path(kernels._name).with_suffix(".tiles.json")
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _read(file)
        kept = dict(before)
        yield kept
        if kept != before:
            with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as scratch:
                json.dump(kept, scratch)
            os.replace(scratch.name, file)


def _read(file: Path) -> dict[str, Any]:
    try:
        kept = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _parse(found: dict[str, Any]) -> TileUse | None:
    pairs, rows, fault = (found.get(name) for name in TileUse._fields)
    if isinstance(pairs, bool) and isinstance(rows, int) and 0 < rows <= NEVER and isinstance(fault, str):
        return TileUse(pairs, rows, fault)
    return None


def _check(kept: dict[str, Any]) -> TileUse:
    """Run `tile_check` in a child process, and add to `kept` the results that apply to every run."""
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
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return _failed(f"timed out after {CHECK_SECONDS} s")
    except OSError as error:
        return _failed(str(error))
    code = done.returncode
    if code == 0:
        tiles = _parse(json.loads(done.stdout.rpartition("\n")[2]))
        assert tiles is not None, "the child has printed one"
    else:
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        tiles = _failed(": ".join([how, *done.stderr.strip().splitlines()[-1:]]))
    if code == 0 or -code in _CRASHES:
        kept.update(tiles._asdict())
    return tiles


def _failed(reason: str) -> TileUse:
    return NOTHING._replace(fault=f"their check failed ({reason})")
