"""Answers under a grammar: they have its form, and their bytes do not depend on drafts, adapters or preemption."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from dataclasses import dataclass

import pytest

from outrider import LLM, InvalidRequestError, LoRARequest, SamplingParams, StructuredOutputsParams
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.sampling import grammars
from outrider.platform.engine.sampling.grammar_state import GrammarState
from outrider.platform.http.openai.tools.choice import parse_tool_choice
from outrider.platform.http.openai.tools.parser import ForcedCalls

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["new", "sale"]}, "maxItems": 2},
    },
    "required": ["name", "quantity", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "order", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
PROMPTS = ["Anna from Lisbon ordered 3 green lamps for 42 euros.", "SELECT", "Hello", "a b c a b c a b"]
CONSTRAINTS = [
    {"json": SCHEMA},
    {"regex": "[a-z]{3,9} [0-9]{2}"},
    {"choice": ["yes indeed", "no"]},
    {"grammar": 'start: "(" (start | /[a-c]{1,3}/) ")"'},
]
ADAPTERS = [None, "json", "bare"]
"""None, one with draft weights, and the same one without."""
SPECULATION = {
    "off": None,
    "eagle3": {"method": "eagle3", "model": str(demo_model_path().parent / "eagle3"), "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "adaptive": False},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4, "adaptive": False},
    "adaptive": {"method": "ngram"},
    "draft_model": {"method": "draft_model", "model": str(demo_model_path().parent / "draft")},
}
FEW = pytest.mark.parametrize("llm", list(SPECULATION)[:3], indirect=True)
"""For what hardly depends on the drafter: none, one of networks, and prompt lookup."""


@pytest.fixture(scope="module", params=SPECULATION)
def llm(request, tmp_path_factory):
    loras = {"enable_lora": True, "max_lora_rank": 32}
    engine = LLM(
        str(demo_model_path()),
        dtype="float32",
        speculative_config=SPECULATION[request.param],
        max_model_len=256,
        **loras,
    )
    for name, folder in demo_adapters().items():
        engine.load_lora_adapter(LoRARequest(name, path=str(folder)))
    bare = tmp_path_factory.mktemp("bare")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(demo_adapters()["json"] / file, bare)
    engine.load_lora_adapter(LoRARequest("bare", path=str(bare)))
    yield engine
    engine.shutdown()


def params(constraint, **changes):
    fields = {"temperature": 0, "max_tokens": 90, **changes}
    return SamplingParams(structured_outputs=StructuredOutputsParams(**constraint), **fields)


def texts(llm, **changes):
    """Texts of each form and of a forced call, by each adapter, in one batch."""
    wanted = [params(constraint, **changes) for constraint in CONSTRAINTS]
    forced = parse_tool_choice(Body(TOOLS, "required")).constraint()
    wanted.append(SamplingParams(**{"temperature": 0, "max_tokens": 60, **changes}, structured_outputs=forced))
    asked = list(itertools.product(zip([*PROMPTS, PROMPTS[0]], wanted, strict=True), ADAPTERS))
    prompts, wanted = zip(*(pair for pair, _ in asked), strict=True)
    outputs = llm.generate(prompts, wanted, lora_request=[name for _, name in asked], use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


EXPECTED: dict[str, list[str]] = {}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5, "top_p": 0.9}])
def test_outputs_match_their_grammars_with_and_without_drafts(llm, sampling):
    found = texts(llm, **sampling)
    for by_json, by_regex, by_choice, by_grammar, call in (found[adapter::3] for adapter in range(3)):
        assert set(json.loads(by_json)) == {"name", "quantity", "tags"}
        assert re.fullmatch(CONSTRAINTS[1]["regex"], by_regex)
        assert by_choice in CONSTRAINTS[2]["choice"]
        assert re.fullmatch(r"\(+[a-c]{1,3}\)+", by_grammar) or len(by_grammar) > 60
        assert '"name": "order"' in call or '"name": "stop"' in call
    assert found[1::3] == found[2::3], "draft weights change no text"
    assert EXPECTED.setdefault(repr(sampling), found) == found
    assert texts(llm, speculative=False, **sampling) == found


def test_other_parameters_combine(llm):
    fields = {"n": 3, "temperature": 1.0, "seed": 3, "logprobs": 2, "repetition_penalty": 1.2, "stop": ["7"]}
    letter = llm.get_tokenizer().encode("q", add_special_tokens=False)[0]
    fields |= {"min_tokens": 5, "bad_words": ["a", "e"], "logit_bias": {letter: 3.0}, "presence_penalty": 0.3}
    output = llm.generate(PROMPTS[0], params(CONSTRAINTS[1], **fields), use_tqdm=False)[0]
    for choice in output.outputs:
        assert re.fullmatch(r"[a-z]{3,9}( ([0-9]{0,2})?)?", choice.text)
        assert not {"a", "e"} & set(llm.get_tokenizer().convert_ids_to_tokens(choice.token_ids))
        assert len(choice.logprobs) == len(choice.token_ids) >= 5
    same = llm.generate(PROMPTS[0], params(CONSTRAINTS[1], **fields, speculative=False), use_tqdm=False)[0]
    assert [choice.text for choice in same.outputs] == [choice.text for choice in output.outputs]
    free = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0].text
    wanted = [SamplingParams(temperature=0, max_tokens=8), params(CONSTRAINTS[0])]
    assert llm.generate([PROMPTS[0]] * 2, wanted, use_tqdm=False)[0].outputs[0].text == free


@FEW
def test_ignore_eos_after_the_grammars_end_gives_only_end_tokens(llm):
    wanted = params({"regex": "(ab){2}"}, ignore_eos=True, max_tokens=24)
    output = llm.generate("Hello", wanted, use_tqdm=False)[0].outputs[0]
    assert output.text == "abab"
    assert len(output.token_ids) == 24
    assert len(set(output.token_ids[-18:])) == 1


@FEW
def test_a_request_without_an_allowed_token_is_an_error_of_that_request(llm):
    banned = params(
        {"choice": ["yes"]}, allowed_token_ids=[llm.get_tokenizer().encode("Q", add_special_tokens=False)[0]]
    )
    with pytest.raises(InvalidRequestError, match="structured_outputs, allowed_token_ids"):
        llm.generate("x", banned, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="uniqueItems"):
        llm.generate("x", params({"json": {"type": "array", "uniqueItems": True}}), use_tqdm=False)
    assert llm.generate("x", params({"choice": ["fine"]}), use_tqdm=False)[0].outputs[0].text == "fine"


@FEW
def test_a_grammar_that_becomes_too_complex_is_an_error(llm):
    rules = [f'r{index}: "x" r{index} | "y" r{index} | "w"' for index in range(1000)]
    grammar = "\n".join([f'start: "z" ({" | ".join(f"r{index}" for index in range(1000))})', *rules])
    with pytest.raises(InvalidRequestError, match="structured_outputs: the grammar is too complex at this point"):
        llm.generate("x", params({"grammar": grammar}), use_tqdm=False)
    assert llm.generate("x", params({"choice": ["fine"]}), use_tqdm=False)[0].outputs[0].text == "fine"


def test_preemption_keeps_the_grammar_state():
    engine = LLM(str(demo_model_path()), dtype="float32", max_model_len=256, num_gpu_blocks_override=18, block_size=16)
    wanted = [params(CONSTRAINTS[0], ignore_eos=False) for _ in range(6)]
    outputs = engine.generate([PROMPTS[0] * 2] * 6, wanted, use_tqdm=False)
    assert engine.stats().num_preemptions > 0
    assert len({output.outputs[0].text for output in outputs}) == 1
    json.loads(outputs[0].outputs[0].text)
    engine.shutdown()


def test_grammars_of_a_step_in_flight_are_not_changed(monkeypatch):
    """A chunk of a prompt is committed while the chunk after it, which samples, runs in a thread."""
    asked, forced = [], GrammarState.forced

    def recorded(state, tokens, most, deadline):
        asked.append(list(tokens))
        return forced(state, tokens, most, deadline)

    monkeypatch.setattr(GrammarState, "forced", recorded)
    with LLM(max_model_len=256, max_num_batched_tokens=8, async_scheduling=True) as llm:
        params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(regex="yes indeed"))
        request_id = llm.llm_engine.add_request("0", PROMPTS[0], params)
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
            assert all(asked)
    assert asked
    assert outputs[0].request_id == request_id
    assert outputs[0].outputs[0].text == "yes indeed"


def test_a_shared_grammar_ends_with_each_requests_end_tokens():
    """End tokens are in the masks: with those of the request before an answer would never end."""
    engine = EngineCore(EngineArgs(max_model_len=64))
    wanted, ended = params({"choice": ["yes"]}, max_tokens=9), {}
    for end in (70, 71, 70):
        engine.add_request(EngineRequest(f"{end}", [5, 6], wanted, [end]))
        while engine.has_work():
            for delta in engine.step():
                ended[delta.request_id] = (delta.token_ids[-1:], delta.finish_reason)
        assert ended.pop(f"{end}") == ([end], "stop")
    engine.shutdown()


def test_the_grammar_vocabulary_is_built_once_at_start(monkeypatch):
    """It takes 0.5 s for 50,000 tokens, so an engine of a server has it before it is ready; all grammars share it."""
    made = []
    make = grammars._vocabulary
    monkeypatch.setattr(grammars, "_vocabulary", lambda *given: made.append(1) or make(*given))
    monkeypatch.setattr("outrider.platform.engine.setup.leaves_a_core_free", lambda: True)
    engine = EngineCore(EngineArgs(max_model_len=64))
    assert len(made) == 1
    for index, wanted in enumerate(CONSTRAINTS):
        given = params(wanted, max_tokens=4)
        engine.add_request(EngineRequest(f"{index}", [5, 6], given, [70 + index]))
    num_tokens = 0
    while engine.has_work():
        num_tokens += sum(len(delta.token_ids) for delta in engine.step())
    engine.shutdown()
    assert num_tokens > len(CONSTRAINTS)
    assert len(made) == 1


def test_tokens_without_a_choice_need_fewer_steps():
    engine = LLM(str(demo_model_path()), dtype="float32", max_model_len=256)
    steps = []
    for speculative in (None, False):
        before = engine.stats().num_steps
        wanted = params({"json": {"const": {"a long constant name": "and its value"}}}, speculative=speculative)
        text = engine.generate("x", wanted, use_tqdm=False)[0].outputs[0].text
        assert json.loads(text) == {"a long constant name": "and its value"}
        steps.append(engine.stats().num_steps - before)
    assert steps[0] < steps[1] / 2
    engine.shutdown()


@FEW
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "order"}}])
def test_forced_calls_of_tools_fit_their_schemas(llm, choice):
    forced = parse_tool_choice(Body(TOOLS, choice))
    wanted = SamplingParams(temperature=0, max_tokens=110, structured_outputs=forced.constraint())
    text = llm.generate(PROMPTS[0], wanted, lora_request="json", use_tqdm=False)[0].outputs[0].text
    parser = ForcedCalls(forced.name)
    deltas = [*parser.feed(text), *parser.finish()]
    calls = [call for delta in deltas for call in delta["tool_calls"]]
    assert calls[0]["function"]["name"] in ("order", "stop")
    arguments = json.loads("".join(call["function"]["arguments"] for call in calls if call["index"] == 0))
    assert set(arguments) <= set(SCHEMA["properties"])


@dataclass
class Body:
    tools: list[dict]
    tool_choice: object
    parallel_tool_calls: bool | None = False
