"""End of a list of calls before its tokens are used up: a list that is cut off inside a call is no answer.

A model may go on with calls that nobody asked for. It may add one if the tokens that are left can hold another as long
as the longest so far, and a quarter more.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

_BEGIN = b'[{"name"'
"""Beginning of a list of calls; reasoning may stand before it."""
_PARTS = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)
"""Strings, in which brackets mean nothing, brackets, and commas."""
_AFTER_LIST = 2
"""Tokens that follow the last item: "]", and the one that ends the answer."""


def next_items(texts: Sequence[bytes], choices: Sequence[bytes], num_left: int) -> list[int]:
    """Indices of the choices that begin another item for which there are too few tokens.

    Args:
        texts: Texts of the tokens so far.
        choices: Texts of all tokens that may come next.
        num_left: Number of tokens that may still come.
    """
    whole = b"".join(texts)
    begin = whole.find(_BEGIN)
    if begin < 0:
        return []
    found = []
    for index, choice in enumerate(choices):
        if not (b"}," in choice or (choice[:1] == b"," and whole[-1:] == b"}")):
            continue
        lengths = _lengths_before_comma([*texts, choice], begin)
        longest = max(lengths, default=0)
        if lengths and num_left < longest + longest // 4 + _AFTER_LIST:
            found.append(index)
    return found


def _lengths_before_comma(texts: Sequence[bytes], begin: int) -> list[int]:
    """Number of tokens of each item of the list that begins at `begin`; empty if the last one of `texts`, those of the
    tokens, does not begin another one."""
    whole = b"".join(texts)
    ends = [*accumulate(map(len, texts))]
    depth, first = 0, bisect_left(ends, begin + 1)
    lengths: list[int] = []
    is_next = False
    for part in _PARTS.finditer(whole, begin):
        depth += (part[0] in b"[{") - (part[0] in b"]}")
        if depth == 1 and part[0] == b"," and bisect_left(ends, part.end()) == len(texts) - 1:
            is_next = True
        if depth == 1 and part[0] == b"}":
            index = bisect_left(ends, part.end())
            lengths.append(index - first)
            first = index
    return lengths if is_next else []
