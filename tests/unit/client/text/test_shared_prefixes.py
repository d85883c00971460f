"""Length of a prompt's prefix that is declared to be no secret."""

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.client.text.shared_prefixes import SharedPrefixes
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError


def test_only_whole_blocks_of_a_declared_prefix():
    shared = SharedPrefixes([range(10)], block_size=4)
    assert shared.match(list(range(20))) == 8, "the third block holds tokens that were not declared"
    assert shared.match(list(range(9))) == 8
    assert shared.match(list(range(7))) == 4
    assert shared.match([0, 1, 2]) == 0
    assert shared.match([0, 1, 2, 3, 9, 9, 9, 9]) == 4
    assert shared.match([9, 1, 2, 3, 4, 5, 6, 7]) == 0
    assert shared.match([4, 5, 6, 7, 4, 5, 6, 7]) == 0, "a block counts at its own place alone"


def test_without_prefixes_nothing_is_shared():
    assert SharedPrefixes().match(list(range(100))) == 0
    assert SharedPrefixes([[1, 2, 3]], block_size=16).match([1, 2, 3] * 20) == 0


TOKENS = st.lists(st.integers(0, 2), max_size=14)


@given(st.lists(TOKENS, max_size=5), TOKENS, st.integers(1, 4))
def test_the_shared_prefix_is_the_longest_in_whole_blocks(prefixes, prompt, block_size):
    def common(prefix):
        return next(
            (i for i, (a, b) in enumerate(zip(prefix, prompt, strict=False)) if a != b), min(len(prefix), len(prompt))
        )

    expected = max((common(prefix) // block_size * block_size for prefix in prefixes), default=0)
    assert SharedPrefixes(prefixes, block_size).match(prompt) == expected


def test_requests_report_their_shared_prefix(tokenizer):
    """It is the server's doing: a salt takes part in nothing, and no field of a prompt says otherwise."""
    processor = InputProcessor(tokenizer, FakeEngine(EngineArgs(model="x")).info, [1])
    assert processor.prepare("r", list(range(3, 40))).sequences()[0].num_shared_tokens == 0
    processor.shared_prefixes = SharedPrefixes([range(3, 30)], block_size=8)
    assert processor.prepare("r", list(range(3, 40)), SamplingParams(n=2)).sequences()[1].num_shared_tokens == 24
    assert processor.prepare("r", list(range(3, 40)), cache_salt="mine").sequences()[0].num_shared_tokens == 0
    salted = {"prompt_token_ids": list(range(3, 40)), "cache_salt": "mine"}
    assert processor.prepare("r", salted).sequences()[0].num_shared_tokens == 0
    with pytest.raises(InvalidRequestError, match="num_shared_tokens"):
        processor.prepare("r", {"prompt_token_ids": [3, 4], "num_shared_tokens": 2}).sequences()
