"""Bounds of numbers, and steps (`multipleOf`).

`llguidance` keeps numbers as doubles and writes a range as a regular expression. It mishandles two kinds of bounds:
an exclusive one at a whole number accepts the number itself if the other bound lies within the same unit ("0" in
(0, 0.5]), and integers beyond 2**53 are rounded outwards. A step becomes a decimal fraction by multiplications with 10,
whose rounding makes some steps, as 0.07, too long to be read.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
MAX_EXACT = 2**53
"""Largest integer up to which all are doubles."""
MAX_INT = 2**63 - 1
"""Largest upper bound of an integer: larger ones are lowered to it."""
MAX_DOUBLE = 2**63 - 1024
"""Largest double below 2**63: larger bounds are lowered to it."""
MAX_OPEN = 10**18 - 1
"""Largest lower bound without an upper one."""
SMALLEST = 1e-16
"""Smallest number above 0 that is written; doubles have smaller ones, of up to 324 digits."""
MAX_ULPS = 3
"""Largest distance of a step from the double in its place, in units of its last place. Of the 99 steps from 0.01 to
0.99 fourteen are not read as they are written, and six of these have such a double. None is farther away."""


def rewrite_bounds(schema: dict[str, Any]) -> None:
    """Replace the bounds of a schema in place by those that are served correctly.

    Raises:
        ValueError: a bound is too large.
    """
    if not any(keyword in schema for keyword in BOUNDS):
        return
    _read_flags(schema)
    values = {keyword: schema[keyword] for keyword in BOUNDS if keyword in schema}
    for keyword, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            return  # refused later, by name
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{keyword} must be a finite number")
    for keyword in values:
        del schema[keyword]
    low = _tighter(values.get("minimum"), values.get("exclusiveMinimum"), 1)
    high = _tighter(values.get("maximum"), values.get("exclusiveMaximum"), -1)
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        schema.update(values)  # no number lies between them: refused later, by name
        return
    types = schema.get("type")
    of_integers = types == "integer" or (isinstance(types, list) and "integer" in types and "number" not in types)
    if of_integers:
        schema.update(_integer_bounds(low, high))
    else:
        # An upper bound is handled as the lower bound of the negated numbers.
        schema.update(_number_bound("minimum", "exclusiveMinimum", low, 1, None if high is None else high[0]))
        schema.update(_number_bound("maximum", "exclusiveMaximum", high, -1, None if low is None else low[0]))


Bound = tuple[Fraction, bool]
"""A bound, and whether it is exclusive."""


def _read_flags(schema: dict[str, Any]) -> None:
    """Read draft 4's flags, as OpenAPI 3.0 has them: {"minimum": 0, "exclusiveMinimum": true}."""
    for keyword, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(flag := schema.get(keyword), bool):
            del schema[keyword]
            if flag and inclusive in schema:
                schema[keyword] = schema.pop(inclusive)


def _tighter(inclusive: float | None, exclusive: float | None, sign: int) -> Bound | None:
    """The tighter one of two bounds. `sign`: -1 for upper ones."""
    found = [(_exact(value), open_) for value, open_ in ((inclusive, False), (exclusive, True)) if value is not None]
    return max(found, key=lambda bound: (sign * bound[0], bound[1]), default=None)


def _exact(value: float) -> Fraction:
    """The number as it is written: 0.1 is a tenth."""
    return Fraction(repr(value)) if isinstance(value, float) else Fraction(value)


def _integer_bounds(low: Bound | None, high: Bound | None) -> dict[str, int]:
    bounds = {}
    least = None if low is None else math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
    most = None if high is None else math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
    if least is not None:
        if least > MAX_INT:
            raise ValueError(f"minimum: integers above {MAX_INT} are not served")
        bounds["minimum"] = max(_inward(least, 1), -MAX_DOUBLE)
        if most is None and least > MAX_OPEN:
            most = MAX_INT
    if most is not None:
        if most < -MAX_DOUBLE:
            raise ValueError(f"maximum: integers below {-MAX_DOUBLE} are not served")
        bounds["maximum"] = MAX_INT if most >= MAX_INT else _inward(most, -1)
    return bounds


def _inward(value: int, sign: int) -> int:
    """The next integer, upwards if `sign` is 1, that is a double."""
    nearest = float(value)
    if sign * int(nearest) < sign * value:
        nearest = math.nextafter(nearest, sign * math.inf)
    return int(nearest)


def _number_bound(
    inclusive: str, exclusive: str, bound: Bound | None, sign: int, other: Fraction | None
) -> dict[str, float]:
    """Keyword of a lower bound, or of an upper one with `sign` -1; `other` is the bound at the other end."""
    if bound is None:
        return {}
    value, is_open = sign * bound[0], bound[1]
    if value > MAX_DOUBLE:
        raise ValueError(f"{inclusive}: numbers beyond {sign * MAX_DOUBLE} are not served")
    if value < -MAX_DOUBLE:
        return {inclusive: sign * -MAX_DOUBLE}
    found = {}
    if other is None and value > MAX_OPEN:
        found = {"maximum" if sign == 1 else "minimum": sign * MAX_DOUBLE}
    if is_open and (value < 0 or value.denominator != 1):
        return found | {exclusive: _double(sign * value, sign)}
    if is_open and value == 0:
        # If the other bound is small, the range has small numbers only.
        least = SMALLEST if other is None or sign * other > SMALLEST else float(sign * other) / 2
        return found | {inclusive: sign * (least or math.ulp(0.0))}
    if is_open:
        return found | {inclusive: sign * math.nextafter(_double(value, 1), math.inf)}
    return found | {inclusive: _double(sign * value, sign)}


def _double(value: Fraction, sign: int) -> float:
    """The number as JSON: an integer if it is one."""
    if value.denominator == 1:
        return _inward(int(value), sign)
    return float(value)


def rewrite_step(schema: dict[str, Any]) -> None:
    """Replace `multipleOf` in place by a double next to it that is read as the decimal fraction that was written.

    Raises:
        ValueError: there is none.
    """
    step = schema.get("multipleOf")
    if isinstance(step, float) and 0 < step < math.inf:
        exact = _exact(step)
        near = (step + ulps * math.ulp(step) for ulps in sorted(range(-MAX_ULPS, MAX_ULPS + 1), key=abs))
        found = next((value for value in near if _fraction_read(value) == exact), None)
        if found is None:
            raise ValueError(f"multipleOf: {step} is not served, it would be rounded")
        schema["multipleOf"] = found


def _fraction_read(step: float) -> Fraction | None:
    """The decimal fraction as which `llguidance` reads a step; None if it is too long."""
    written = Decimal(repr(step))
    exponent = int(written.as_tuple().exponent)
    value = float(written.scaleb(-exponent))  # its JSON parser rounds the digits first, and then the quotient
    value = value / float(f"1e{-exponent}") if exponent < 0 else value * float(f"1e{exponent}")
    num_digits = 0
    while not value.is_integer():
        value, num_digits = 10.0 * value, num_digits + 1
    return Fraction(int(value), 10**num_digits) if value < 2**32 else None


def check_exact(schema: dict[str, Any]) -> None:
    """Raise ValueError if `const` or `enum` has an integer that would be rounded."""
    for keyword in ("const", "enum"):
        waiting = [schema[keyword]] if keyword in schema else []
        while waiting:
            value = waiting.pop()
            if isinstance(value, list):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
            elif isinstance(value, int) and abs(value) > MAX_EXACT and _inward(value, 1) != value:
                raise ValueError(f"{keyword}: {str(value)[:100]} is not served, integers beyond 2**53 would be rounded")
            elif isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{keyword} must have finite numbers")
