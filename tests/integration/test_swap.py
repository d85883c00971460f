"""`swap_space`: the text is that of an engine that never needs it, and nothing is shared."""

from __future__ import annotations

import pytest

from outrider import LoRARequest, SamplingParams

from ..thread_ranks import ranks_as_threads

SWAP = {"swap_space": 0.01, "preemption_mode": "swap"}
TIGHT = {"max_model_len": 112, "block_size": 8, "num_gpu_blocks_override": 18}
LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
NAMES = [None, "a", "b", None, "a", "c"]


def jobs(models, prompts):
    """Long prompts, half of them sampled, some of them for adapters."""
    return [
        ((prompt * 9)[:60], SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=24, ignore_eos=True),
         models.lora(name))
        for i, (prompt, name) in enumerate(zip(prompts, NAMES, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (None, {}),
        (None, {"enable_prefix_caching": False, "async_scheduling": True}),
        (None, {"kv_cache_dtype": "fp8", "dtype": "bfloat16", "batch_invariant": True}),
        ("draft_model", {}),
        ("eagle3", {"async_scheduling": True}),
    ],
    ids=str,
)
def test_long_prompts_in_a_tiny_cache_give_the_same_tokens(
    models, make_engine, run, plain_tokens, prompts, method, options
):
    work = jobs(models, prompts)
    if "dtype" in options:
        want = [outcome.token_ids for outcome in run(make_engine(**LORA, **options), work)]
    else:
        want = plain_tokens(work)
    tight = options | TIGHT | {"speculative_config": models.speculative(method, 3)}
    engine = make_engine(**SWAP, **LORA, **tight)
    for _ in range(2):
        assert [outcome.token_ids for outcome in run(engine, work)] == want
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.kv_host_hits > 100
    assert stats.kv_host_bytes <= 0.01 * (1 << 30)
    assert bool(stats.kv_host_bytes) == options.get(
        "enable_prefix_caching", True
    )  # else no finished request's are kept
    if method is not None:
        assert sum(entry.counts.num_accepted_tokens for entry in stats.speculation) > 0


def test_ranks_swap_their_own_parts(models, make_engine, run, plain_tokens, prompts, monkeypatch):
    """A rank that did not would read what another sequence has left in a block."""
    work = jobs(models, prompts)
    want = plain_tokens(work)
    ranks_as_threads(monkeypatch)
    engine = make_engine(**SWAP, **LORA, **TIGHT, tensor_parallel_size=2)
    for _ in range(2):
        assert [outcome.token_ids for outcome in run(engine, work)] == want
    assert engine.stats().kv_host_hits > 100


def test_measured_times_and_recompute_give_the_same_tokens_too(models, make_engine, run, plain_tokens, prompts):
    work = jobs(models, prompts)
    want = plain_tokens(work)
    measured = make_engine(swap_space=0.01, **LORA, **TIGHT)
    assert [outcome.token_ids for outcome in run(measured, work)] == want
    recomputed = make_engine(swap_space=0.01, preemption_mode="recompute", **LORA, **TIGHT)
    assert [outcome.token_ids for outcome in run(recomputed, work)] == want
    assert (recomputed.stats().kv_host_hits, recomputed.stats().kv_host_bytes) == (0, 0)


def test_caches_are_isolated_by_tenant_and_adapter_version(models, make_engine, run, prompts, greedy):
    engine = make_engine(**SWAP, **LORA, **TIGHT)
    prompt = (prompts[0] * 12)[:60]

    def hits(lora=None, tenant="one"):
        """Tokens that come back from the host for the prompt, once others have taken the device's blocks."""
        run(engine, [((p * 9)[:80], greedy, None, {"tenant": "others"}) for p in prompts[1:5]])
        before = engine.stats().kv_host_hits
        outcome = run(engine, [(prompt, greedy, lora, {"tenant": tenant})])[0]
        texts.append(outcome.token_ids)
        return engine.stats().kv_host_hits - before

    texts = []
    x = LoRARequest("x", path=models.adapters["a"])
    engine.adapters.load(x)
    assert [hits(), hits(), hits(tenant="two"), hits(x), hits(x), hits(x, "two")] == [0, 56, 0, 0, 56, 0]
    engine.adapters.load(LoRARequest("x", path=models.adapters["b"]), load_inplace=True)
    new = LoRARequest("x", path=models.adapters["b"])
    assert [hits(new), hits(new)] == [0, 56]
    assert len({tuple(text) for text in (texts[0], texts[3], texts[6])}) == 3
    assert [texts[0]] * 3 + [texts[3]] * 3 + [texts[6]] * 2 == texts
    engine.adapters.unload("x")
    engine.adapters.load(x)
    assert hits(x) == 56, "the same content again"
    assert texts[-1] == texts[3]


def test_a_reset_and_sleep_empty_the_host(models, make_engine, run, prompts):
    engine, work = make_engine(**SWAP, **LORA, **TIGHT), jobs(models, prompts)
    want = [outcome.token_ids for outcome in run(engine, work)]
    for empty in (engine.reset_prefix_cache, engine.release_memory):
        assert engine.stats().kv_host_bytes > 0
        empty()
        assert engine.stats().kv_host_bytes == 0
        hits = engine.stats().kv_host_hits
        assert run(engine, work[:1])[0].num_cached_tokens == 0
        assert engine.stats().kv_host_hits == hits
        assert [outcome.token_ids for outcome in run(engine, work)] == want


def test_a_failed_step_keeps_host_copies_consistent(models, make_engine, run, prompts, monkeypatch):
    engine, work = make_engine(**SWAP, **LORA, **TIGHT), jobs(models, prompts)
    want = [outcome.token_ids for outcome in run(engine, work)]
    calls = []
    copy = type(engine._host).run

    def fail_sometimes(store, moves):
        calls.append(len(moves))
        if len(calls) % 3 == 0:
            raise MemoryError("no room for a copy")
        copy(store, moves)

    monkeypatch.setattr(type(engine._host), "run", fail_sometimes)
    step = engine.step

    def again():
        try:
            return step()
        except MemoryError:
            return []

    monkeypatch.setattr(engine, "step", again)
    assert [outcome.token_ids for outcome in run(engine, work)] == want
    assert len(calls) >= 3
