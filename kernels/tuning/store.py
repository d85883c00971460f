"""Choice of the file of configs for a device: the one named, or a shipped one for it or its compute capability, or
none."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from .configs import KernelConfig
from .files import ConfigFile, DeviceName, KernelConfigError, Key, read_configs

if TYPE_CHECKING:
    import torch

VARIABLE = "OUTRIDER_KERNEL_CONFIGS"
"""Variable that names a file of configs, or a folder of them, instead of the shipped ones."""
SHIPPED = Path(__file__).resolve().parent.parent / "configs"

C = TypeVar("C", bound=KernelConfig)


class Configs:
    """Configs that were tuned for one device."""

    def __init__(self, configs: Mapping[Key, KernelConfig], source: Path | None = None) -> None:
        self._configs = dict(configs)
        self.source = source
        """File from which they were read."""

    def get(self, default: C, *shape: int) -> C:
        """Config of the default's kernel for a shape; the default when there is none."""
        return cast(C, self._configs.get((default.kernel, shape), default))

    def __len__(self) -> int:
        return len(self._configs)


NO_CONFIGS = Configs({})
_chosen: Configs | None = None


@contextmanager
def using(configs: Configs) -> Iterator[None]:
    """Launch the kernels of every device with these configs, in all threads of this process."""
    global _chosen
    before, _chosen = _chosen, configs
    try:
        yield
    finally:
        _chosen = before


def configs_of(device: torch.device) -> Configs:
    """Configs of a device; read once for each device.

    Raises:
        KernelConfigError: the file that serves it is broken, or the one named is for another compute capability.
    """
    return _chosen if _chosen is not None else _configs_of(device)


def tuned(device: torch.device, default: C, *shape: int) -> C:
    """Launch config of `default`'s kernel on `device` for a shape, whose numbers `default.shape` names."""
    return configs_of(device).get(default, *shape)


@functools.cache
def _configs_of(device: torch.device) -> Configs:
    if device.type != "cuda":
        return NO_CONFIGS
    return find_configs(device_name(device), os.environ.get(VARIABLE) or None)


def device_name(device: torch.device) -> DeviceName:
    """Name of a CUDA device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    return DeviceName(properties.name, (properties.major, properties.minor))


def find_configs(device: DeviceName, named: str | None, shipped: Path = SHIPPED) -> Configs:
    """Configs of a device: those in `named`, a file or a folder, or else in the shipped folder.

    Raises:
        KernelConfigError: see `configs_of`.
    """
    if named is not None and not Path(named).is_dir():
        path = Path(named)
        file = read_configs(path)
        if file.device.capability != device.capability:
            theirs, ours = (".".join(map(str, name.capability)) for name in (file.device, device))
            message = f"{path}: device.capability: is {theirs}, this device ({device.name}) has {ours}"
            raise KernelConfigError(message)
        return _configs(file, path)
    return _find_in(Path(named) if named is not None else shipped, device)


def _find_in(folder: Path, device: DeviceName) -> Configs:
    exact = folder / device.file_name
    files = [exact] if exact.is_file() else []
    # A fixed order, so that a machine always takes the same file.
    for path in [*files, *sorted(set(folder.glob("*.json")) - set(files))]:
        file = read_configs(path)
        if file.device.capability == device.capability:
            return _configs(file, path)
    return NO_CONFIGS


def _configs(file: ConfigFile, path: Path) -> Configs:
    return Configs({key: entry.config for key, entry in file.entries.items()}, path)


def use_source(named: str | None) -> None:
    """Let this process and those that it starts use `named`, a file or a folder; None: the value of the variable, if
    any.

    Raises:
        KernelConfigError: a file is broken, or there is none.
    """
    named = named or os.environ.get(VARIABLE)
    if not named:
        return
    check_source(named)
    os.environ[VARIABLE] = str(Path(named).resolve())
    _configs_of.cache_clear()


def check_source(named: str) -> None:
    """Read every file of `named`, a file or a folder.

    Raises:
        KernelConfigError: one is broken, or there is none.
    """
    path = Path(named)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise KernelConfigError(f"{path}: there is no file of kernel configs in this folder")
    for file in files:
        read_configs(file)
