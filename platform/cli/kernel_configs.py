"""The option that names tuned configs of the GPU kernels."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ...kernels.tuning import VARIABLE, KernelConfigError, check_source
from ..core.errors import InvalidRequestError


def add_kernel_configs_option(group: argparse._ArgumentGroup) -> None:
    """Add --kernel-configs."""
    group.add_argument(
        "--kernel-configs",
        metavar="PATH",
        help="file of `outrider tune`, or a folder of them, for the GPU kernels "
        f"(default: the variable {VARIABLE}, else those that come with Outrider)",
    )


def use_kernel_configs(namespace: argparse.Namespace) -> None:
    """Let the engine's process find what is named: it inherits the variable.

    Raises:
        InvalidRequestError: a file cannot be used; the message names it and the field.
    """
    named = namespace.kernel_configs or os.environ.get(VARIABLE)
    if not named:
        return
    try:
        check_source(named)
    except KernelConfigError as error:
        raise InvalidRequestError(str(error), param="kernel_configs") from error
    os.environ[VARIABLE] = str(Path(named).resolve())
