"""The suffix tree compared with counts over every position of every text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.spec_decode.drafters.suffix.tree import SuffixTree, Text

texts = st.integers(1, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab), max_size=40))


def occurrences(string: list[int], counted: list[tuple[list[int], int]]) -> int:
    """Positions of `string` among the first n of each (text, n)."""
    return sum(t[p : p + len(string)] == string for t, n in counted for p in range(n))


def nodes(tree: SuffixTree) -> list:
    """All but the root."""
    found, todo = [], [tree._root]
    while todo:
        children = list((todo.pop().children or {}).values())
        found += children
        todo += children
    return found


def check_shape(tree: SuffixTree) -> None:
    """The counter is right, edges are compressed, the best child is one of the most frequent."""
    assert tree.num_nodes == len(nodes(tree))
    for node in [tree._root, *nodes(tree)]:
        counts = [child.count for child in (node.children or {}).values()]
        assert all(key == child.text[child.start] for key, child in (node.children or {}).items())
        if node is not tree._root:
            assert node.count > 0
            assert sum(counts) <= node.count
            assert len(counts) != 1 or counts[0] < node.count
        if node.best is not None:
            assert node.best is node.children[node.best.text[node.best.start]]
            assert node.best.count == max(counts)


def strings(tokens: list[int], depth: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[a:b]) for a in range(len(tokens)) for b in range(a + 1, min(a + depth, len(tokens)) + 1)}


def longest_repeated(tokens: list[int], depth: int) -> int:
    for length in range(min(depth, len(tokens)) - 1, 0, -1):
        start = len(tokens) - length
        if any(tokens[p : p + length] == tokens[start:] for p in range(start)):
            return length
    return 0


@settings(max_examples=70)
@given(texts, st.integers(2, 9), st.data())
def test_a_growing_text(tokens, depth, data):
    tree, text = SuffixTree(depth), Text([])
    while len(text.tokens) < len(tokens):
        step = data.draw(st.integers(1, 6))
        text.tokens += tokens[len(text.tokens) : len(text.tokens) + step]
        assert tree.extend(text) == longest_repeated(text.tokens, depth)
        so_far = list(text.tokens)
        for string in strings(so_far, depth):
            place = tree.find(string, 0, len(string))
            assert place is not None
            assert place.length == len(string)
            assert place.node.count == occurrences(list(string), [(so_far, text.num_counted)])
        assert len(so_far) - text.num_counted == longest_repeated(so_far, depth)
        assert tree.num_nodes == len(nodes(tree))
    assert tree.num_nodes <= 2 * len(tokens)


@pytest.mark.slow
@settings(max_examples=70)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(2, 8), st.data())
def test_texts_come_and_go(all_tokens, depth, data):
    tree, inside, known = SuffixTree(depth), [], [Text(list(tokens)) for tokens in all_tokens]
    everything = set().union(*(strings(tokens, depth) for tokens in all_tokens))
    for text in known:
        while text.num_counted < len(text.tokens):
            tree.insert(text, data.draw(st.integers(1, 30)))
            counted = [(t.tokens, t.num_counted) for t in [*inside, text]]
            _compare(tree, everything, counted)
        inside.append(text)
        while inside and data.draw(st.booleans()):
            gone = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            while gone.num_counted:
                tree.remove(gone, data.draw(st.integers(1, 30)))
                _compare(tree, everything, [(t.tokens, t.num_counted) for t in [*inside, gone]])
            assert all(node.text is not gone.tokens for node in nodes(tree))
            _compare(tree, everything, [(t.tokens, t.num_counted) for t in inside])
    for text in inside:
        tree.remove(text, len(text.tokens))
    assert tree.num_nodes == 0
    assert not tree._root.children


def _compare(tree, everything, counted):
    check_shape(tree)
    assert tree.num_nodes <= 2 * sum(n for _, n in counted)
    for string in everything:
        place = tree.find(string, 0, len(string))
        assert (place.node.count if place else 0) == occurrences(list(string), counted)


@pytest.mark.slow
@settings(max_examples=70)
@given(
    st.lists(texts, min_size=1, max_size=4),
    st.integers(2, 8),
    st.integers(1, 6),
    st.floats(0, 1),
    st.booleans(),
    st.data(),
)
def test_the_most_frequent_way_is_taken(all_tokens, depth, limit, min_prob, remove, data):
    tree, known = SuffixTree(depth), [Text(list(tokens)) for tokens in all_tokens]
    for text in known:
        tree.insert(text, len(text.tokens))
    if data.draw(st.booleans()):
        gone = known.pop(data.draw(st.integers(0, len(known) - 1)))
        tree.remove(gone, len(gone.tokens))
    counted = [(t.tokens, t.num_counted) for t in known]
    everything = sorted(set().union(*(strings(t.tokens, depth) for t in known)))
    if not everything:
        return
    way = list(data.draw(st.sampled_from(everything)))
    got = tree.continuation(tree.find(way, 0, len(way)), limit, min_prob)
    prob, score, vocab = 1.0, 0.0, {token for tokens in all_tokens for token in tokens}
    for token in got.token_ids:
        follow = {t: occurrences([*way, t], counted) for t in vocab}
        assert follow[token] == max(follow.values()) > 0
        prob *= follow[token] / occurrences(way, counted)
        score += prob
        way.append(token)
    assert abs(got.score - score) < 1e-9
    assert not got.token_ids or prob >= min_prob - 1e-12
    if len(got.token_ids) < limit and len(way) < depth:
        most = max(occurrences([*way, t], counted) for t in vocab)
        assert most == 0 or prob * most / occurrences(way, counted) < min_prob + 1e-12


def test_a_growing_text_goes_on_with_its_own_copy():
    tree, text = SuffixTree(20), Text([7, 1, 2, 3, 1, 2, 3, 1, 2])
    matched = tree.extend(text)
    assert matched == 5
    place = tree.find(text.tokens, len(text.tokens) - matched, len(text.tokens))
    assert tree.continuation(place, 7, 0.1).token_ids == [3, 1, 2, 3, 1, 2, 3]


def test_the_last_of_equally_frequent_continuations_is_taken():
    tree = SuffixTree(4)
    for tokens in ([1, 2, 5], [1, 2, 6], [1, 2, 5], [1, 2, 6]):
        tree.insert(Text(tokens), 3)
    assert tree.continuation(tree.find([1, 2], 0, 2), 1, 0.0) == ([6], 0.5)
    assert tree.continuation(tree.find([1, 2], 0, 2), 1, 0.51) == ([], 0.0)


def test_absent_text_is_not_found():
    tree = SuffixTree(4)
    assert tree.find([1], 0, 1) is None
    tree.insert(Text([1, 2, 3, 4, 5]), 5)
    assert tree.find([2, 3], 0, 0) is None
    assert tree.find([2, 4], 0, 2) is None
    assert tree.find([1, 2, 3, 4, 5], 0, 5) is None  # deeper than the tree
    assert tree.find([9, 4, 5, 9], 1, 3).length == 2
