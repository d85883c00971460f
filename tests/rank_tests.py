"""Tests that two ranks compute one model, be they processes or actors; with the fixtures that they share.

A module imports the fixtures, has its own `llm` of NUM_BLOCKS, and derives a class from `RankTests`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters

from .rank_texts import OPTIONS, PROMPTS, long_texts, num_accepted, preempted_texts, texts


@pytest.fixture(scope="module")
def whole() -> Iterator[LLM]:
    """An engine of one process."""
    with LLM(**OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def expected(whole: LLM) -> list[str]:
    return texts(whole)


class RankTests:
    def test_two_ranks_write_the_text_of_one(self, llm: LLM, expected: list[str]) -> None:
        assert texts(llm) == expected
        assert num_accepted(llm) > 10, "drafts are accepted"
        llm.llm_engine.engine_core.check_integrity()

    def test_preempted_requests_write_the_same(self, llm: LLM, whole: LLM) -> None:
        assert preempted_texts(llm) == long_texts(whole)

    def test_adapters_are_loaded_and_unloaded(self, llm: LLM, expected: list[str]) -> None:
        request = LoRARequest("mine", path=str(next(iter(demo_adapters().values()))))
        greedy = SamplingParams(max_tokens=12, temperature=0)
        llm.load_lora_adapter(request, pinned=True)
        assert llm.generate(PROMPTS[:1], greedy, lora_request=request)[0].outputs[0].text == expected[len(PROMPTS)]
        llm.unload_lora_adapter("mine")
        assert llm.generate(PROMPTS[:1], greedy)[0].outputs[0].text == expected[0]
