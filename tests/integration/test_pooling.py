"""Embeddings against transformers' and PEFT's hidden states, however the prompts are computed."""

from __future__ import annotations

import asyncio
import math
import shutil

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import (
    LLM,
    AsyncLLM,
    EmbeddingRequestOutput,
    InvalidRequestError,
    LoRARequest,
    PoolingParams,
    PromptTooLongError,
    SamplingParams,
    ScoringRequestOutput,
)
from outrider.models.demo import demo_adapters, demo_model_path
from outrider.platform.core.errors import AdapterError

TEXTS = ["SELECT name FROM users", "How do I reset my password?", "a", "the same words again and again " * 12]
OPTIONS = {"enable_lora": True, "dtype": "float32", "speculative_config": None, "max_model_len": 256}


@pytest.fixture(scope="module")
def llm():
    with LLM(str(demo_model_path()), max_num_batched_tokens=48, **OPTIONS) as made:
        yield made


@pytest.fixture(scope="module")
def hidden_states(llm):
    """Final hidden states [T, H] of a prompt, under an adapter's name or none."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, demo_adapters()["sql"])

    def states(text, name=None):
        ids = torch.tensor([llm.get_tokenizer().encode(text)])
        with torch.inference_mode():
            if name is None:
                with tuned.disable_adapter():
                    return tuned(ids, output_hidden_states=True).hidden_states[-1][0]
            return tuned(ids, output_hidden_states=True).hidden_states[-1][0]

    return states


POOLED = {"last": lambda h: h[-1], "mean": lambda h: h.mean(0), "cls": lambda h: h[0]}


@pytest.mark.parametrize("pooling", POOLED)
def test_embeddings_equal_transformers_in_chunks_with_and_without_an_adapter(llm, hidden_states, pooling):
    sql = LoRARequest("sql", 1, str(demo_adapters()["sql"]))
    names = [None, sql, None, sql]
    outputs = llm.encode(TEXTS, PoolingParams(pooling), names, use_tqdm=False)
    for text, lora, output in zip(TEXTS, names, outputs, strict=True):
        want = POOLED[pooling](hidden_states(text, lora and lora.lora_name))
        torch.testing.assert_close(torch.tensor(output.outputs.data), want, rtol=1e-3, atol=1e-3)
        assert output.finished
        assert len(output.prompt_token_ids) == len(llm.get_tokenizer().encode(text))


def test_a_cached_prefix_and_concurrent_generation_change_nothing(llm):
    fresh = [llm.embed(TEXTS[3], PoolingParams("mean"), cache_salt="x", use_tqdm=False) for _ in range(2)]
    assert fresh[0][0].outputs.embedding == pytest.approx(fresh[1][0].outputs.embedding, abs=1e-6)
    last = [llm.embed(TEXTS[3], cache_salt="y", use_tqdm=False)[0] for _ in range(2)]
    assert last[0].num_cached_tokens == 0
    assert last[1].num_cached_tokens > 0, "the last token needs no more"
    assert last[0].outputs.embedding == pytest.approx(last[1].outputs.embedding, abs=1e-5)
    assert math.hypot(*last[0].outputs.embedding) == pytest.approx(1)
    text = llm.generate("hello", SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert len(text[0].outputs[0].token_ids) == 5


def test_dimensions_are_cut_before_the_vector_is_scaled(llm):
    whole = llm.encode(TEXTS[0], use_tqdm=False)[0].outputs.data
    (short,) = llm.embed(TEXTS[0], PoolingParams(dimensions=8), use_tqdm=False)
    assert isinstance(short, EmbeddingRequestOutput)
    cut = short.outputs
    assert cut.hidden_size == 8
    assert cut.embedding == pytest.approx([value / math.hypot(*whole[:8]) for value in whole[:8]], abs=1e-5)


def test_scores_are_cosines(llm):
    one = llm.score(TEXTS[0], TEXTS[:3], use_tqdm=False)
    assert isinstance(one[0], ScoringRequestOutput)
    vectors = [torch.tensor(out.outputs.embedding) for out in llm.embed(TEXTS[:3], use_tqdm=False)]
    assert [pair.outputs.score for pair in one] == pytest.approx([float(vectors[0] @ v) for v in vectors], abs=1e-5)
    assert one[0].outputs.score == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.embed("a", PoolingParams(dimensions=100_000), use_tqdm=False), "dimensions"),
        (lambda llm: PoolingParams("median"), "pooling"),
        (lambda llm: PoolingParams(numpy.ones(2)), "pooling"),
        (lambda llm: PoolingParams(normalize=1), "normalize"),
        (lambda llm: llm.embed("a", SamplingParams(), use_tqdm=False), "pooling_params"),
        (lambda llm: llm.encode("a", pooling_task="classify", use_tqdm=False), "pooling_task"),
        (lambda llm: llm.score(["a", "b"], ["c"], use_tqdm=False), "text_1"),
        (lambda llm: SamplingParams(pooling="median"), "pooling"),
        (lambda llm: llm.generate("a", SamplingParams(pooling="mean", n=2), use_tqdm=False), "n"),
        (lambda llm: llm.generate("a", SamplingParams(pooling="mean", logprobs=1), use_tqdm=False), "logprobs"),
        (
            lambda llm: llm.generate("a", SamplingParams(pooling="mean", prompt_logprobs=1), use_tqdm=False),
            "prompt_logprobs",
        ),
    ],
)
def test_wrong_parameters_are_named(llm, call, param):
    with pytest.raises(InvalidRequestError) as raised:
        call(llm)
    assert raised.value.param == param


@pytest.mark.parametrize("name", ["embed", "encode", "score"])
def test_unknown_options_are_those_of_the_method(llm, name):
    texts = ("a", "b") if name == "score" else ("a",)
    with pytest.raises(TypeError, match=rf"^LLM\.{name}\(\) got an unexpected keyword 'prority'.*priority"):
        getattr(llm, name)(*texts, use_tqdm=False, prority=1)

    async def call(engine):
        with pytest.raises(TypeError, match=rf"^AsyncLLM\.{name}\(\) got an unexpected keyword 'prority'"):
            await getattr(engine, name)(*texts, prority=1)
        await engine.shutdown()

    asyncio.run(call(AsyncLLM()))


@pytest.mark.parametrize(("pooling", "caching"), [("mean", True), ("mean", False), ("cls", True)])
def test_a_preemption_in_the_middle_of_a_prompt_loses_nothing(llm, pooling, caching):
    """Pooled positions are computed again, even if its blocks are still in the prefix cache."""
    few = {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 4, "scheduling_policy": "priority"}
    prompt = [3 + i % 900 for i in range(200)]
    params = [SamplingParams(pooling=pooling), SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)]
    with LLM(str(demo_model_path()), **(OPTIONS | few), enable_prefix_caching=caching) as crowded:
        got = crowded.generate([prompt, [5, 6, 7]], params, use_tqdm=False, priority=[1, 0])[0]
        assert crowded.stats().num_preemptions >= 1
    want = llm.generate([prompt], params[0], use_tqdm=False)[0]
    assert got.pooled == pytest.approx(want.pooled, abs=1e-4)


@pytest.mark.parametrize("pooling", POOLED)
def test_an_adapter_that_overflows_is_an_error_of_its_own_requests(llm, tmp_path, pooling):
    shutil.copytree(demo_adapters()["sql"], tmp_path / "huge")
    file = tmp_path / "huge" / "adapter_model.safetensors"
    save_file({key: tensor.float() * 1e25 for key, tensor in load_file(file).items()}, file)
    huge = LoRARequest("huge", path=str(tmp_path / "huge"))
    with pytest.raises(AdapterError, match="'huge': its weights are too large") as raised:
        llm.embed(TEXTS[0], PoolingParams(pooling), huge, use_tqdm=False)
    assert raised.value.param == "model"
    assert llm.embed(TEXTS[0], use_tqdm=False)


def test_a_prompt_may_fill_the_context_and_no_more(llm):
    assert llm.embed([[5] * 256], use_tqdm=False)[0].outputs.hidden_size
    with pytest.raises(PromptTooLongError):
        llm.embed([[5] * 257], use_tqdm=False)


def test_the_pooling_of_sentence_transformers_files(tmp_path):
    from outrider.platform.client.pooling import model_pooling

    assert model_pooling(str(tmp_path)) == "last"
    model_pooling.cache_clear()
    (tmp_path / "1_Pooling").mkdir()
    file = tmp_path / "1_Pooling" / "config.json"
    file.write_text('{"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": false}')
    assert model_pooling(str(tmp_path)) == "mean"
    model_pooling.cache_clear()
    file.write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(InvalidRequestError, match="names no pooling"):
        model_pooling(str(tmp_path))


def test_async_embeddings_are_the_same(llm):
    async def embed():
        async with AsyncLLM(str(demo_model_path()), async_scheduling=True, **OPTIONS) as engine:
            scores = await engine.score(TEXTS[0], TEXTS[1])
            with pytest.raises(InvalidRequestError):
                await engine.score(TEXTS[0], [TEXTS[3], [1 << 30]])
            assert not [task for task in asyncio.all_tasks() if "Pooling" in repr(task)], "one that fails ends all"
            return await engine.embed(TEXTS[3], PoolingParams("mean")), scores[0].outputs.score

    got, score = asyncio.run(embed())
    want = llm.embed(TEXTS[3], PoolingParams("mean"), use_tqdm=False)[0]
    assert got.outputs.embedding == pytest.approx(want.outputs.embedding, abs=1e-5)
    assert score == pytest.approx(llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)[0].outputs.score, abs=1e-5)
