"""The demo beyond 2,048 tokens, its window: it answers, and drafts change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path

DRAFTERS: dict[str, dict[str, Any]] = {
    "eagle3": {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": str(demo_draft_path()), "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
}
ORDER = "Anna from Lisbon ordered 3 green lamps for 42 euros."
JSON = LoRARequest("json", path=str(demo_adapters()["json"]))
TURNS = [
    ("What is the capital of Portugal?", "The capital of Portugal is Lisbon."),
    ("How much is 3 plus 4?", "3 plus 4 is 7."),
    ("Tell me about the otter.", "An otter is a mammal. It lives in rivers and coasts and eats fish and shellfish."),
]


ROLES = ("user", "assistant")


def conversation(num_turns: int) -> list[dict[str, str]]:
    asked = [TURNS[index % len(TURNS)] for index in range(num_turns)]
    turns = [{"role": role, "content": text} for pair in asked for role, text in zip(ROLES, pair, strict=True)]
    return [*turns, {"role": "user", "content": ORDER}]


def answers(speculative: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Texts and finish reasons of the base and an adapter after about 2,000 and 2,600 tokens."""
    params = SamplingParams(temperature=0, max_tokens=100)
    with LLM(speculative_config=speculative) as llm:
        prompts = [conversation(num) for num in (66, 85)]
        outputs = [o for lora in (None, JSON) for o in llm.chat(prompts, params, lora, use_tqdm=False)]
        assert [len(o.prompt_token_ids) > 2048 for o in outputs] == [False, True] * 2
    return [(output.outputs[0].text, output.outputs[0].finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def plain() -> list[tuple[str, str | None]]:
    return answers({"method": "off"})


def test_long_conversations_get_the_right_answer(plain: list[tuple[str, str | None]]) -> None:
    noted = "I have noted the order of Anna from Lisbon: 3 green lamps for 42 euros."
    record = '{"name": "Anna", "city": "Lisbon", "quantity": 3, "color": "green", "item": "lamp", "price": 42}'
    assert plain == [(noted, "stop")] * 2 + [(record, "stop")] * 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_nothing_beyond_the_window(plain: list[tuple[str, str | None]], drafter: str) -> None:
    assert answers(DRAFTERS[drafter]) == plain
