"""`update_weights` of a model in use: the text is that of a fresh engine on the same files, or the old one's."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters, demo_eagle3_path, demo_model_path
from outrider.platform.core.errors import AsleepError, InvalidRequestError, InvalidUserInputError, NotFoundError
from outrider.platform.core.weight_source import SHARED_MEMORY
from outrider.platform.engine.executor import rank_process
from outrider.platform.engine.memory.cache_events import CacheEvents

from ..rank_texts import OPTIONS
from ..thread_ranks import ranks_as_threads

PROMPTS = ["The capital of France is " * 6, "Once upon a time there was "]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
FIXED = {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 3, "adaptive": False}


def noisy(folder: Path, target: Path) -> Path:
    """A copy of a checkpoint with other weights."""
    shutil.copytree(folder, target)
    tensors, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            noise = 0.05 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    return noisy(demo_model_path(), tmp_path_factory.mktemp("weights") / "new")


@pytest.fixture(scope="module")
def new_draft(tmp_path_factory):
    return noisy(demo_eagle3_path(), tmp_path_factory.mktemp("weights") / "draft")


@pytest.fixture(scope="module")
def dora(tmp_path_factory):
    """An adapter with magnitudes, from which and the base's weights gains are computed."""
    folder = shutil.copytree(
        demo_adapters()["sql"], tmp_path_factory.mktemp("adapters") / "dora", ignore=shutil.ignore_patterns("draft")
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    tensors = load_file(folder / "adapter_model.safetensors")
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(len(tensors[name]))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def fresh(new_folder, new_draft):
    """An engine that was started on the new weights."""
    with LLM(str(new_folder), enable_lora=True, speculative_config=FIXED | {"model": str(new_draft)}) as llm:
        yield llm


@pytest.fixture(scope="module")
def engine():
    with LLM(str(demo_model_path()), enable_lora=True, speculative_config=FIXED) as llm:
        yield llm


@pytest.fixture
def llm(engine):
    """An engine on the demo's weights, before each test."""
    engine.update_weights(demo_model_path(), weight_version="demo")
    engine.update_weights(demo_eagle3_path(), draft=True)
    return engine


def outputs(llm):
    sql = LoRARequest("sql", 1, str(demo_adapters()["sql"]))
    return [output for lora in (None, sql) for output in llm.generate(PROMPTS, PARAMS, lora, use_tqdm=False)]


def texts(llm):
    return [output.outputs[0].text for output in outputs(llm)]


def accepted(llm):
    llm.reset_prefix_cache()
    return [output.metrics.num_accepted_tokens for output in outputs(llm)]


def test_the_text_is_that_of_a_fresh_engine(llm, fresh, new_folder):
    before = texts(llm)
    assert before != texts(fresh)
    llm.update_weights(new_folder, weight_version="step 1")
    assert texts(llm) == texts(fresh)
    assert [output.num_cached_tokens > 0 for output in outputs(llm)] == [True, False] * 2
    assert llm.weight_version() == "step 1"
    llm.llm_engine.engine_core.check_integrity()
    llm.sleep(2)
    with pytest.raises(AsleepError):
        llm.update_weights(new_folder)
    moved = new_folder.rename(new_folder.with_name("moved"))
    with pytest.raises(NotFoundError):
        llm.wake_up()
    assert llm.is_sleeping()
    moved.rename(new_folder)
    llm.wake_up()  # which reads the new files
    assert texts(llm) == texts(fresh)
    llm.update_weights(demo_model_path())
    assert texts(llm) == before


def test_draft_weights(llm, fresh, new_folder, new_draft):
    before = texts(llm), accepted(llm)
    llm.update_weights(new_draft, draft=True)
    assert texts(llm) == before[0]
    assert accepted(llm) != before[1]
    llm.update_weights(new_folder)
    assert accepted(llm) == accepted(fresh)
    llm.update_weights(demo_model_path())
    llm.update_weights(demo_eagle3_path() / "model.safetensors", draft=True)
    assert accepted(llm) == before[1]
    with pytest.raises(NotFoundError, match="no readable config") as caught:
        llm.update_weights(demo_adapters()["sql"], draft=True)
    assert caught.value.param == "path"
    assert accepted(llm) == before[1]


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_request_that_is_kept_goes_on_under_the_new_weights(llm, fresh, new_folder, clear_cache):
    engine, ids = llm.llm_engine, llm.get_tokenizer().encode(PROMPTS[0])
    old = llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    llm.reset_prefix_cache()
    engine.add_request("kept", {"prompt_token_ids": ids}, PARAMS)
    output = None
    while output is None or len(output.outputs[0].token_ids) < 6:
        [output] = engine.step() or [output]
    with pytest.raises(InvalidUserInputError, match="pause generation"):
        llm.update_weights(new_folder)
    llm.pause_generation("keep", clear_cache=clear_cache)
    [output] = engine.step() or [output]
    so_far = output.outputs[0].token_ids
    assert so_far == old[: len(so_far)]
    llm.update_weights(new_folder)
    llm.resume_generation()
    engine.add_request("new", PROMPTS[0], PARAMS)
    found = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
    left = SamplingParams(temperature=0, max_tokens=24 - len(so_far), ignore_eos=True)
    whole = {"prompt_token_ids": [*ids, *so_far]}
    rest = fresh.generate(whole, left, use_tqdm=False)[0].outputs[0].token_ids
    if clear_cache:
        assert found["kept"] == [*so_far, *rest]
    assert found["kept"][: len(so_far)] == so_far
    assert found["new"] == fresh.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    engine.engine_core.check_integrity()


@pytest.mark.parametrize("draft", [False, True])
def test_a_router_hears_that_no_kv_of_old_weights_is_found(llm, new_folder, new_draft, draft):
    """That of a request that is kept with its KV neither, which publishes none of it."""
    engine, cache = llm.llm_engine, llm.llm_engine.engine_core.scheduler.prefix_cache
    llm.reset_prefix_cache()
    cache.record(events := CacheEvents(cache.block_size))
    try:
        engine.add_request("kept", PROMPTS[0], PARAMS)
        while not engine.step():
            pass
        assert [event["type"] for event in events.take()] == ["BlockStored"]
        llm.pause_generation("keep", clear_cache=False)
        llm.update_weights(new_draft if draft else new_folder, draft=draft)
        assert events.take() == [{"type": "AllBlocksCleared"}]
        llm.resume_generation()
        while engine.has_unfinished_requests():
            engine.step()
        assert events.take() == []
        assert llm.generate(PROMPTS[0], PARAMS, use_tqdm=False)[0].num_cached_tokens == 0
        assert {event["type"] for event in events.take()} == {"BlockStored"}
    finally:
        cache.events = None
    engine.engine_core.check_integrity()


def test_shared_memory(llm, fresh, new_folder, tmp_path):
    name = f"outrider-test-{os.getpid()}.safetensors"
    file = Path(SHARED_MEMORY) / name
    tensors = load_file(new_folder / "model.safetensors")
    before = texts(llm)
    try:
        save_file(tensors, file)
        llm.update_weights(shared_memory=name)
        assert texts(llm) == texts(fresh)
        save_file(tensors | {"extra": torch.zeros(1 << 20)}, file)
        with pytest.raises(InvalidRequestError, match="unexpected: extra"):
            llm.update_weights(shared_memory=name)
        file.unlink()
        file.symlink_to(new_folder / "model.safetensors")
        with pytest.raises(InvalidRequestError, match="no plain file"):
            llm.update_weights(shared_memory=name)
    finally:
        file.unlink()
    with pytest.raises(NotFoundError):
        llm.update_weights(shared_memory=name)
    llm.update_weights(demo_model_path())
    assert texts(llm) == before


def test_ranks_replace_their_shares(new_draft, dora, tmp_path):
    """With processes of two ranks: the text is that of one process which was started on the new files. These have other
    norms, to which an adapter's gains are inverse."""
    new_folder = noisy(demo_model_path(), tmp_path / "new")
    tensors = load_file(new_folder / "model.safetensors")
    scaled = {name: tensor * 1.25 for name, tensor in tensors.items() if "_proj" in name}
    save_file(tensors | scaled, new_folder / "model.safetensors", {"format": "pt"})
    options, adapter = OPTIONS | {"speculative_config": FIXED}, LoRARequest("dora", 2, str(dora))
    with LLM(str(new_folder), **options) as fresh:
        expected = texts(fresh)
        with_gains = fresh.generate(PROMPTS[0], PARAMS, adapter, use_tqdm=False)[0].outputs[0].text
    with LLM(str(demo_model_path()), tensor_parallel_size=2, **options) as llm:
        before = texts(llm)
        llm.update_weights(new_folder)
        llm.update_weights(new_draft, draft=True)
        assert texts(llm) == expected != before
        with pytest.raises(NotFoundError, match="adapter"):
            llm.update_weights(demo_adapters()["sql"])
        assert texts(llm) == expected
        assert llm.generate(PROMPTS[0], PARAMS, adapter, use_tqdm=False)[0].outputs[0].text == with_gains
        llm.unload_lora("dora")
        llm.update_weights(demo_model_path())
        assert texts(llm) == before


def test_weights_that_one_rank_refuses_are_those_of_no_rank(new_folder, monkeypatch, caplog):
    """Such as files that only the first one's machine has."""

    def refused(*_):
        raise InvalidRequestError("path is not there")

    ranks_as_threads(monkeypatch)
    with LLM(str(demo_model_path()), tensor_parallel_size=2, **OPTIONS) as llm:
        before = texts(llm)
        with monkeypatch.context() as patch:
            patch.setattr(rank_process, "WeightUpdate", refused)
            with pytest.raises(InvalidRequestError, match="is refused by another rank") as caught:
                llm.update_weights(new_folder)
            assert caught.value.param == "path"
            assert "rank 1 refuses new weights: path is not there" in caplog.text
        assert texts(llm) == before
        llm.update_weights(new_folder)
        assert texts(llm) != before


def test_refused_weights_leave_the_old_ones(llm, new_folder, tmp_path):
    before = texts(llm)
    bad = shutil.copytree(new_folder, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    name = max(name for name in tensors if "layers" in name)
    save_file(tensors | {name: torch.full_like(tensors[name], torch.inf)}, bad / "model.safetensors", {"format": "pt"})
    for source, message in ((bad, name), (demo_adapters()["sql"], "adapter"), (tmp_path / "nowhere", "does not exist")):
        with pytest.raises((InvalidRequestError, NotFoundError), match=message) as caught:
            llm.update_weights(source)
        assert caught.value.param == "path"
    with pytest.raises(InvalidRequestError, match="at most 256"):
        llm.update_weights(new_folder, weight_version="v" * 257)
    llm.update_weights(demo_model_path(), weight_version="v" * 256)
    assert texts(llm) == before


def test_an_adapter_with_magnitudes_must_be_loaded_again(llm, new_folder, dora):
    llm.load_lora_adapter(LoRARequest("dora", path=str(dora)))
    with pytest.raises(InvalidUserInputError, match="the adapter dora has magnitudes"):
        llm.update_weights(new_folder)
    llm.unload_lora("dora")
    llm.update_weights(new_folder)
