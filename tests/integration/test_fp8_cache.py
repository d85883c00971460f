"""`kv_cache_dtype="fp8"`: half of the memory, nearly the same model, and text that speculation does not change."""

from __future__ import annotations

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import DEMO_ADAPTER_NAMES, demo_adapters
from outrider.platform.core.errors import InvalidRequestError

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
# Rounding to fp8 makes a step of 6% of a last bit: bytes are the same if a row's bits do not depend on the batch.
FP8 = {"kv_cache_dtype": "fp8", "batch_invariant": True}
NAMES = [None, "a", "b", None, "a", "c"]


@pytest.fixture(scope="module")
def texts(models, run, prompts):
    """Each job alone, without speculation and prefix cache."""
    from outrider.platform.core.config import EngineArgs
    from outrider.platform.engine.engine_core import EngineCore

    options = {"model": str(models.target), "dtype": "bfloat16", "max_model_len": 256, "seed": 1}
    engine = EngineCore(EngineArgs(**options, **FP8, **LORA, enable_prefix_caching=False))
    made = [run(engine, [job])[0].token_ids for job in jobs(models, prompts)]
    engine.shutdown()
    return made


def jobs(models, prompts):
    return [
        (prompt, SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True), models.lora(name))
        for i, (prompt, name) in enumerate(zip(prompts, NAMES, strict=True))
    ]


CHUNKS, OVERLAP = {"max_num_batched_tokens": 27}, {"async_scheduling": True}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, options) for method in (None, "draft_model", "eagle3") for options in ({}, CHUNKS, OVERLAP)),
        *(("ngram", CHUNKS), ("eagle", CHUNKS), ("medusa", OVERLAP), ("dflash", CHUNKS), ("dspark", OVERLAP)),
    ],
    ids=str,
)
def test_text_is_the_same_with_speculation_adapters_and_chunks(
    models, make_engine, run, prompts, texts, method, options
):
    engine = make_engine(dtype="bfloat16", speculative_config=models.speculative(method, 3), **FP8, **LORA, **options)
    for _ in range(2):  # again, from the prefix cache
        assert [outcome.token_ids for outcome in run(engine, jobs(models, prompts))] == texts
    if method is not None:
        assert sum(entry.counts.num_accepted_tokens for entry in engine.stats().speculation) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_close_to_an_unrounded_cache(models, make_engine, run, prompts, dtype):
    """The log-probabilities of the prompts' tokens: rounded keys and values shift them a little, and not by nothing."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = []
    for kind in ("auto", "fp8"):
        engine = make_engine(dtype=dtype, kv_cache_dtype=kind)
        outcomes = run(engine, [(prompt, params) for prompt in prompts])
        found.append([entry.logprobs[0] for o in outcomes for entry in o.prompt_logprobs[1:]])
    shifts = [abs(a - b) for a, b in zip(*found, strict=True)]
    assert 0 < sum(shifts) / len(shifts) < 0.2


def test_the_same_memory_holds_twice_the_tokens(models, make_engine):
    """But for EAGLE's hidden states, which are not rounded."""
    options = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20, "max_num_seqs": 64}
    sizes = {
        (method, kind): make_engine(
            kv_cache_dtype=kind, speculative_config=models.speculative(method, 3), **options
        ).info.num_kv_blocks
        for method in (None, "draft_model", "eagle3")
        for kind in ("auto", "fp8")
    }
    for method in (None, "draft_model"):
        assert sizes[method, "fp8"] // 2 == sizes[method, "auto"]
    assert sizes["eagle3", "auto"] < sizes["eagle3", "fp8"] < 2 * sizes["eagle3", "auto"]


def test_the_demo_answers_with_its_adapters():
    name = DEMO_ADAPTER_NAMES[0]
    llm = LLM(kv_cache_dtype="fp8", enable_lora=True, speculative_config={"method": "ngram"})
    outputs = llm.generate(
        ["Hello", "Hello"],
        SamplingParams(temperature=0, max_tokens=12),
        lora_request=[None, LoRARequest(name, path=str(demo_adapters()[name]))],
    )
    assert all(len(output.outputs[0].token_ids) > 1 for output in outputs)
    with pytest.raises(InvalidRequestError, match="kv_cache_dtype must be one of auto, fp8, fp8_e4m3"):
        LLM(kv_cache_dtype="fp4")
