"""Mixes of adapters in the engine: texts of the merged model, prefixes of their own, speculation, and reloads."""

from __future__ import annotations

import pytest
import torch

from outrider import LLM, LoRAMix, LoRARequest, SamplingParams
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError
from outrider.platform.core.lora_request import mix_of
from outrider.platform.core.messages import EngineRequest

from .conftest import VOCAB

LORA = {"enable_lora": True, "max_lora_rank": 8}
WEIGHTS = {
    "base": {},
    "a": {"a": 1.0},
    "b": {"b": 1.0},
    "mostly a": {"a": 0.7, "b": 0.3},
    "mostly b": {"a": 0.3, "b": 0.7},
    "less": {"a": 0.5},
    "without": {"a": -0.4, "b": 1.1, "c": 0.2},
}


def mixed(models, name):
    return mix_of([(models.lora(part), weight) for part, weight in WEIGHTS[name].items()])


@pytest.fixture(scope="module")
def merged_texts(models, prompts):
    """Greedy texts of the second prompt, from models into whose weights PEFT has merged the mix."""
    from peft import PeftModel

    texts = {}
    for name, weights in WEIGHTS.items():
        model = models.reference()
        if weights:
            names = [*weights]
            model = PeftModel.from_pretrained(model, models.adapters[names[0]], adapter_name=names[0])
            for other in names[1:]:
                model.load_adapter(models.adapters[other], adapter_name=other)
            model.add_weighted_adapter(names, [*weights.values()], "mix", combination_type="cat")
            model.set_adapter("mix")
            model = model.merge_and_unload()
        ids = torch.tensor([prompts[1]])
        out = model.generate(ids, max_new_tokens=24, do_sample=False, pad_token_id=2, eos_token_id=VOCAB + 1)
        texts[name] = out[0, ids.shape[1] :].tolist()
    assert len({tuple(text) for text in texts.values()}) == len(texts)
    return texts


@pytest.mark.parametrize("method", [None, "ngram", "draft_model", "eagle3"])
def test_texts_are_those_of_the_merged_models(models, make_engine, run, prompts, greedy, merged_texts, method):
    """All at once; under speculation with the draft weights of the parts, mixed likewise."""
    engine = make_engine(**LORA, max_loras=7, speculative_config=models.speculative(method, 3))
    outcomes = run(engine, [(prompts[1], greedy, mixed(models, name)) for name in WEIGHTS])
    assert {name: o.token_ids for name, o in zip(WEIGHTS, outcomes, strict=True)} == merged_texts
    assert not any(outcome.num_cached_tokens for outcome in outcomes)
    if method is not None:
        labels = {entry.adapter for entry in engine.stats().speculation}
        assert labels <= {"", "a", "b", "a+b", "a+b+c"}
        assert {"a+b", "a+b+c"} <= labels or method == "ngram"


def test_fewer_slots_than_mixes(models, make_engine, run, prompts, greedy, merged_texts):
    """They take turns on the device and in host memory as adapters do."""
    engine = make_engine(**LORA, max_loras=2, max_cpu_loras=3)
    names = [name for name in WEIGHTS if name != "without"] * 2
    outcomes = run(engine, [(prompts[1], greedy, mixed(models, name)) for name in names])
    assert [outcome.token_ids for outcome in outcomes] == [merged_texts[name] for name in names]


def test_cached_prefixes_are_keyed_by_mix(models, make_engine, run, prompts, greedy, merged_texts):
    engine = make_engine(**LORA, max_loras=7)
    for round_ in range(2):
        for name in WEIGHTS:
            [outcome] = run(engine, [(prompts[1], greedy, mixed(models, name))])
            assert outcome.token_ids == merged_texts[name]
            assert (outcome.num_cached_tokens > 0) == (round_ == 1), "only the same mix's own"
    [outcome] = run(engine, [(prompts[1], greedy, LoRAMix(mixed(models, "mostly a").parts[::-1]))])
    assert outcome.num_cached_tokens > 0, "whatever the order"


def test_draft_weights_are_mixed_likewise(models, make_engine, prompts, greedy):
    """`c` has none: it adds nothing to the drafter, and the others' parts are used all the same."""
    engine = make_engine(**LORA, max_loras=3, speculative_config=models.speculative("draft_model", 3))
    request = EngineRequest("r", list(prompts[1]), greedy, [1], lora=mixed(models, "without"))
    engine.add_request(request)
    while not engine.scheduler.running:
        engine.step()
    manager, version = engine._adapters, engine.scheduler.running[0].adapter
    assert version.has_draft
    assert manager.prepare_draft([(version, 1)]) is not None
    ranks = {len(w.a) for w in manager._residency.host.get(version.digest).drafter.modules().values()}
    assert ranks == {4 + 2}
    while engine.has_work():
        engine.step()


def test_replacing_a_part_while_a_mix_runs(models, make_engine, run, prompts, greedy, merged_texts):
    """The running one finishes on the old part; a new one gets the new part, and no KV of the old."""
    engine = make_engine(**LORA, max_loras=3)
    for name in ("a", "b"):
        engine.adapters.load(models.lora(name))
    engine.add_request(EngineRequest("old", list(prompts[1]), greedy, [1], lora=mixed(models, "mostly a")))
    old = []
    while len(old) < 5:
        old += [token for delta in engine.step() for token in delta.token_ids]
    other = LoRARequest("b", path=models.adapters["a"])  # now a is both parts
    engine.adapters.load(other, load_inplace=True)
    new = mix_of([(models.lora("a"), 0.7), (other, 0.3)])
    engine.add_request(EngineRequest("new", list(prompts[1]), greedy, [1], lora=new))
    texts = {"old": old, "new": []}
    while engine.has_work():
        for delta in engine.step():
            texts[delta.request_id] += delta.token_ids
            assert delta.error is None
            assert delta.num_cached_tokens == 0
    assert texts == {"old": merged_texts["mostly a"], "new": merged_texts["a"]}


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_unloading_a_part_while_a_mix_runs(models, make_engine, prompts, greedy, merged_texts, mode):
    engine = make_engine(**LORA, max_loras=3)
    for name in ("a", "b"):
        engine.adapters.load(models.lora(name))
    for name in ("mostly a", "a"):
        engine.add_request(EngineRequest(name, list(prompts[1]), greedy, [1], lora=mixed(models, name)))
    texts, ends = {"mostly a": [], "a": []}, {}

    def take(deltas):
        for delta in deltas:
            texts[delta.request_id] += delta.token_ids
            if delta.finish_reason or delta.error:
                ends[delta.request_id] = delta.finish_reason or delta.error

    while len(texts["mostly a"]) < 5:
        take(engine.step())
    engine.adapters.unload("b", mode=mode)
    while engine.has_work():
        take(engine.step())
    assert (texts["a"], ends["a"]) == (merged_texts["a"], "length")
    if mode == "drain":
        assert (texts["mostly a"], ends["mostly a"]) == (merged_texts["mostly a"], "length")
    else:
        assert len(texts["mostly a"]) < len(merged_texts["mostly a"])
        assert ends.get("mostly a") != "length"
    assert [info.name for info in engine.adapters.list()] == ["a"]


def test_an_oversized_mix_fails_alone(models, make_engine, run, prompts, greedy, merged_texts):
    engine = make_engine(**LORA, max_loras=1)
    jobs = [(prompts[1], greedy, mixed(models, name)) for name in ("a", "mostly a")]
    good, bad = run(engine, jobs)
    assert good.token_ids == merged_texts["a"]
    assert bad.error.type == "InvalidAdapter"
    assert "12 rank rows" in bad.error.message
    assert "has 8" in bad.error.message


def test_without_lora_a_mix_is_refused(models, make_engine, greedy):
    with pytest.raises(InvalidRequestError, match=r"'a:0.7\+b:0.3'.*enable_lora"):
        make_engine().add_request(EngineRequest("x", [3], greedy, lora=mixed(models, "mostly a")))


def test_mixes_named_through_llm(models, prompts, greedy, merged_texts, monkeypatch):
    """Through `LLM`, whose model has no tokenizer here."""
    from outrider.platform.client import llm_engine as llm_module

    class NoTokenizer:
        chat_template = None

        def decode(self, ids, **options):
            return ""

        def get_vocab(self):
            return {}

    monkeypatch.setattr(llm_module, "load_text_side", lambda args, info: (NoTokenizer(), []))
    args = EngineArgs(model=str(models.target), dtype="float32", max_model_len=128, max_loras=4, **LORA)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    a, b = models.lora("a"), models.lora("b")
    with LLM.from_engine_args(args) as llm:
        [output] = llm.generate([prompts[1]], params, lora_request=[(a, 0.7), (b, 0.3)], use_tqdm=False)
        assert output.outputs[0].token_ids == merged_texts["mostly a"]
        outputs = llm.generate(
            [prompts[1]] * 4, params, lora_request=[[(a, 0.3), ("b", 0.7)], None, "+a:0.5", b], use_tqdm=False
        )
    assert [o.outputs[0].token_ids for o in outputs] == [merged_texts[n] for n in ("mostly b", "base", "less", "b")]
