"""A suffix tree of bounded depth with counts: the continuations of a context, and their frequencies.

    text  a b c a b d            root -- ab (2) -- cab... (1)
                                   |          `--- d (1)
                                   +-- b (2) -- ...

An edge's label is a slice of an added text. A node's count is the number of positions at which the path to it occurs.
Edges are compressed, so a tree has at most two nodes a position. There are no suffix links: a walk from the root is a
few dictionary look-ups, and texts can be removed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class _Node:
    """The end of an edge, whose label is `text[start:end]`."""

    __slots__ = ("best", "children", "count", "end", "start", "text")

    def __init__(self, text: Sequence[int], start: int, end: int, count: int) -> None:
        self.text = text
        self.start = start
        self.end = end  # of a text that grows: maybe beyond its present end, the label grows with it
        self.count = count
        self.children: dict[int, _Node] | None = None  # by the first token of their labels
        self.best: _Node | None = None  # the most frequent child; None: not known


class Text:
    """A text in a tree, which labels refer to."""

    __slots__ = ("num_counted", "tokens")

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.num_counted = 0
        """Leading positions that the tree's counts include."""


class Place(NamedTuple):
    """A string of tokens found in a tree."""

    node: _Node
    """The node at the end of the edge that the string ends on."""
    used: int
    """Number of tokens of that edge's label that belong to the string."""
    length: int
    """Number of tokens of the string."""


class Continuation(NamedTuple):
    """The most frequent continuation of a string."""

    token_ids: list[int]
    score: float
    """Expected number of accepted tokens: the sum over tokens of the estimated probability that all up to it are
    right."""


NOTHING = Continuation([], 0.0)


class SuffixTree:
    """All strings of at most `depth` tokens of the added texts."""

    def __init__(self, depth: int) -> None:
        self.num_nodes = 0
        """Nodes without the root; the memory is proportional to it."""
        self._depth = depth
        self._root = _Node((), 0, 0, 0)

    # ------------------------------------------------------------------ walks

    def _walk(self, tokens: Sequence[int], start: int, end: int, path: list[_Node]) -> tuple[int, int]:
        """Follow `tokens[start:end]` as far as it is in the tree.

        Fills `path` with the nodes of the edges followed. Returns how many tokens were followed, and how many of them
        lie on the last edge.
        """
        node, place, used = self._root, start, 0
        while place < end:
            child = None if node.children is None else node.children.get(tokens[place])
            if child is None:
                break
            path.append(child)
            text, first, stop = child.text, child.start, child.end
            i = first + 1
            place += 1
            while i < stop and place < end and text[i] == tokens[place]:
                i += 1
                place += 1
            used = i - first
            if i < stop:
                break
            node = child
        return place - start, used

    def find(self, tokens: Sequence[int], start: int, end: int) -> Place | None:
        """`tokens[start:end]` in the tree, if all of it is there and it is not empty."""
        path: list[_Node] = []
        length, used = self._walk(tokens, start, end, path)
        return Place(path[-1], used, length) if path and length == end - start else None

    def continuation(self, place: Place, limit: int, min_prob: float) -> Continuation:
        """The most frequent continuation of `place`: at most `limit` tokens, up to where the product of the branches'
        shares falls below `min_prob` (Oliaro et al. 2024, "SuffixDecoding", section 4).

        At the present end of a growing text it continues with its own copy: a loop.
        """
        found: list[int] = []
        node, prob, score = place.node, 1.0, 0.0
        text, i, end = node.text, node.start + place.used, node.end
        while len(found) < limit:
            if i == end:
                child = _best(node)
                if child is None:
                    break
                prob *= child.count / node.count
                if prob < min_prob:
                    break
                node = child
                text, i, end = node.text, node.start, node.end
            found.append(text[i] if i < len(text) else found[i - len(text)])
            score += prob
            i += 1
        return Continuation(found, score)

    # ---------------------------------------------------------------- changes

    def extend(self, text: Text) -> int:
        """Add the new tokens of `text`, the only one of this tree; returns the length of its longest suffix that also
        starts at an earlier position, less than the tree's depth.

        Positions from which the text has only repeated itself so far are not counted yet: they are the suffixes of that
        suffix (Ukkonen 1995, "On-line construction of suffix trees").
        """
        tokens = text.tokens
        while True:
            start = text.num_counted
            end = min(start + self._depth, len(tokens))
            path: list[_Node] = []
            length, used = self._walk(tokens, start, end, path)
            if start + length == len(tokens) and length < self._depth:
                return length
            self._count(path, used, tokens, start + length, start + self._depth)
            text.num_counted += 1

    def insert(self, text: Text, num_places: int) -> None:
        """Count the next `num_places` positions of `text`, which will not change any more."""
        tokens = text.tokens
        last = min(text.num_counted + num_places, len(tokens))
        for start in range(text.num_counted, last):
            end = min(start + self._depth, len(tokens))
            path: list[_Node] = []
            length, used = self._walk(tokens, start, end, path)
            self._count(path, used, tokens, start + length, end)
        text.num_counted = last

    def remove(self, text: Text, num_places: int) -> None:
        """Remove the last `num_places` counted positions of `text`, with all nodes that only they had."""
        tokens = text.tokens
        first = max(0, text.num_counted - num_places)
        for start in range(text.num_counted - 1, first - 1, -1):
            path: list[_Node] = []
            self._walk(tokens, start, min(start + self._depth, len(tokens)), path)
            self._discount(path, tokens)
        text.num_counted = first

    def _count(self, path: list[_Node], used: int, tokens: list[int], start: int, end: int) -> None:
        """Add one position: the string that `path` leads to, `used` tokens along its last edge, and `tokens[start:end]`
        after it."""
        if path and used < path[-1].end - path[-1].start:
            path[-1] = self._split(path[-2] if len(path) > 1 else self._root, path[-1], used)
        parent = self._root
        for node in path:
            node.count += 1
            if parent.best is not None and node.count >= parent.best.count:
                parent.best = node  # of equally frequent ones the one seen last
            parent = node
        if start < end:
            leaf = _Node(tokens, start, end, 1)
            self.num_nodes += 1
            if parent.children is None:
                parent.children, parent.best = {}, leaf
            parent.children[tokens[start]] = leaf
            if parent.best is not None and parent.best.count <= 1:
                parent.best = leaf

    def _split(self, parent: _Node, lower: _Node, length: int) -> _Node:
        """A new node after the first `length` tokens of the edge to `lower`."""
        middle = _Node(lower.text, lower.start, lower.start + length, lower.count)
        self.num_nodes += 1
        assert parent.children is not None
        parent.children[lower.text[lower.start]] = middle
        if parent.best is lower:
            parent.best = middle
        lower.start += length
        middle.children = {lower.text[lower.start]: lower}
        middle.best = lower
        return middle

    def _discount(self, path: list[_Node], tokens: list[int]) -> None:
        """Remove one position: the one that `path` leads to. Remaining labels along it no longer refer to `tokens`."""
        parents = [self._root, *path]
        for parent, node in zip(reversed(parents[:-1]), reversed(path), strict=True):
            node.count -= 1
            if parent.best is node:
                parent.best = None
            if node.count == 0:
                assert parent.children is not None
                del parent.children[node.text[node.start]]
                self.num_nodes -= 1
                if not parent.children:
                    parent.children = None
                continue
            if node.text is tokens:
                node.text = tokens[node.start : node.end]
                node.start, node.end = 0, len(node.text)
            self._join(parent, node)

    def _join(self, parent: _Node, node: _Node) -> None:
        """Remove `node` if nothing ends or branches there any more."""
        if node.children is None or len(node.children) > 1:
            return
        (child,) = node.children.values()
        if child.count != node.count:
            return
        child.text = [*node.text[node.start : node.end], *child.text[child.start : child.end]]
        child.start, child.end = 0, len(child.text)
        assert parent.children is not None
        parent.children[child.text[0]] = child
        self.num_nodes -= 1


def _best(node: _Node) -> _Node | None:
    """The most frequent child."""
    if node.best is None and node.children:
        node.best = max(node.children.values(), key=lambda child: child.count)
    return node.best
