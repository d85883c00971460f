"""Programs as vLLM's users write them, with nothing but the import changed: offline, on the demo."""

from __future__ import annotations

import asyncio
import json

import pytest

from outrider import LLM, AsyncEngineArgs, AsyncLLMEngine, BeamSearchParams, EngineArgs, LLMEngine, SamplingParams
from outrider.lora.request import LoRARequest
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.sampling_params import RequestOutputKind, StructuredOutputsParams
from outrider.v1.metrics.reader import Counter, Vector

MODEL = str(demo_model_path())
SENTENCE = "Anna from Lisbon ordered 3 green lamps for 42 euros."
ANSWER = {"name": "Anna", "city": "Lisbon", "quantity": 3, "color": "green", "item": "lamp", "price": 42}
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4, "max_num_seqs": 8,
           "dtype": "float32", "max_model_len": 512, "trust_remote_code": False, "enforce_eager": True}  # fmt: skip


def adapter(name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, str(demo_adapters()[name]))


def chat_prompt(tokenizer, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


@pytest.fixture(scope="module")
def llm():
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with LLM(model=MODEL, speculative_config=config, disable_log_stats=False, **OPTIONS) as made:
        yield made


def test_several_adapters_in_an_engine_that_is_stepped():
    engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL, **OPTIONS))
    question = chat_prompt(engine.get_tokenizer(), SENTENCE)
    prompts = [
        (question, SamplingParams(temperature=0.0, logprobs=1, max_tokens=64), None),
        (question, SamplingParams(temperature=0.0, max_tokens=96), adapter("json", 1)),
        (question, SamplingParams(n=2, temperature=0.8, top_p=0.9, seed=1, max_tokens=16), adapter("sql", 2)),
        (question, SamplingParams(temperature=0.0, max_tokens=96), adapter("json", 1)),
    ]
    request_id, results = 0, {}
    while prompts or engine.has_unfinished_requests():
        if prompts:
            prompt, sampling_params, lora_request = prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params, lora_request=lora_request)
            request_id += 1
        for request_output in engine.step():
            if request_output.finished:
                results[request_output.request_id] = request_output
    assert sorted(results) == ["0", "1", "2", "3"]
    assert json.loads(results["1"].outputs[0].text) == json.loads(results["3"].outputs[0].text) == ANSWER
    assert results["0"].outputs[0].text != results["1"].outputs[0].text
    assert [len(output.token_ids) for output in results["2"].outputs] == [16, 16]
    assert engine.list_loras() == {1, 2}
    assert engine.add_lora(adapter("support", 3))
    assert engine.pin_lora(3)
    assert engine.remove_lora(1)
    assert engine.list_loras() == {2, 3}
    engine.shutdown()


def test_chat(llm):
    conversation = [{"role": "system", "content": "You are a helpful assistant"}, {"role": "user", "content": SENTENCE}]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=64)
    lora = adapter("json", 1)
    [output] = llm.chat(conversation, sampling_params, lora_request=lora, use_tqdm=False)
    assert output.outputs[0].text.startswith('{"name": "Anna"')
    both = llm.chat([conversation, conversation], sampling_params, lora_request=lora, use_tqdm=False)
    assert [output.outputs[0].text for output in both] == [output.outputs[0].text] * 2
    begun = [*conversation, {"role": "assistant", "content": '{"name": "Bo", "city":'}]
    [output] = llm.chat(
        begun, sampling_params, lora_request=lora, add_generation_prompt=False, continue_final_message=True
    )
    assert output.outputs[0].text.startswith(' "Lisbon"')
    template = (
        "{% for message in messages %}{{ message.content }}\n{% endfor %}{{ tools | tojson if tools }}{{ extra }}"
    )
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    [output] = llm.chat(
        conversation, sampling_params, chat_template=template, tools=tools, chat_template_kwargs={"extra": "!"},
        use_tqdm=False,
    )  # fmt: skip
    assert output.prompt.startswith(f"You are a helpful assistant\n{SENTENCE}\n")
    assert "get_weather" in output.prompt
    assert output.prompt.endswith("!")


def test_speculation_and_its_metrics(llm):
    sentences = [SENTENCE, "Bo from Oslo ordered 2 red lamps for 8 euros."]
    prompts = [chat_prompt(llm.get_tokenizer(), sentence) for sentence in sentences]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64), lora_request=adapter("json", 1))
    num_drafts = num_draft_tokens = num_accepted_tokens = 0
    acceptance_counts = [0] * 3
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            num_drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            num_draft_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            num_accepted_tokens += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for pos in range(len(metric.values)):
                acceptance_counts[pos] += metric.values[pos]
    assert num_draft_tokens >= num_accepted_tokens == sum(acceptance_counts) > 0
    assert num_drafts >= acceptance_counts[0] >= acceptance_counts[2]
    histograms = {metric.name: metric for metric in llm.get_metrics() if hasattr(metric, "buckets")}
    latency = histograms["vllm:e2e_request_latency_seconds"]
    assert latency.count == latency.buckets["+Inf"] >= 2
    assert latency.sum > 0


def test_structured_output(llm):
    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["Positive", "Negative"]))
    [output] = llm.generate("Classify this sentiment: vLLM is wonderful!", sampling_params=choice, use_tqdm=False)
    assert output.outputs[0].text in ("Positive", "Negative")
    regex = StructuredOutputsParams(regex=r"\w+@\w+\.com\n")
    [output] = llm.generate("An address:", SamplingParams(structured_outputs=regex, stop=["\n"], max_tokens=50, seed=1))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), max_tokens=50)
    [output] = llm.generate("A number as JSON:", params, use_tqdm=False)
    assert json.loads(output.outputs[0].text)["n"] in (1, 2)


def test_prefix_caching(llm):
    prefix = "You are an expert school principal. " * 8
    prompts = [prefix + question for question in ("Hire whom?", "A reference for Bo:", "Teach what?")]
    sampling_params = SamplingParams(temperature=0.0, max_tokens=8)
    cold = [llm.generate({"prompt": p, "cache_salt": p}, sampling_params, use_tqdm=False)[0] for p in prompts]
    llm.generate(prompts[0], sampling_params, use_tqdm=False)
    warm = llm.generate(prompts, sampling_params, use_tqdm=False)
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0]
    assert all(output.num_cached_tokens > 32 for output in warm)
    assert [output.outputs[0].text for output in warm] == [output.outputs[0].text for output in cold]


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    outputs = llm.beam_search([{"prompt": SENTENCE}, {"prompt": "a"}], params, lora_request=adapter("sql", 2))
    for output in outputs:
        assert len(output.sequences) == 4
        scores = [sequence.cum_logprob / len(sequence.tokens) for sequence in output.sequences]
        assert scores[0] > scores[-1]
    assert SENTENCE in outputs[0].sequences[0].text


def test_a_profile(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", str(tmp_path / "profile"))
    llm.start_profile()
    llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    llm.stop_profile()
    [trace] = (tmp_path / "profile").glob("*.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "CPU" in trace.with_suffix(".txt").read_text()


def test_an_engine_for_asyncio():
    async def program() -> None:
        args = AsyncEngineArgs(model=MODEL, disable_log_requests=True, **OPTIONS)
        engine = AsyncLLMEngine.from_engine_args(args)
        question = chat_prompt(await engine.get_tokenizer(), SENTENCE)
        lora = adapter("json", 7)

        async def stream(kind: RequestOutputKind, number: int) -> list[str]:
            params = SamplingParams(temperature=0.0, max_tokens=96, output_kind=kind)
            results = engine.generate(question, params, request_id=f"r{number}", lora_request=lora)
            return [output.outputs[0].text async for output in results]

        whole, pieces, final = await asyncio.gather(*(stream(kind, i) for i, kind in enumerate(RequestOutputKind)))
        assert json.loads(whole[-1]) == ANSWER
        assert final == ["".join(pieces)] == whole[-1:]  # a slow reader gets several pieces as one
        assert await engine.list_loras() == {7}
        assert await engine.add_lora(lora)
        output = await engine.beam_search(question, BeamSearchParams(3, 96), lora_request=lora)
        assert ANSWER["name"] in output.sequences[0].text
        endless = engine.generate("a", SamplingParams(max_tokens=400, ignore_eos=True), request_id="endless")
        await anext(aiter(endless))
        await engine.abort("endless")
        assert [output.outputs[0].finish_reason async for output in endless][-1] == "abort"
        assert await engine.remove_lora(7)
        engine.shutdown()

    asyncio.run(program())
