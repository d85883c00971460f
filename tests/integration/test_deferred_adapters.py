"""Hidden states of adapters' requests that wait to be fused with the adapters' draft weights, while nobody drafts."""

import pytest
import torch

from outrider import SamplingParams
from outrider.spec_decode.drafters.eagle.drafter import EagleDrafter

SILENT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, speculative=False)


@pytest.mark.parametrize("adaptive", [False, True])
def test_they_are_fused_before_their_adapter_makes_way(models, make_engine, run, prompts, adaptive):
    """They wait for longer than requests run and adapters are on the device, where the prefix cache keeps their blocks.
    What is written then is what is written while all adapters are there."""
    speculative = models.speculative("eagle3", 3) | {"adaptive": adaptive}
    stored, waited, evictions, fused_with = [], [], [], []
    for max_loras in (1, 2):
        engine = make_engine(enable_lora=True, max_lora_rank=8, max_loras=max_loras, speculative_config=speculative)
        drafter = engine._runner._drafter
        store = (drafter._first if adaptive else drafter).store
        store.flush()  # what is left of the measuring at start
        for half in store._halves:
            half.zero_()
        fuse = store._fuse
        store._fuse = lambda states, adapters, fuse=fuse: fused_with.append(adapters) or fuse(states, adapters)
        for name, prompt in zip("abaab", prompts * 2, strict=False):
            (outcome,) = run(engine, [(prompt, SILENT, models.lora(name))])
            assert len(outcome.token_ids) == 20
        waited.append(store.num_pending)
        evictions.append(engine.stats().lora_evictions["device"])
        store.flush()
        vectors = torch.cat(store._halves, dim=-1)
        vectors = vectors[vectors.abs().sum(-1) > 0]
        stored.append(vectors[vectors[:, 0].argsort()])  # wherever its blocks lie
    assert all(adapters is not None for adapters in fused_with)
    torch.testing.assert_close(*stored)
    assert len(stored[0]) > 100
    assert evictions == [3, 0]
    assert 0 < waited[0] < waited[1], "but for those of adapters that made way, all of them wait"


@pytest.mark.parametrize("adaptive", [False, True])
def test_where_steps_overlap_nothing_waits_for_an_adapter_that_leaves(
    models, make_engine, run, prompts, adaptive, monkeypatch
):
    """Another thread may be computing then."""
    told = []
    monkeypatch.setattr(EagleDrafter, "adapter_leaves", lambda self, digest: told.append(digest))
    engine = make_engine(
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        async_scheduling=True,
        speculative_config=models.speculative("eagle3", 3) | {"adaptive": adaptive},
    )
    for name, prompt in zip("abab", prompts * 2, strict=False):
        (outcome,) = run(engine, [(prompt, SILENT, models.lora(name))])
        assert len(outcome.token_ids) == 20
    (outcome,) = run(engine, [(prompts[0], SILENT.clone(speculative=True), models.lora("a"))])
    assert len(outcome.token_ids) == 20
    assert engine.stats().lora_evictions["device"] == 4
    assert told == []
