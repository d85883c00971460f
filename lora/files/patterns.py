"""`rank_pattern` and `alpha_pattern`: values of modules by regular expressions, as PEFT's `get_pattern_key` finds them.

The patterns are untrusted: they come with the adapter. PEFT writes up to thousands of plain names, one for each module;
these are looked up in a dictionary. Regular expressions are limited in number and time.
"""

from __future__ import annotations

import re
import time
from typing import Any

import regex

from ...platform.core.errors import AdapterError
from ...platform.core.sampling_params import quote_for_error
from ..step_yield import yield_to_steps

MAX_PATTERNS = 1 << 14
"""Largest number of patterns of one field. A model with experts has some thousands of modules."""
MAX_EXPRESSIONS = 256
"""Largest number of regular expressions among the patterns of one field."""
MAX_LENGTH = 1000
"""Characters of the longest pattern."""
_MATCH_SECONDS = 0.1
"""Longest time of one match; some expressions take exponential time."""
_SECONDS = 0.35
"""Longest time of all expressions of one field. A thousand modules and 256 simple expressions take 0.25 s."""
MAX_GROUPS = 8
"""Largest number of opening parentheses in an expression. The time to compile one, which cannot be interrupted, doubles
with each repeated group in another: 8 of them in 1,000 characters take 0.1 s, and 16 a minute."""
_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)+\$?", re.ASCII)


def _error(message: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {message}", param="lora_path")


def check_bounds(name: str, values: dict[str, Any]) -> None:
    """Refuse (AdapterError) too many or too long patterns of the field `name`, before anything is done with them."""
    if len(values) > MAX_PATTERNS:
        raise _error(f"{name} has {len(values)} patterns; at most {MAX_PATTERNS} are read")
    if (longest := max(map(len, values), default=0)) > MAX_LENGTH:
        raise _error(f"{name}: a pattern has {longest} characters; at most {MAX_LENGTH} are read")


class Patterns:
    """Patterns of one field. The first that matches a module's name, or a dotted end of it, gives the value."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        """Compile the patterns of the field `name`.

        Raises:
            AdapterError: there are too many patterns, or one is too long or no regular expression.
        """
        check_bounds(name, values)
        self.items = tuple(values.items())
        self._name = name
        self._ends: dict[str, int] = {}  # plain names, and the index of the first such item
        self._whole: dict[str, int] = {}  # the same for names that begin with "^"
        self._expressions: list[tuple[int, Any]] = []
        self._seconds = 0.0
        self._found: dict[str, int | None] = {}  # index of the item by module
        for index, pattern in enumerate(values):
            if _PLAIN.fullmatch(pattern):
                names = self._whole if pattern[0] == "^" else self._ends
                names.setdefault(pattern.removeprefix("^").removesuffix("$").replace("\\.", "."), index)
            else:
                self._expressions.append((index, self._compile(pattern)))
            if len(self._expressions) > MAX_EXPRESSIONS:
                raise _error(f"{name} has more than {MAX_EXPRESSIONS} regular expressions")

    def _compile(self, pattern: str) -> Any:
        if (num_groups := pattern.count("(")) > MAX_GROUPS:
            raise _error(
                f"{self._name}: {quote_for_error(pattern)} has {num_groups} groups; at most {MAX_GROUPS} are read"
            )
        started = time.thread_time()
        try:
            regex.compile(pattern)  # alone first: inside brackets an unbalanced one would be valid
            return regex.compile(rf"(.*\.)?({pattern})$")
        except (regex.error, OverflowError, RecursionError) as error:
            message = f"{self._name}: {quote_for_error(pattern)} is no regular expression: {error}"
            raise _error(message) from None
        finally:
            self._count_time(started, pattern)

    def find(self, module: str, default: Any) -> Any:
        """Return the value of a module, by its name in the model that PEFT was given.

        Raises:
            AdapterError: the expressions take too long.
        """
        if module not in self._found:
            self._found[module] = self._find_index(module)
            yield_to_steps()
        index = self._found[module]
        return default if index is None else self.items[index][1]

    def _find_index(self, module: str) -> int | None:
        found = [self._whole.get(module)]
        end: str = module
        while end:
            found.append(self._ends.get(end))
            end = end.partition(".")[2]
        first = min((index for index in found if index is not None), default=None)
        for index, expression in self._expressions:
            if first is not None and index > first:
                break
            started = time.thread_time()
            try:
                is_match = expression.match(module, timeout=_MATCH_SECONDS) is not None
            except TimeoutError:
                raise self._slow(expression.pattern) from None
            self._count_time(started, expression.pattern)
            if is_match:
                return index
        return first

    def _count_time(self, started: float, pattern: str) -> None:
        self._seconds += time.thread_time() - started
        if self._seconds > _SECONDS:
            raise self._slow(pattern)

    def _slow(self, pattern: str) -> Exception:
        return _error(
            f"{self._name}: matching {len(self._expressions)} patterns, such as {quote_for_error(pattern)}, "
            "takes too long"
        )
