"""The ways of generating that are compared: off, every drafter with a fixed number of drafts, and adaptive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...core.errors import InvalidRequestError
from ...core.speculative_config import MODEL_METHODS

OFF, CONTROL, ADAPTIVE = "off", "control", "adaptive"
MODES = (OFF, CONTROL, "ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", ADAPTIVE)
ONE_DRAFT_A_PASS = frozenset({"draft_model", "eagle", "eagle3"})
"""Drafters that compute one draft after the other; the others make all of them at once."""
_KNOWN = {*MODES, *(f"{ADAPTIVE}:{mode}" for mode in MODES if mode not in (OFF, CONTROL, ADAPTIVE))}
_BASES_OF_ADAPTIVE = ("eagle3", "draft_model", "eagle", "medusa")


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of generating."""

    name: str
    method: str
    """What drafts: for adaptive ones the drafter under the controller; "off" for none, as in "control": an engine like
    that of "off", whose figures beside it show what is noise."""
    config: dict[str, Any]
    """The `speculative_config`."""
    choices: tuple[Mode, ...] = ()
    """The same with each drafter that it could have, and none of them was chosen yet: see `measure.trial`."""

    @property
    def fixed(self) -> bool:
        """Whether the number of drafts is fixed and more than none."""
        return self.name not in (OFF, CONTROL) and not is_adaptive(self.name)


def is_adaptive(mode: str) -> bool:
    """Whether a mode of that name chooses the number of drafts itself."""
    return mode.partition(":")[0] == ADAPTIVE


def as_fixed(mode: Mode) -> Mode:
    """An adaptive mode's drafter with a fixed number of drafts."""
    return Mode(mode.method, mode.method, {k: v for k, v in mode.config.items() if k != "adaptive"})


def available_modes(models: Mapping[str, str]) -> list[str]:
    """The modes that need nothing, and those whose model is in `models` (method -> path); not the control."""
    return [name for name in MODES if name != CONTROL and (name not in MODEL_METHODS or name in models)]


def make_modes(
    names: Sequence[str], models: Mapping[str, str], num_drafts: int, rates: Sequence[float] | None = None
) -> list[Mode]:
    """The modes by name; "off" comes first and is always there, for all are compared with it.

    Args:
        names: of `MODES`; "adaptive:METHOD" has that drafter, "adaptive" alone the fastest of those given (`choices`).
        models: path of each method's weights.
        rates: synthetic acceptance rates, for every mode.

    Raises:
        InvalidRequestError: an unknown mode, or one without its model.
    """
    modes = [Mode(OFF, OFF, {"method": OFF})]
    for name in dict.fromkeys(names):
        if name not in _KNOWN:
            raise InvalidRequestError(
                f"unknown mode {name!r}; known are {', '.join(MODES)}, adaptive:METHOD", param="modes"
            )
        if name == OFF:
            continue
        if name == CONTROL:
            modes.append(Mode(CONTROL, OFF, {"method": OFF}))
            continue
        methods = [name.removeprefix(f"{ADAPTIVE}:")]
        if name == ADAPTIVE:
            methods = [base for base in _BASES_OF_ADAPTIVE if base in models] or ["ngram"]
        choices = [_make(name, method, models, num_drafts, rates) for method in methods]
        modes.append(choices[0] if len(choices) == 1 else replace(choices[0], choices=tuple(choices)))
    return modes


def _make(
    name: str, method: str, models: Mapping[str, str], num_drafts: int, rates: Sequence[float] | None = None
) -> Mode:
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
    if method in MODEL_METHODS:
        if method not in models:
            option = "--" + method.replace("_", "-")
            raise InvalidRequestError(f"mode {name} needs {option} PATH", param="modes")
        config["model"] = models[method]
    if is_adaptive(name):
        config["adaptive"] = True
    if rates is not None:
        config |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(rates)}
    return Mode(name, method, config)
