"""Files of an adapter's folder, and their digest, by which servers agree on them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

CONFIG_FILE = "adapter_config.json"
WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
"""Weights files, the first that exists is read. The last one is mlx-lm's."""
ADAPTER_FILES = (CONFIG_FILE, *WEIGHT_FILES)
"""Files of a folder that are read: the configuration, and the first weights file that exists."""
_PIECE = 1 << 18
"""Bytes that are digested at once, some 200 microseconds of work."""


def files_digest(folder: str, give_way: Callable[[], None] = lambda: None) -> str | None:
    """SHA-256 of the configuration and the weights in an adapter's folder, in hexadecimal; None when they cannot be
    read. Draft weights, which change no text, do not count. `give_way` is called between pieces."""
    digest = hashlib.sha256()
    found = [name for name in ADAPTER_FILES if os.path.isfile(os.path.join(folder, name))][:2]
    if found[:1] != [CONFIG_FILE] or len(found) < 2:
        return None
    try:
        for name in found:
            with open(os.path.join(folder, name), "rb", buffering=0) as file:
                digest.update(f"{name}:{os.fstat(file.fileno()).st_size}\n".encode())
                while piece := file.read(_PIECE):
                    digest.update(piece)
                    give_way()
    except (OSError, ValueError):
        return None
    return digest.hexdigest()
