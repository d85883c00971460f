"""The option `quantization`: weights that are quantised while they are loaded."""

from __future__ import annotations

from .errors import invalid

QUANTIZATIONS = ("int8", "int4", "fp8")
"""Methods that quantise weights while they are loaded."""


def rounding(asked: str | None, stored: str | None, param: str = "quantization") -> str | None:
    """Method by which weights are quantised while they are loaded, when `asked` is the option and `stored` the method
    of the checkpoint; None: they stay as they are stored.

    Raises:
        InvalidRequestError: there is no such method, or the checkpoint has another one.
    """
    if asked in (None, "none", stored):
        return None
    if stored is not None:
        raise invalid(param, f"is {asked!r}, but the checkpoint's weights are quantised by {stored!r}; leave it out")
    if asked not in QUANTIZATIONS:
        raise invalid(
            param,
            f"must be one of {', '.join(QUANTIZATIONS)} for a checkpoint whose weights are not quantised; got "
            f"{asked!r}",
        )
    return asked
