"""Hidden states of adapters' requests: fused with the adapters' draft weights after each step, drafts or none."""

import pytest

from outrider import SamplingParams
from outrider.platform.core.messages import EngineRequest
from outrider.spec_decode.drafters.eagle.drafter import EagleDrafter

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_drafts_after_prefix_cache_hits_equal_those_without_eviction(models, make_engine, run, prompts, monkeypatch):
    """No drafts are made while prompts are computed; with one slot on the device adapters evict one another."""
    drafted = []

    def propose(self, rows, target, of=EagleDrafter.propose):
        proposals = of(self, rows, target)
        drafted[-1].extend(tuple(proposal.drafts.token_ids) for proposal in proposals)
        return proposals

    monkeypatch.setattr(EagleDrafter, "propose", propose)
    evictions = []
    for max_loras in (1, 2):
        speculative = models.speculative("eagle3", 3)
        engine = make_engine(enable_lora=True, max_lora_rank=8, max_loras=max_loras, speculative_config=speculative)
        jobs = [(prompt, models.lora(name)) for name, prompt in zip("abaab", prompts * 2, strict=False)]
        for prompt, lora in jobs:
            run(engine, [(prompt, GREEDY.clone(speculative=False), lora)])
        evictions.append(engine.stats().lora_evictions["device"])
        hits = engine.stats().prefix_cache_hits
        drafted.append([])
        for prompt, lora in jobs:
            run(engine, [(prompt, GREEDY, lora)])
        assert engine.stats().prefix_cache_hits > hits
    assert evictions == [3, 0]
    assert drafted[0] == drafted[1]
    assert sum(map(len, drafted[0])) > 100


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_adapter_may_be_unloaded_while_its_last_request_runs(models, make_engine, prompts, async_scheduling):
    """It is dropped by the commit of the last step, whose hidden states are written afterwards."""
    engine = make_engine(
        enable_lora=True,
        max_lora_rank=8,
        async_scheduling=async_scheduling,
        speculative_config=models.speculative("eagle3", 3),
    )
    lora = models.lora("a")
    engine.add_request(EngineRequest("0", list(prompts[0]), GREEDY, [1], lora=lora))
    deltas = []
    while engine.has_work():
        deltas += engine.step()
        if len(deltas) == 2:
            engine.adapters.unload(lora.name)
    assert sum(len(delta.token_ids) for delta in deltas) == 20
    assert deltas[-1].finish_reason == "length"
