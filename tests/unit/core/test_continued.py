"""Tokens and some more, without a copy: they read as a list of all of them would."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.platform.core.request import Continued

tokens = st.lists(st.integers(0, 9), max_size=6)
places = st.none() | st.integers(-14, 14)


@given(tokens, tokens, tokens, places, places, st.sampled_from([None, 1, 2, -1]))
def test_they_read_as_a_list(known, more, later, start, end, step):
    want = known + more
    view = Continued(known, more)
    known += later  # the sequence goes on
    assert len(view) == len(want)
    assert list(view) == want
    assert view == want
    assert list(reversed(view)) == want[::-1]
    assert view[start:end:step] == want[start:end:step]
    assert isinstance(view[start:end], list)
    for place in range(-len(want), len(want)):
        assert view[place] == want[place]
    for place in (len(want), -len(want) - 1):
        with pytest.raises(IndexError):
            view[place]
    assert view != [*want, 1]


def test_it_holds_the_list_and_no_copy():
    class Uncopied(list):
        def __iter__(self):
            raise AssertionError("all tokens are read")

        def __getitem__(self, index):
            assert not isinstance(index, slice) or index.stop - index.start < 5
            return super().__getitem__(index)

    view = Continued(Uncopied(range(8000)), [1, 2])
    assert len(view) == 8002
    assert (view[-1], view[-3], view[7998:]) == (2, 7999, [7998, 7999, 1, 2])
