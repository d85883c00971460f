"""`skip_tokenizer_init`: token ids in and out, of a folder that has no tokenizer's files."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, BeamSearchParams, LLMEngine, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_draft_path, demo_eagle3_path, demo_model_path
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.structured_outputs import StructuredOutputsParams

DRAFTERS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": str(demo_draft_path()), "num_speculative_tokens": 4},
}
JSON = LoRARequest("json", path=str(demo_adapters()["json"]))
PARAMS = SamplingParams(temperature=0, max_tokens=60, logprobs=1, prompt_logprobs=0)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model without its tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(demo_model_path() / name, folder / name)
    return str(folder)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The prompt's ids, and the answers of an engine that has a tokenizer."""
    with LLM(str(demo_model_path()), enable_lora=True) as llm:
        messages = [{"role": "user", "content": "Anna from Lisbon ordered 3 green lamps for 42 euros."}]
        chats = [llm.chat(messages, PARAMS, lora, use_tqdm=False)[0] for lora in (None, JSON)]
    return {"prompt": chats[0].prompt_token_ids, "ids": [chat.outputs[0].token_ids for chat in chats]}


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_token_ids_in_and_out(bare: str, expected: dict[str, Any], drafter: str) -> None:
    options = {"enable_lora": True, "skip_tokenizer_init": True, "speculative_config": DRAFTERS[drafter]}
    with LLM(bare, **options) as llm:
        outputs = llm.generate([expected["prompt"]] * 2, PARAMS, [None, JSON], use_tqdm=False)
        beams = llm.beam_search([expected["prompt"]], BeamSearchParams(beam_width=2, max_tokens=6))[0].sequences
        several = llm.generate([expected["prompt"]], SamplingParams(n=3, max_tokens=4, seed=1), use_tqdm=False)[0]
        vector = llm.embed([expected["prompt"]], use_tqdm=False)[0].outputs.embedding
    assert [output.outputs[0].token_ids for output in outputs] == expected["ids"]
    for output in outputs:
        answer = output.outputs[0]
        assert (answer.text, answer.finish_reason) == ("", "stop")
        for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert entry[token_id].decoded_token is None
        assert len(output.prompt_logprobs or []) == len(expected["prompt"])
    assert [beam.text for beam in beams] == ["", ""]
    assert beams[0].tokens[len(expected["prompt"]) :] == expected["ids"][0][:6]
    assert [len(sequence.token_ids) for sequence in several.outputs] == [4] * 3
    assert len(vector) == 256


def test_calls_that_need_text_name_the_option(bare: str) -> None:
    calls: list[tuple[str, Callable[[LLM], object]]] = [
        ("prompt", lambda llm: llm.generate("hello", use_tqdm=False)),
        ("messages", lambda llm: llm.chat([{"role": "user", "content": "hello"}], use_tqdm=False)),
        ("skip_tokenizer_init", lambda llm: llm.get_tokenizer()),
        ("prompt", lambda llm: llm.embed(["hello"], use_tqdm=False)),
    ]
    constraint = StructuredOutputsParams(regex="a")
    for name, value in (("stop", ["x"]), ("bad_words", ["x"]), ("structured_outputs", constraint)):
        params: Any = {name: value}
        calls.append((name, lambda llm, p=params: llm.generate([5], SamplingParams(**p), use_tqdm=False)))
    with LLM(bare, skip_tokenizer_init=True) as llm:
        for param, call in calls:
            with pytest.raises(InvalidRequestError, match="needs the tokenizer, which skip_tokenizer_init") as caught:
                call(llm)
            assert (caught.value.param or "").startswith(param)
        answer = llm.generate([5], SamplingParams(max_tokens=2, stop_token_ids=[7]), use_tqdm=False)[0]
    assert answer.outputs[0].token_ids


def test_without_the_option_the_error_names_it(bare: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer could be loaded.*skip_tokenizer_init"):
        LLM(bare)


def test_async_llm_and_llm_engine_without_a_tokenizer(bare: str, expected: dict[str, Any]) -> None:
    async def stream() -> list[int]:
        async with AsyncLLM(bare, skip_tokenizer_init=True) as llm:
            deltas = [output async for output in llm.generate(expected["prompt"], PARAMS, delta=True)]
            with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
                await llm.get_tokenizer()
        assert all(output.outputs[0].text == "" for output in deltas)
        return [token_id for output in deltas for token_id in output.outputs[0].token_ids]

    assert asyncio.run(stream()) == expected["ids"][0]
    engine = LLMEngine.from_engine_args(EngineArgs(model=bare, skip_tokenizer_init=True))
    try:
        engine.add_request("0", {"prompt_token_ids": expected["prompt"]}, PARAMS)
        while engine.has_unfinished_requests():
            [output] = engine.step() or [None]
    finally:
        engine.shutdown()
    assert output.outputs[0].token_ids == expected["ids"][0]
