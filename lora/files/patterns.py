"""`rank_pattern` and `alpha_pattern`: values of modules by regular expressions, as PEFT's `get_pattern_key` finds them.

They come with the adapter, from whoever uploaded it. PEFT itself writes thousands that are plain names (one a module),
which are looked up; regular expressions are few, and the time for all of them together is bounded.
"""

from __future__ import annotations

import re
import time
from typing import Any

import regex

from ...platform.core.errors import AdapterError
from ...platform.core.sampling_params import shown
from ..step_yield import yield_to_steps

MAX_PATTERNS = 1 << 14
"""Patterns of one field. A model with experts has some thousands of modules."""
MAX_EXPRESSIONS = 256
"""Regular expressions among the patterns of one field."""
MAX_LENGTH = 1000
"""Characters of a pattern."""
_MATCH_SECONDS = 0.1
"""Seconds of one match; some expressions take exponential time."""
_SECONDS = 0.5
"""Seconds of all matches of one field: a thousand modules by 256 simple expressions take half of it."""
_PLAIN = re.compile(r"\^?(?:[\w.-]|\\\.)+\$?", re.ASCII)


def _error(message: str) -> AdapterError:
    return AdapterError(f"adapter_config.json: {message}", param="lora_path")


class Patterns:
    """One field's patterns, of which the first that matches a module's name, or a dotted end of it, counts."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        """`name`: of the field, for errors.

        Raises:
            AdapterError: there are too many, one is too long or no regular expression.
        """
        if len(values) > MAX_PATTERNS:
            raise _error(f"{name} has {len(values)} patterns; at most {MAX_PATTERNS} are read")
        self.items = tuple(values.items())
        self._name = name
        self._ends: dict[str, int] = {}  # plain names -> the place of the first among the items
        self._whole: dict[str, int] = {}  # those that begin with "^"
        self._expressions: list[tuple[int, Any]] = []
        self._seconds = 0.0
        self._found: dict[str, int | None] = {}  # places by module
        for place, pattern in enumerate(values):
            if len(pattern) > MAX_LENGTH:
                raise _error(f"{name}: a pattern has {len(pattern)} characters; at most {MAX_LENGTH} are read")
            if _PLAIN.fullmatch(pattern):
                names = self._whole if pattern[0] == "^" else self._ends
                names.setdefault(pattern.removeprefix("^").removesuffix("$").replace("\\.", "."), place)
            else:
                self._expressions.append((place, self._compiled(pattern)))
            if len(self._expressions) > MAX_EXPRESSIONS:
                raise _error(f"{name} has more than {MAX_EXPRESSIONS} regular expressions")

    def _compiled(self, pattern: str) -> Any:
        started = time.thread_time()
        try:
            regex.compile(pattern)  # by itself: a bracket too many would fit the one that is put around it
            return regex.compile(rf"(.*\.)?({pattern})$")
        except (regex.error, OverflowError, RecursionError) as error:
            message = f"{self._name}: {shown(pattern)} is no regular expression: {error}"
            raise _error(message) from None
        finally:
            self._took(started, pattern)

    def find(self, module: str, default: Any) -> Any:
        """The value of a module, named as in the model that PEFT was given.

        Raises:
            AdapterError: the expressions take too long.
        """
        if module not in self._found:
            self._found[module] = self._place(module)
            yield_to_steps()
        place = self._found[module]
        return default if place is None else self.items[place][1]

    def _place(self, module: str) -> int | None:
        places = [self._whole.get(module)]
        end: str = module
        while end:
            places.append(self._ends.get(end))
            end = end.partition(".")[2]
        first = min((place for place in places if place is not None), default=None)
        for place, expression in self._expressions:
            if first is not None and place > first:
                break
            started = time.thread_time()
            try:
                is_match = expression.match(module, timeout=_MATCH_SECONDS) is not None
            except TimeoutError:
                raise self._slow(expression.pattern) from None
            self._took(started, expression.pattern)
            if is_match:
                return place
        return first

    def _took(self, started: float, pattern: str) -> None:
        self._seconds += time.thread_time() - started
        if self._seconds > _SECONDS:
            raise self._slow(pattern)

    def _slow(self, pattern: str) -> Exception:
        return _error(
            f"{self._name}: matching {len(self._expressions)} patterns, such as {shown(pattern)}, takes too long"
        )
