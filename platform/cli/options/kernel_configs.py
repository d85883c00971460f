"""The option --kernel-configs: tuned launch configs of the GPU kernels."""

from __future__ import annotations

import argparse

from ....kernels.tuning import VARIABLE
from ...client import kernel_configs


def add_kernel_configs_option(group: argparse._ArgumentGroup) -> None:
    """Add --kernel-configs."""
    group.add_argument(
        "--kernel-configs",
        metavar="PATH",
        help="file of `tools/tune`, or a folder of them, for the GPU kernels "
        f"(default: the variable {VARIABLE}, else those that come with Outrider)",
    )


def use_kernel_configs(namespace: argparse.Namespace) -> None:
    """Pass the named configs on to the engine's process, which inherits an environment variable.

    Raises:
        InvalidRequestError: a file cannot be used; the message names it and the field.
    """
    kernel_configs.use_kernel_configs(namespace.kernel_configs)
