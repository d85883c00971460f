"""Where new weights of a model in use come from: a folder, a file, or a file in the machine's shared memory."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

from .errors import NotFoundError, invalid

SHARED_MEMORY = "/dev/shm"
"""Folder of the machine's shared memory, in which `multiprocessing.shared_memory` has its files too."""
_NAME = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,255}")
_MAX_PATH = 4096


@dataclass(frozen=True, slots=True)
class WeightSource:
    """One of the two is given."""

    path: str = ""
    """Folder with config.json and weights, or a safetensors file."""
    shared_memory: str = ""
    """Name of a safetensors file in `SHARED_MEMORY`."""

    def check(self) -> None:
        """Raise InvalidRequestError for a source that names no file, or a name that is no plain one."""
        if bool(self.path) == bool(self.shared_memory):
            raise invalid("path", "or shared_memory must be given, and not both")
        if len(self.path.encode(errors="surrogateescape")) > _MAX_PATH or "\0" in self.path:
            raise invalid("path", f"must be a path of at most {_MAX_PATH} bytes")
        if self.shared_memory and _NAME.fullmatch(self.shared_memory) is None:
            raise invalid(
                "shared_memory",
                "must be the name of a file in shared memory: at most 255 letters, digits, '_', '-' and '.', and no "
                "'.' as the first character",
            )

    def locate(self, max_bytes: int) -> str:
        """Path of the folder or file.

        Args:
            max_bytes: largest size of a file in shared memory.

        Raises:
            InvalidRequestError: see `check`; or it is a link, no plain file, or too large. NotFoundError: it is not
            there.
        """
        self.check()
        if self.path:
            if not os.path.exists(self.path):
                raise NotFoundError(f"path {self.path} does not exist", param="path")
            return self.path
        file = os.path.join(SHARED_MEMORY, self.shared_memory)
        try:
            found = os.lstat(file)
        except OSError as error:
            raise NotFoundError(
                f"shared_memory {self.shared_memory} is not there: {error}", param="shared_memory"
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise invalid("shared_memory", f"{self.shared_memory} is no plain file")
        if found.st_size > max_bytes:
            raise invalid(
                "shared_memory",
                f"{self.shared_memory} has {found.st_size} bytes; the model's weights have at most {max_bytes}",
            )
        return file
