"""Tuned configs of the GPU kernels, as a client names them."""

from __future__ import annotations

from os import PathLike, fspath

from ...kernels.tuning import KernelConfigError, use_source
from ..core.errors import InvalidRequestError


def use_kernel_configs(named: str | PathLike[str] | None) -> None:
    """Let this process, and engine processes that it starts, find a file or a folder of configs; None: what the
    variable OUTRIDER_KERNEL_CONFIGS names, if anything.

    Raises:
        InvalidRequestError: a file cannot be used; the message names it and the field.
    """
    try:
        use_source(None if named is None else fspath(named))
    except KernelConfigError as error:
        raise InvalidRequestError(str(error), param="kernel_configs") from error
