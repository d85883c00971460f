"""Make the checkout the package `outrider`, for this process and its children, without an installation."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def use_checkout() -> None:
    """Put this checkout on the import path, unless `outrider` is this checkout already.

    A temporary folder with a link of the package's name goes first on the path, and into PYTHONPATH.
    """
    spec = importlib.util.find_spec("outrider")
    if spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == ROOT:
        return
    folder = tempfile.mkdtemp(prefix="outrider-checkout-")
    atexit.register(_remove, folder, os.getpid())
    Path(folder, "outrider").symlink_to(ROOT, target_is_directory=True)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def _remove(folder: str, owner: int) -> None:
    """Remove the folder, unless this process is a forked child: the folder belongs to the parent."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
