"""Adapters in the engine: more than fit, broken ones, new versions under an old name."""

from __future__ import annotations

import json
import shutil

import pytest

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError, NotFoundError
from outrider.platform.core.messages import EngineRequest

LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture
def alone(models, make_engine, run, prompts, greedy):
    """The text of each adapter by itself."""
    engine = make_engine(**LORA, max_loras=3)
    return {n: run(engine, [(prompts[1], greedy, models.lora(n))])[0].token_ids for n in (None, "a", "b", "c")}


def test_more_adapters_than_fit_take_turns(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=1, max_cpu_loras=3, speculative_config=models.speculative("draft_model", 3))
    names = ["a", "b", None, "c", "a", "b", "c", None]
    outcomes = run(engine, [(prompts[1], greedy, models.lora(n)) for n in names])
    assert [o.token_ids for o in outcomes] == [alone[n] for n in names]
    assert len({tuple(t) for t in alone.values()}) == 4
    assert sum(info.level == "device" for info in engine.list_adapters()) == 1


def test_a_broken_adapter_fails_its_own_requests_and_nothing_else(
    models, make_engine, run, prompts, greedy, alone, tmp_path
):
    broken = tmp_path / "broken"
    shutil.copytree(models.adapters["a"], broken)
    (broken / "adapter_model.safetensors").write_bytes(b"not safetensors")
    engine = make_engine(**LORA, max_loras=2)
    jobs = [
        (prompts[1], greedy, models.lora("a")),
        (prompts[1], greedy, LoRARequest("broken", path=str(broken))),
        (prompts[1], greedy),
    ]
    good, bad, base = run(engine, jobs)
    assert bad.error.type == "InvalidAdapter"
    assert bad.token_ids == []
    assert good.token_ids == alone["a"]
    assert base.token_ids == alone[None]


def test_a_missing_folder_is_refused_at_once(make_engine, greedy):
    engine = make_engine(**LORA)
    with pytest.raises(AdapterError, match="nowhere"):
        engine.add_request(EngineRequest("x", [3], greedy, lora=LoRARequest("x", path="/nowhere/at/all")))


def test_without_lora_an_adapter_is_refused(models, make_engine, greedy):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        engine.add_request(EngineRequest("x", [3], greedy, lora=models.lora("a")))
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        engine.load_adapter(models.lora("a"))
    with pytest.raises(NotFoundError):
        engine.unload_adapter("a")


def test_rank_above_the_limit_names_both_figures(models, make_engine):
    engine = make_engine(enable_lora=True, max_lora_rank=4)
    with pytest.raises(AdapterError, match=r"8.*4"):
        engine.load_adapter(models.lora("b"))


def test_names_are_taken_until_unloaded(models, make_engine):
    engine = make_engine(**LORA)
    info = engine.load_adapter(models.lora("a"))
    assert (info.name, info.rank, info.path) == ("a", 4, models.adapters["a"])
    with pytest.raises(InvalidUserInputError, match="already"):
        engine.load_adapter(models.lora("a"))
    engine.unload_adapter("a")
    with pytest.raises(NotFoundError):
        engine.unload_adapter("a")
    engine.load_adapter(models.lora("a"))


def test_a_reload_is_never_confused_with_what_it_replaced(models, make_engine, run, prompts, greedy, alone):
    """Same name, other content: running requests finish on the old version, and no stale KV is found by the new one."""
    engine = make_engine(**LORA, max_loras=3)
    engine.load_adapter(LoRARequest("x", path=models.adapters["a"]))
    request = EngineRequest("old", list(prompts[1]), greedy, [1], lora=LoRARequest("x", path=models.adapters["a"]))
    engine.add_request(request)
    old = []
    for _ in range(3):
        old += [t for delta in engine.step() for t in delta.token_ids]
    engine.load_adapter(LoRARequest("x", path=models.adapters["b"]), load_inplace=True)
    new = run_with(engine, run, prompts[1], greedy, LoRARequest("x", path=models.adapters["b"]), old)
    assert new.token_ids == alone["b"]
    assert new.num_cached_tokens == 0
    assert old == alone["a"]
    again = run(engine, [(prompts[1], greedy, LoRARequest("x", path=models.adapters["b"]))])[0]
    assert again.num_cached_tokens > 0
    assert again.token_ids == alone["b"]


def run_with(engine, run, prompt, params, lora, others):
    """Run one request while the tokens of others are collected."""
    original = engine.step

    def step():
        deltas = original()
        others.extend(t for d in deltas if d.request_id == "old" for t in d.token_ids)
        return [d for d in deltas if d.request_id != "old"]

    engine.step = step
    try:
        return run(engine, [(prompt, params, lora)])[0]
    finally:
        engine.step = original


def test_unloading_lets_running_requests_finish(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=1)
    engine.load_adapter(models.lora("a"))
    engine.add_request(EngineRequest("r", list(prompts[1]), greedy, [1], lora=models.lora("a")))
    tokens = [t for _ in range(2) for d in engine.step() for t in d.token_ids]
    engine.unload_adapter("a")
    assert engine.list_adapters() == []
    while engine.has_work():
        tokens += [t for d in engine.step() for t in d.token_ids]
    assert tokens == alone["a"]
    assert run(engine, [(prompts[1], greedy, models.lora("b"))])[0].token_ids == alone["b"]


def test_same_prompt_with_another_adapter_shares_no_blocks(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=3)
    for name in ("a", "b", None, "a"):
        (outcome,) = run(engine, [(prompts[1], greedy, models.lora(name))])
        assert outcome.token_ids == alone[name]
    assert outcome.num_cached_tokens == 16


def test_tenants_and_salts_share_no_blocks(make_engine, run, prompts, greedy):
    engine = make_engine()
    fields = [{}, {"tenant": "t"}, {"cache_salt": "t"}, {"tenant": "t", "cache_salt": "u"}, {"tenant": "t"}]
    outcomes = [run(engine, [(prompts[3], greedy, None, f)])[0] for f in fields]
    assert [o.num_cached_tokens for o in outcomes] == [0, 0, 0, 0, 48]


def test_adapter_statistics(models, make_engine, prompts):
    engine = make_engine(**LORA, max_loras=1)
    engine.load_adapter(models.lora("a"), pinned=False)
    params = SamplingParams(temperature=0, max_tokens=8)
    for index, name in enumerate("aab"):
        engine.add_request(EngineRequest(str(index), list(prompts[0]), params, lora=models.lora(name)))
    engine.step()
    stats = engine.stats()
    assert stats.running_adapters == ["a"]
    assert stats.waiting_adapters == ["b"]
    assert sum(stats.num_waiting_by_reason.values()) == 1
    assert {info.name: info.num_running for info in stats.adapters} == {"a": 2, "b": 0}
    while engine.has_work():
        engine.step()
    assert len(engine.stats().lora_load_seconds + stats.lora_load_seconds) == 2


def test_a_base_mismatch_names_the_module(models, make_engine, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(models.adapters["a"], other)
    from safetensors.torch import load_file, save_file

    tensors = load_file(other / "adapter_model.safetensors")
    save_file({k.replace("layers.2.", "layers.9."): v for k, v in tensors.items()}, other / "adapter_model.safetensors")
    engine = make_engine(**LORA)
    with pytest.raises(AdapterError, match=r"layers\.9"):
        engine.load_adapter(LoRARequest("other", path=str(other)))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(AdapterError, match="IA3"):
        engine.load_adapter(LoRARequest("other", path=str(other)))
