"""The file that `tools/tune` writes for a device, and its checks.

{"version": 1, "device": {"name": "...", "capability": [9, 0]}, "triton": "3.6.0", "date": "2026-01-31",
 "kernels": {"rms_norm": [{"shape": {"width": 4096, "itemsize": 2}, "config": {"rows": 1, "num_warps": 8},
                           "microseconds": {"64 rows": {"default": 4.1, "tuned": 3.9}}}]}}
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .configs import KINDS, KernelConfig, problem

VERSION = 1
_MAX_BYTES = 16 << 20
_MAX_SHAPE = 1 << 40


class KernelConfigError(ValueError):
    """Error of a file of kernel configs; the message names the file and the field."""


class DeviceName(NamedTuple):
    """Name of a kind of device, as torch reports it."""

    name: str
    capability: tuple[int, int]

    @property
    def file_name(self) -> str:
        """File name, such as nvidia-h200.json."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-") + ".json"


class Times(NamedTuple):
    """Times of one workload, in microseconds."""

    default: float
    tuned: float


class ConfigEntry(NamedTuple):
    """Config that was found for one shape."""

    config: KernelConfig
    times: dict[str, Times]
    """Times by the workload's name; for information, never read by kernels."""


Key = tuple[str, tuple[int, ...]]
"""Key of an entry: (kernel, its shape)."""


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """Configs that were found for one device."""

    device: DeviceName
    triton: str
    """Version of Triton with which they were measured."""
    date: str
    """Date of the last change."""
    entries: dict[Key, ConfigEntry] = field(default_factory=dict)

    def to_json(self) -> str:
        """Text of the file, as the module describes it; entries are in a fixed order."""
        kernels: dict[str, list[dict[str, Any]]] = {}
        for (kernel, shape), entry in sorted(self.entries.items()):
            found = {
                "shape": dict(zip(KINDS[kernel].shape, shape, strict=True)),
                "config": dataclasses.asdict(entry.config),
                "microseconds": {name: times._asdict() for name, times in entry.times.items()},
            }
            kernels.setdefault(kernel, []).append(found)
        device = {"name": self.device.name, "capability": list(self.device.capability)}
        data = {"version": VERSION, "device": device, "triton": self.triton, "date": self.date, "kernels": kernels}
        return json.dumps(data, indent=1, ensure_ascii=False) + "\n"

    def write(self, path: Path) -> None:
        """Write the file atomically: a reader finds the old file or the new one, never a part."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            part.write_text(self.to_json(), encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def read_configs(path: Path) -> ConfigFile:
    """Read a file of configs.

    Raises:
        KernelConfigError: it cannot be read, or is not such a file; the message names it and the field.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise KernelConfigError(f"{path}: larger than {_MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise KernelConfigError(f"{path}: cannot be read: {error}") from error
    return parse_configs(text, str(path))


def resumed(path: Path, device: DeviceName, triton: str) -> ConfigFile:
    """Read the file that an earlier search left at `path` for this device and compiler; without one, a file without
    entries.

    Raises:
        KernelConfigError: what is there is no such file.
    """
    if path.exists():
        file = read_configs(path)
        if (file.device, file.triton) == (device, triton):
            return file
    return ConfigFile(device, triton, today())


def today() -> str:
    """Date in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def parse_configs(text: str, where: str) -> ConfigFile:
    """Parse the text of a file; `where` is its name in errors.

    Raises:
        KernelConfigError: see `read_configs`.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KernelConfigError(f"{where}: not valid JSON: {error}") from None
    return _Reader(where).file(data)


class _Reader:
    """Reader of JSON values that checks each field."""

    def __init__(self, where: str) -> None:
        self._where = where

    def file(self, data: object) -> ConfigFile:
        fields = self._object(data, "the file")
        if fields.get("version") != VERSION:
            raise self._error("version", f"must be {VERSION}, got {fields.get('version')!r}")
        self._names(fields, {"version", "device", "triton", "date", "kernels"}, "")
        device = self._object(fields["device"], "device", {"name", "capability"})
        capability = device["capability"]
        if not (isinstance(capability, list) and len(capability) == 2 and all(type(n) is int for n in capability)):
            raise self._error("device.capability", f"must be two integers, got {capability!r}")
        name = DeviceName(self._text(device["name"], "device.name"), (capability[0], capability[1]))
        date = self._text(fields["date"], "date")
        try:
            datetime.date.fromisoformat(date)
        except ValueError:
            raise self._error("date", f"must be a date such as 2026-01-31, got {date!r}") from None
        entries: dict[Key, ConfigEntry] = {}
        for kernel, found in self._object(fields["kernels"], "kernels").items():
            self._kernel(kernel, found, entries)
        return ConfigFile(name, self._text(fields["triton"], "triton"), date, entries)

    def _kernel(self, kernel: str, found: object, entries: dict[Key, ConfigEntry]) -> None:
        place = f"kernels.{kernel}"
        if kernel not in KINDS:
            raise self._error(place, f"no such kernel; there are {', '.join(KINDS)}")
        if not isinstance(found, list):
            raise self._error(place, f"must be a list, got {type(found).__name__}")
        for index, item in enumerate(found):
            here = f"{place}[{index}]"
            fields = self._object(item, here, {"shape", "config", "microseconds"})
            shape = self._shape(KINDS[kernel], fields["shape"], f"{here}.shape")
            if (kernel, shape) in entries:
                raise self._error(f"{here}.shape", "is a duplicate")
            config = self._config(KINDS[kernel], fields["config"], f"{here}.config")
            entries[kernel, shape] = ConfigEntry(config, self._times(fields["microseconds"], f"{here}.microseconds"))

    def _shape(self, kind: type[KernelConfig], data: object, place: str) -> tuple[int, ...]:
        fields = self._object(data, place, set(kind.shape))
        for name, value in fields.items():
            if type(value) is not int or not 0 <= value <= _MAX_SHAPE:
                raise self._error(f"{place}.{name}", f"must be an integer of at least 0, got {value!r}")
        return tuple(fields[name] for name in kind.shape)

    def _config(self, kind: type[KernelConfig], data: object, place: str) -> KernelConfig:
        known = {field.name: field for field in dataclasses.fields(kind)}
        fields = self._object(data, place, set(known))
        for name, value in fields.items():
            wrong = problem(known[name], value)
            if wrong is not None:
                raise self._error(f"{place}.{name}", wrong)
        return kind(**fields)

    def _times(self, data: object, place: str) -> dict[str, Times]:
        found = {}
        for name, item in self._object(data, place).items():
            fields = self._object(item, f"{place}.{name}", set(Times._fields))
            for which, value in fields.items():
                if type(value) not in (int, float) or not 0 <= value < float("inf"):
                    raise self._error(f"{place}.{name}.{which}", f"must be a number of at least 0, got {value!r}")
            found[name] = Times(float(fields["default"]), float(fields["tuned"]))
        return found

    def _object(self, data: object, place: str, names: set[str] | None = None) -> Mapping[str, Any]:
        """The object at `place`, which has exactly the fields `names`."""
        if not isinstance(data, dict):
            raise self._error(place, f"must be an object, got {type(data).__name__}")
        if names is not None:
            self._names(data, names, f"{place}.")
        return data

    def _text(self, data: object, place: str) -> str:
        if not isinstance(data, str):
            raise self._error(place, f"must be a string, got {data!r}")
        return data

    def _names(self, fields: Mapping[str, Any], wanted: set[str], prefix: str) -> None:
        for name in sorted(wanted - set(fields)):
            raise self._error(prefix + name, "is missing")
        for name in fields:
            if name not in wanted:
                raise self._error(prefix + name, "unknown field")

    def _error(self, place: str, what: str) -> KernelConfigError:
        return KernelConfigError(f"{self._where}: {place}: {what}")
