"""Adapters in the engine: more than fit, broken ones, new versions under an old name."""

from __future__ import annotations

import json
import shutil
import time
from itertools import product
from threading import current_thread

import pytest

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError, NotFoundError
from outrider.platform.core.messages import EngineRequest

LORA = {"enable_lora": True, "max_lora_rank": 8}


@pytest.fixture(scope="module")
def alone(models, plain_tokens, prompts):
    """The text of each adapter by itself."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return {name: plain_tokens([(prompts[1], params, models.lora(name))])[0] for name in (None, "a", "b", "c")}


def test_more_adapters_than_fit_take_turns(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=1, max_cpu_loras=3, speculative_config=models.speculative("draft_model", 3))
    names = ["a", "b", None, "c", "a", "b", "c", None]
    outcomes = run(engine, [(prompts[1], greedy, models.lora(n)) for n in names])
    assert [o.token_ids for o in outcomes] == [alone[n] for n in names]
    assert len({tuple(t) for t in alone.values()}) == 4
    assert sum(info.level == "device" for info in engine.adapters.list()) == 1


def test_a_broken_adapter_fails_only_its_own_requests(models, make_engine, run, prompts, greedy, alone, tmp_path):
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


@pytest.mark.parametrize("server", [True, False])
def test_a_server_of_a_large_model_starts_the_reader_before_it_is_needed(make_engine, monkeypatch, server):
    monkeypatch.setattr("outrider.platform.engine.description.LARGE_WEIGHTS", 0)
    monkeypatch.setattr("outrider.platform.engine.setup.leaves_a_core_free", lambda: server)
    reader = make_engine(**LORA)._adapters._transfers.reader
    assert (reader.pid is not None) == server
    assert reader.num_reads == 0


def test_a_missing_folder_is_refused_at_once(make_engine, greedy):
    engine = make_engine(**LORA)
    with pytest.raises(AdapterError, match="nowhere"):
        engine.add_request(EngineRequest("x", [3], greedy, lora=LoRARequest("x", path="/nowhere/at/all")))


def test_without_lora_an_adapter_is_refused(models, make_engine, greedy):
    engine = make_engine()
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        engine.add_request(EngineRequest("x", [3], greedy, lora=models.lora("a")))
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        engine.adapters.load(models.lora("a"))
    with pytest.raises(NotFoundError):
        engine.adapters.unload("a")


def test_rank_above_the_limit_names_both_figures(models, make_engine):
    engine = make_engine(enable_lora=True, max_lora_rank=4)
    with pytest.raises(AdapterError, match=r"8.*4"):
        engine.adapters.load(models.lora("b"))


def test_names_are_taken_until_unloaded(models, make_engine):
    engine = make_engine(**LORA)
    info = engine.adapters.load(models.lora("a"))
    assert (info.name, info.rank, info.path) == ("a", 4, models.adapters["a"])
    with pytest.raises(InvalidUserInputError, match="already"):
        engine.adapters.load(models.lora("a"))
    engine.adapters.unload("a")
    with pytest.raises(NotFoundError):
        engine.adapters.unload("a")
    engine.adapters.load(models.lora("a"))


def test_a_reload_shares_no_kv_with_the_old_version(models, make_engine, run, prompts, greedy, alone):
    """Same name, other content: running requests finish on the old version, and no stale KV is found by the new one."""
    engine = make_engine(**LORA, max_loras=3)
    engine.adapters.load(LoRARequest("x", path=models.adapters["a"]))
    request = EngineRequest("old", list(prompts[1]), greedy, [1], lora=LoRARequest("x", path=models.adapters["a"]))
    engine.add_request(request)
    old = []
    for _ in range(3):
        old += [t for delta in engine.step() for t in delta.token_ids]
    engine.adapters.load(LoRARequest("x", path=models.adapters["b"]), load_inplace=True)
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
    engine.adapters.load(models.lora("a"))
    engine.add_request(EngineRequest("r", list(prompts[1]), greedy, [1], lora=models.lora("a")))
    tokens = [t for _ in range(2) for d in engine.step() for t in d.token_ids]
    engine.adapters.unload("a")
    assert engine.adapters.list() == []
    while engine.has_work():
        tokens += [t for d in engine.step() for t in d.token_ids]
    assert tokens == alone["a"]
    assert run(engine, [(prompts[1], greedy, models.lora("b"))])[0].token_ids == alone["b"]


def test_unloading_with_abort_aborts_its_requests(models, make_engine, run, prompts, greedy, alone):
    """Running or waiting; the base model's request in the batch is unaffected, and all memory is freed."""
    engine = make_engine(**LORA, max_loras=1, max_num_seqs=2)
    engine.adapters.load(models.lora("a"))
    for request_id, name in (("runs", "a"), ("base", None), ("waits", "a")):
        request = EngineRequest(request_id, list(prompts[1]), greedy, [1], lora=models.lora(name))
        engine.add_request(request)
    deltas = []
    while not any(delta.request_id == "runs" for delta in deltas):
        deltas += engine.step()
    engine.adapters.unload("a", "abort")
    assert [request.request_id for request in engine.scheduler.running] == ["base"]
    while engine.has_work():
        deltas += engine.step()
    errors = {delta.request_id: delta.error.type for delta in deltas if delta.error is not None}
    assert errors == {"runs": "NotFoundError", "waits": "NotFoundError"}, "half an answer is an error"
    assert [t for d in deltas if d.request_id == "base" for t in d.token_ids] == alone[None]
    stats = engine.stats()
    assert (stats.lora_host_bytes, stats.lora_rows_used, stats.num_adapters, stats.adapters) == (0, 0, 0, [])
    assert run(engine, [(prompts[1], greedy, models.lora("a"))])[0].token_ids == alone["a"]
    with pytest.raises(InvalidRequestError, match="drain, abort"):
        engine.adapters.unload("a", "at once")


def test_pin_and_unpin_a_loaded_adapter(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=2)  # 16 rows: 4, 8 and whatever c has
    engine.adapters.register([models.lora("a"), models.lora("b")])
    assert [(info.level, info.pinned) for info in engine.adapters.list()] == [("disk", False)] * 2
    assert engine.adapters.pin("a").level == "device", "it is loaded for that"
    for name in ("b", "c", "b", "c"):
        assert run(engine, [(prompts[1], greedy, models.lora(name))])[0].token_ids == alone[name]
        assert next(info.level for info in engine.adapters.list() if info.name == "a") == "device"
    with pytest.raises(InvalidUserInputError, match="cannot pin 'b'"):
        engine.adapters.pin("b")
    assert engine.adapters.unpin("a").pinned is False
    assert engine.adapters.pin("b").pinned is True
    for call in (engine.adapters.pin, engine.adapters.unpin):
        with pytest.raises(NotFoundError):
            call("nobody")


def test_adapters_are_prefetched_while_the_batch_is_full(models, make_engine, prompts, greedy):
    engine = make_engine(**LORA, max_loras=2, max_num_seqs=1)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    for name, params in ((None, long), ("a", greedy)):
        engine.add_request(EngineRequest(f"{name}", list(prompts[1]), params, lora=models.lora(name)))
    levels = set()
    while engine.has_work() and "device" not in levels:
        engine.step()
        time.sleep(0.02)  # the loader's thread may have to wait for a core
        levels |= {info.level for info in engine.adapters.list()}
    running = engine.stats().running_adapters
    engine.abort(["None"])
    while engine.has_work():
        engine.step()
    assert "device" in levels, "its turn has not come yet, and it is there"
    assert running == []


def test_more_rows_than_there_is_memory(make_engine):
    with pytest.raises(InvalidRequestError, match="no memory for the adapters' rows: lower max_loras") as error:
        make_engine(**LORA | {"max_lora_rank": 10**12})
    assert error.value.param == "max_lora_rank"


def test_lora_memory(models, make_engine, run, prompts, greedy, alone):
    """In bytes, on the command line's terms; too little is refused with both figures."""
    with pytest.raises(
        InvalidRequestError, match=r"lora_memory of 1024 bytes \(1.0 KiB\) has room for 0 rank rows"
    ) as error:
        make_engine(**LORA, lora_memory="1KiB")
    assert error.value.param == "lora_memory"
    engine = make_engine(**LORA, max_loras=1, lora_memory="1MiB", max_cpu_lora_memory="100MB")
    for name in "abc":
        assert run(engine, [(prompts[1], greedy, models.lora(name))])[0].token_ids == alone[name]
    assert {info.level for info in engine.adapters.list()} == {"device"}


def test_same_prompt_with_another_adapter_shares_no_blocks(models, make_engine, run, prompts, greedy, alone):
    engine = make_engine(**LORA, max_loras=3)
    for name in ("a", "b", None, "a"):
        (outcome,) = run(engine, [(prompts[1], greedy, models.lora(name))])
        assert outcome.token_ids == alone[name]
    assert outcome.num_cached_tokens == 16


def test_adapter_reads_use_one_thread(models, make_engine, monkeypatch):
    """They are loader threads'; for the engine's own thread nothing changes."""
    alone = []
    monkeypatch.setattr("outrider.lora.tiers.loader_threads.compute_alone", lambda: alone.append(current_thread().name))
    engine = make_engine(**LORA)
    engine.adapters.register([models.lora("b")])
    for verb, arguments in (("load", {"request": models.lora("a")}), ("pin", {"name": "b"})):
        engine.adapters.start(verb, arguments).result()
    assert alone == ["lora-loader"]
    assert engine.adapters.start("pin", {"name": "a"}) is None
    assert alone == ["lora-loader"]


def test_adapter_statistics(models, make_engine, prompts):
    engine = make_engine(**LORA, max_loras=1)
    engine.adapters.load(models.lora("a"), pinned=False)
    params = SamplingParams(temperature=0, max_tokens=8)
    for index, name in enumerate("aab"):
        engine.add_request(EngineRequest(str(index), list(prompts[0]), params, lora=models.lora(name)))
    while not engine.scheduler.running:  # until the first is on the device
        engine.step()
    stats = engine.stats()
    assert stats.running_adapters == ["a"]
    assert stats.waiting_adapters == ["b"]
    assert sum(stats.num_waiting_by_reason.values()) == 1
    assert {info.name: (info.num_running, info.num_waiting) for info in stats.adapters} == {"a": (2, 0), "b": (0, 1)}
    (a,) = [info for info in stats.adapters if info.name == "a"]
    assert a.num_bytes > 0
    assert a.load_seconds > 0
    assert a.rows == stats.lora_rows_used == 4
    assert stats.lora_rows == 8
    assert stats.num_adapters == 2
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
        engine.adapters.load(LoRARequest("other", path=str(other)))
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))
    with pytest.raises(AdapterError, match="IA3"):
        engine.adapters.load(LoRARequest("other", path=str(other)))


# --- adapters on lm_head and embed_tokens ---

WIDE = {
    "head": {"r": 5, "target_modules": ["lm_head"], "lora_bias": True},
    "tokens": {"r": 3, "target_modules": ["embed_tokens", "q_proj"]},
    "both": {"r": 8, "target_modules": ["embed_tokens", "lm_head", "v_proj", "down_proj"]},
    "saved": {"r": 2, "target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "rows": {"r": 2, "target_modules": ["k_proj"], "trainable_token_indices": [5, 6, 7, 8, 30]},
}


@pytest.fixture(scope="module")
def wide(models, tmp_path_factory):
    """Requests by name, for adapters that reach the vocabulary, one that does not, and the base model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    requests = {None: None, "a": models.lora("a")}
    for index, (name, options) in enumerate(WIDE.items()):
        torch.manual_seed(index)
        folder = str(tmp_path_factory.mktemp(name))
        base = AutoModelForCausalLM.from_pretrained(models.target, dtype=torch.float32)
        config = LoraConfig(lora_alpha=1, init_lora_weights=False, **options)
        model = get_peft_model(base, config)
        for key, parameter in model.named_parameters():
            if "modules_to_save" in key or "trainable_tokens_delta" in key:
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        requests[name] = LoRARequest(name, path=folder)
    return requests


@pytest.mark.parametrize("method", [None, "draft_model"])
def test_adapters_on_the_vocabulary_equal_peft(models, make_engine, run, prompts, wide, method):
    import torch
    from peft import PeftModel

    engine = make_engine(**LORA, max_loras=6, speculative_config=models.speculative(method, 3))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    outcomes = dict(zip(wide, run(engine, [(prompts[1], params, lora) for lora in wide.values()]), strict=True))
    texts = {name: outcome.token_ids for name, outcome in outcomes.items()}
    assert len({tuple(text) for text in texts.values()}) == len(wide)
    for name in WIDE:
        model = PeftModel.from_pretrained(models.reference(), wide[name].path).eval()
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[1] + texts[name][:-1]])).logits[0]
        assert logits[len(prompts[1]) - 1 :].argmax(-1).tolist() == texts[name], name
        whole = torch.tensor(prompts[1] + texts[name])[1:, None]
        expected = logits.log_softmax(-1).gather(1, whole).flatten().tolist()
        entries = [*outcomes[name].prompt_logprobs[1:], *outcomes[name].logprobs]
        assert [entry.logprobs[0] for entry in entries] == pytest.approx(expected, abs=1e-4), name


def _numbers(outcome):
    """(token ids, log-probabilities) of all that was asked for."""
    entries = [*outcome.logprobs, *outcome.prompt_logprobs[1:]]
    return [e.token_ids for e in entries], [value for e in entries for value in e.logprobs]


@pytest.fixture(scope="module")
def rows(plain_engine, run, prompts, wide):
    """Jobs of every adapter, and the outputs of an engine without drafts."""
    options = {"max_tokens": 20, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}
    sampling = [SamplingParams(temperature=0, **options), SamplingParams(temperature=0.8, seed=11, **options)]
    jobs = list(product((prompts[2], prompts[4]), sampling, wide.values()))
    return jobs, run(plain_engine, jobs)


@pytest.mark.parametrize(
    ("method", "k"),
    [("draft_model", 1), *((method, 3) for method in ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa"))],
)
def test_each_row_of_logits_has_its_own_adapter(models, make_engine, run, wide, rows, method, k, monkeypatch):
    """1 + k rows of each request, and its prompt's, in a batch with requests without an adapter there."""
    monkeypatch.setattr("outrider.platform.engine.runner.model_runner.LOGITS_CHUNK", 7)
    jobs, plain = rows
    engine = {"max_loras": 6, "max_num_seqs": 10, "enable_prefix_caching": False, **LORA}
    drafted = run(make_engine(**engine, speculative_config=models.speculative(method, k)), jobs)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.speculation.num_accepted_tokens for o in drafted if o.speculation) > 0
    for index, name in enumerate(wide):
        assert sum(o.speculation.num_draft_tokens for o in drafted[index :: len(wide)] if o.speculation) > 0, name
    for one, other in zip(drafted, plain, strict=True):
        ids, values = _numbers(one)
        expected_ids, expected = _numbers(other)
        assert [i[0] for i in ids] == [i[0] for i in expected_ids]
        assert values == pytest.approx(expected, abs=1e-4)


def test_no_launch_without_vocabulary_adapters(models, make_engine, run, prompts, greedy, wide):
    """No pass over the head or the embeddings has an adapter's product when none of the batch wants one."""
    engine = make_engine(**LORA, max_loras=6)
    embedding, calls = engine._runner._model.embedding, []

    class Spy:
        def __init__(self, name, site):
            self.name, self.site = name, site

        def add(self, y, x, adapters):
            before = y.clone()
            self.site.add(y, x, adapters)
            calls.append((self.name, not before.equal(y)))

    embedding.head_lora = Spy("head", embedding.head_lora)
    embedding.lookup_lora = Spy("tokens", embedding.lookup_lora)
    run(engine, [(prompts[1], greedy, wide["both"]), (prompts[0], greedy)])
    assert {("head", True), ("tokens", True)} <= set(calls)
    calls.clear()  # that adapter stays on the device
    run(engine, [(prompts[1], greedy, models.lora("a")), (prompts[0], greedy)])
    assert {name for name, _ in calls} <= {"tokens"}
    assert not any(changed for _, changed in calls)
