"""The folder that profiles are written to."""

from __future__ import annotations

import os

from ..core.errors import InvalidRequestError
from ..core.sampling_params import check_text

PROFILE_VARIABLES = ("OUTRIDER_PROFILE_DIR", "VLLM_TORCH_PROFILER_DIR")
"""Environment variables that name the folder of profiles."""


def profile_folder(folder: str | os.PathLike[str] | None) -> str:
    """Absolute path of the folder that is given, or that a variable names.

    Raises:
        InvalidRequestError: neither is there.
    """
    named = folder if folder is not None else next(filter(None, map(os.environ.get, PROFILE_VARIABLES)), None)
    if named is None:
        raise InvalidRequestError(
            f"the profile needs a folder: give one, or set the variable {PROFILE_VARIABLES[0]}", param="folder"
        )
    path = os.path.abspath(os.path.expanduser(os.fspath(named)))
    check_text("folder", path)
    return path
