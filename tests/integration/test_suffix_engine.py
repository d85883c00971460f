"""Suffix decoding in the engine: repeats cost fewer steps. That the text stays is in test_speculation.py."""

from __future__ import annotations

from outrider import SamplingParams

LORA = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def suffix(k=5, **fields):
    return {"method": "suffix", "num_speculative_tokens": k, "suffix_decoding_max_spec_factor": 2.0} | fields


def test_a_repeated_answer_is_drafted(make_engine, run, prompts):
    engine = make_engine(speculative_config=suffix(k=8))
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=60, ignore_eos=True)
    first, again = (run(engine, [(prompts[1], params)])[0] for _ in range(2))
    assert again.token_ids == first.token_ids
    assert len(again.deltas) < len(first.deltas) / 2
    assert again.speculation.num_accepted_tokens > first.speculation.num_accepted_tokens


def test_counts_of_a_request_describe_its_steps(make_engine, run, prompts):
    engine = make_engine(speculative_config=suffix(k=4))
    jobs = [(prompts[i], GREEDY.clone(speculative=w), None, {"tenant": "t"}) for i, w in ((4, None), (4, 2))]
    for outcome in run(engine, jobs):
        counts, k = outcome.speculation, len(outcome.speculation.steps_by_k) - 1
        assert sum(counts.steps_by_k) == len(outcome.deltas)
        assert sum(counts.steps_by_k[1:]) == counts.num_verifications
        assert sum(i * steps for i, steps in enumerate(counts.steps_by_k)) == counts.num_draft_tokens
        assert sum(counts.accepted_per_pos) == counts.num_accepted_tokens == sum(outcome.accepted)
        assert [len(d) - 1 for d in outcome.deltas] == outcome.accepted  # no stop has cut a step
        assert 1 <= k <= 4
    assert k <= 2
    (entry,) = engine.stats().speculation
    assert (entry.adapter, entry.tenant) == ("", "t")


def test_totals_are_kept_by_adapter_and_tenant(models, make_engine, run, prompts):
    engine = make_engine(speculative_config=suffix(), **LORA)
    params = GREEDY
    run(engine, [(prompts[4], params, models.lora(n), {"tenant": t}) for n in (None, "a") for t in ("", "t", "u")])
    run(engine, [(prompts[4], params.clone(speculative=False), None, {"tenant": "off"})])
    found = {(entry.adapter, entry.tenant): entry.counts.num_draft_tokens for entry in engine.stats().speculation}
    assert set(found) == {(n, t) for n in ("", "a") for t in ("", "t", "u")}
    assert all(found.values())
