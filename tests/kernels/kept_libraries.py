"""Cache of the libraries that tests compile: as with the package's own, once for each compiler and version of the
sources, in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from outrider.kernels.native import compiler

_FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "tests"
"""Known before a test changes the variable."""


def kept(command: list[str], sources: list[Path], make: Callable[[], Path]) -> Path:
    """Library of `sources` and the package's headers, which `make` compiles with `command` unless the cache has it."""
    digest = hashlib.sha256(compiler._key(command).encode())
    for source in sources:
        digest.update(source.read_bytes())
    target = _FOLDER / f"{digest.hexdigest()[:24]}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with compiler._locked(target.parent):
            if not target.exists():  # else another process has compiled it meanwhile
                part = shutil.copyfile(make(), target.with_suffix(".part"))
                Path(part).replace(target)
    return target
