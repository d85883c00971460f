"""The compared modes: off, every drafter with a fixed number of drafts, and adaptive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....core.errors import InvalidRequestError
from ....core.speculative_config import IN_TARGET_METHODS, METHODS, MODEL_METHODS, parse_speculative

OFF, CONTROL, ADAPTIVE, ORACLE = "off", "control", "adaptive", "oracle"
MODES = (OFF, CONTROL, *METHODS, ADAPTIVE)
_METHODS_OF_ADAPTIVE = ("eagle3", *MODEL_METHODS)
"""Drafters of the mode "adaptive", the preferred ones first; n-grams when there are weights for none."""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to generate."""

    name: str
    method: str
    """The drafter; "off" for none. The mode "control" has none either: it is a second engine like that of "off", and
    its speed-up shows the noise of the measurement."""
    config: dict[str, Any]
    """The `speculative_config`."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Methods of its drafters."""
        config = parse_speculative(self.config)
        return () if config is None else config.drafters


def is_adaptive(mode: str) -> bool:
    """True when a mode of that name chooses the number of drafts for each step."""
    return mode.partition(":")[0] == ADAPTIVE


def available_modes(models: Mapping[str, str]) -> list[str]:
    """The modes that need no weights, and those whose weights are in `models` (method -> path); not the control, and
    not the oracle."""
    return [name for name in MODES if name not in (CONTROL, ORACLE) and (name not in MODEL_METHODS or name in models)]


def make_modes(
    names: Sequence[str], models: Mapping[str, str], num_drafts: int, rates: Sequence[float] | None = None
) -> list[Mode]:
    """The modes by name; "off" comes first and is always there, because all are compared with it.

    Args:
        names: members of `MODES`, "adaptive:METHOD" for adaptive with that drafter, "METHOD:K" for K drafts a step, or
            "adaptive:METHOD:K" for at most K.
        models: path of each method's weights.
        num_drafts: number of drafts a step of the other modes; the most that adaptive ones make.
        rates: synthetic acceptance rates, for every mode.

    Raises:
        InvalidRequestError: an unknown mode, or one without its weights.
    """
    modes = [Mode(OFF, OFF, {"method": OFF})]
    for name in dict.fromkeys(names):
        if name == CONTROL:
            modes.append(Mode(CONTROL, OFF, {"method": OFF}))
        elif name != OFF:
            modes.append(_make(name, models, num_drafts, rates))
    return modes


def _make(name: str, models: Mapping[str, str], num_drafts: int, rates: Sequence[float] | None) -> Mode:
    method, _, detail = name.partition(":")
    before = f"{ADAPTIVE}:" if method == ADAPTIVE else ""
    if before:
        detail = detail or next((known for known in _METHODS_OF_ADAPTIVE if known in models), "ngram")
        method, _, detail = detail.partition(":")
    if detail.isdecimal() and int(detail) > 0:
        num_drafts = int(detail)
    if method not in METHODS or name not in (ADAPTIVE, before + method, f"{before}{method}:{num_drafts}"):
        known = f"{', '.join(MODES)}, adaptive:METHOD, METHOD:K and adaptive:METHOD:K"
        raise InvalidRequestError(f"unknown mode {name!r}; known are {known}", param="modes")
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
    if method in models:
        config["model"] = models[method]
    elif method in MODEL_METHODS and method not in IN_TARGET_METHODS:
        option = "--" + method.replace("_", "-")
        raise InvalidRequestError(f"mode {name} needs {option} PATH", param="modes")
    if is_adaptive(name):
        config["adaptive"] = True
    if rates is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    return Mode(name, method, config)
