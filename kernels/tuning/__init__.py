"""Launch configs of the Triton kernels (block sizes, warps, stages, splits), by device and shape.

A kernel asks `tuned(device, default, *shape)` and gets the result of `tools/tune` for that shape on that device, or the
default next to the kernel. Configs are looked up by the shape of the model, never by the rows of a step: a row's
rounding must not depend on other rows. Importing this package imports neither torch nor Triton.
"""

from .configs import KINDS, KernelConfig, bucket
from .files import ConfigEntry, ConfigFile, DeviceName, KernelConfigError
from .store import VARIABLE, Configs, check_source, configs_of, tuned, use_source, using

__all__ = [
    "KINDS",
    "VARIABLE",
    "ConfigEntry",
    "ConfigFile",
    "Configs",
    "DeviceName",
    "KernelConfig",
    "KernelConfigError",
    "bucket",
    "check_source",
    "configs_of",
    "tuned",
    "use_source",
    "using",
]
