"""Search for several stop strings at once, character by character (Aho and Corasick, CACM 18(6), 1975).

Its cost is a small constant a character, however many stop strings there are and however long they are. The state after
a text is its longest suffix that is a prefix of a stop string, however the text is split into pieces.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import NamedTuple


class Found(NamedTuple):
    """A stop string in the text that was fed."""

    end: int
    """Characters of the fed text up to its end."""
    stop: str


class StopAutomaton(NamedTuple):
    """The trie of the stop strings; a node stands for a prefix of one of them, node 0 for the empty text."""

    children: list[dict[str, int]]
    suffix: list[int]
    """For each node the node of its longest proper suffix that is in the trie."""
    stop: list[str | None]
    """For each node the longest stop string that ends there."""
    num_held: list[int]
    """Characters at the end of the text that may still become a stop string."""


@functools.lru_cache(maxsize=64)
def stop_automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of `stops`; all sequences of a request share one."""
    children: list[dict[str, int]] = [{}]
    ends: list[str | None] = [None]
    depth = [0]
    for stop in stops:
        node = 0
        for char in stop:
            child = children[node].get(char)
            if child is None:
                child = children[node][char] = len(children)
                children.append({})
                ends.append(None)
                depth.append(depth[node] + 1)
            node = child
        ends[node] = stop
    suffix = [0] * len(children)
    held = [depth[node] if children[node] else 0 for node in range(len(children))]
    waiting = deque(children[0].values())
    while waiting:  # breadth first: suffixes are shorter, and known
        node = waiting.popleft()
        shorter = suffix[node]
        if ends[node] is None:
            ends[node] = ends[shorter]
        held[node] = held[node] or held[shorter]
        for char, child in children[node].items():
            target = shorter
            while target and char not in children[target]:
                target = suffix[target]
            suffix[child] = children[target].get(char, 0)
            waiting.append(child)
    return StopAutomaton(children, suffix, ends, held)


class StopSearch:
    """The search in the text of one sequence."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self._automaton = automaton
        self._node = 0

    def feed(self, text: str, *, stops: bool) -> Found | None:
        """Search on in `text`, up to the first stop string that is complete in it: of those that end at the same
        character, the longest. With `stops` false none is looked for."""
        children, suffix, ends, _ = self._automaton
        node = self._node
        for index, char in enumerate(text):
            while node and char not in children[node]:
                node = suffix[node]
            node = children[node].get(char, 0)
            if stops and ends[node] is not None:
                self._node = node
                return Found(index + 1, ends[node] or "")
        self._node = node
        return None

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that may still become a stop string."""
        return self._automaton.num_held[self._node]
