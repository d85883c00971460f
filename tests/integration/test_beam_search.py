"""Beam search against a search over transformers' and PEFT's log-probabilities, and against `generate(num_beams=)`."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, BeamSearchParams, InvalidRequestError, LoRARequest, PromptTooLongError, SamplingParams
from outrider.models.demo import demo_adapters, demo_model_path

QUESTIONS = ["How many customers are from Lisbon?", "a"]
OPTIONS = {"enable_lora": True, "dtype": "float32", "speculative_config": None, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(demo_model_path()), **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def reference():
    """The models of transformers and PEFT by the adapter's name."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def load():
        return AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()

    return {None: load(), "sql": PeftModel.from_pretrained(load(), demo_adapters()["sql"]).eval()}


def lora(name):
    return None if name is None else LoRARequest(name, 1, str(demo_adapters()[name]))


def chat_prompt(llm, question):
    messages = [{"role": "user", "content": question}]
    text = llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return {"prompt_token_ids": llm.get_tokenizer().encode(text, add_special_tokens=False)}


@torch.inference_mode()
def brute_force(model, prompt, params, ends):
    """(tokens, log-probability) of the best sequences. Every step computes every beam as a whole, in float32."""
    width, beams, complete = params.beam_width, [(list(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        longer = []
        top = model(torch.tensor([tokens for tokens, _ in beams])).logits[:, -1].log_softmax(-1).topk(2 * width)
        for (tokens, total), ids, logprobs in zip(beams, top.indices.tolist(), top.values.tolist(), strict=True):
            for token, logprob in zip(ids, logprobs, strict=True):
                ended = token in ends and not params.ignore_eos
                (complete if ended else longer).append(([*tokens, token], total + logprob))

        def score(beam):
            length = len(beam[0]) - (beam[0][-1] in ends and not params.ignore_eos)
            return beam[1] / length**params.length_penalty

        beams = sorted(longer, key=score, reverse=True)[:width]
    return sorted([*complete, *beams], key=score, reverse=True)[:width]


PARAMS = [
    BeamSearchParams(beam_width=1, max_tokens=8),
    BeamSearchParams(3, 24),
    BeamSearchParams(4, 8, length_penalty=-1.5),
    BeamSearchParams(2, 16, ignore_eos=True, length_penalty=0.0),
]


@pytest.mark.parametrize(("params", "name"), zip(PARAMS, [None, "sql", None, "sql"], strict=True))
def test_sequences_match_a_brute_force_search(llm, reference, name, params):
    prompts = [chat_prompt(llm, question) for question in QUESTIONS]
    ends = set(llm.llm_engine.input_processor.eos_token_ids)
    outputs = llm.beam_search(prompts, params, lora(name))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = prompt["prompt_token_ids"]
        want = brute_force(reference[name], ids, params, ends)
        assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in want]
        for sequence, (tokens, logprob) in zip(output.sequences, want, strict=True):
            assert sequence.cum_logprob == pytest.approx(logprob, abs=1e-3)
            assert len(sequence.logprobs) == len(tokens) - len(ids)
            ended = tokens[-1] in ends and not params.ignore_eos
            assert sequence.finish_reason == ("stop" if ended else "length")
            assert sequence.text == llm.get_tokenizer().decode(tokens[:-1] if ended else tokens)
    assert outputs == llm.beam_search(prompts, params, lora(name), concurrency_limit=1)


@pytest.mark.parametrize("name", [None, "sql"])
def test_the_best_sequence_is_that_of_transformers(llm, reference, name):
    for question in QUESTIONS:
        ids = chat_prompt(llm, question)["prompt_token_ids"]
        found = reference[name].generate(
            input_ids=torch.tensor([ids]), num_beams=4, max_new_tokens=24, length_penalty=0.0, do_sample=False,
            return_dict_in_generate=True, output_scores=True, pad_token_id=0, early_stopping="never",
        )  # fmt: skip
        params = BeamSearchParams(4, 24, length_penalty=0.0)
        [output] = llm.beam_search([ids], params, lora(name))
        best = output.sequences[0]
        assert best.tokens == found.sequences[0, : len(best.tokens)].tolist()
        assert best.cum_logprob == pytest.approx(float(found.sequences_scores[0]), abs=1e-3)


def test_beams_share_blocks_and_stop_early(llm):
    [prompt], params = [chat_prompt(llm, "Anna from Lisbon ordered 3 green lamps " * 6)], BeamSearchParams(4, 100)
    before, generated = llm.stats(), count(llm)
    [output] = llm.beam_search(prompt, params, lora("sql"))
    steps, after = count(llm) - generated, llm.stats()
    assert output.sequences[0].finish_reason == "stop"
    assert steps < 4 * 80  # sequences: it has ended before
    computed = (after.prefix_cache_queries - before.prefix_cache_queries) - (
        after.prefix_cache_hits - before.prefix_cache_hits
    )
    assert computed <= len(prompt["prompt_token_ids"]) + 16 * steps  # a block for each beam and step
    assert llm.stats().kv_cache_usage == 0.0


def count(llm):
    [number] = [metric.value for metric in llm.get_metrics() if metric.name == "vllm:generation_tokens"]
    return number


def test_wrong_searches(llm):
    for fields in ({"beam_width": 0}, {"max_tokens": 0}, {"beam_width": 1.5}, {"length_penalty": 1e9}):
        with pytest.raises(InvalidRequestError) as caught:
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | fields)
        assert caught.value.param == next(iter(fields))
    with pytest.raises(InvalidRequestError, match=r"beam_width 11 needs 22 .* gives 20 \(max_logprobs\)"):
        llm.beam_search("a", BeamSearchParams(11, 2))
    with pytest.raises(InvalidRequestError, match="BeamSearchParams"):
        llm.beam_search("a", SamplingParams())
    with pytest.raises(PromptTooLongError):
        llm.beam_search("a", BeamSearchParams(2, 256))
    with pytest.raises(InvalidRequestError, match="concurrency_limit"):
        llm.beam_search("a", BeamSearchParams(2, 2), concurrency_limit=0)
    assert llm.beam_search([], BeamSearchParams(2, 2)) == []
