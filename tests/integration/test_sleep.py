"""`LLM.sleep`, `wake_up` and `reset_prefix_cache` with the demo: the text is the same before and after."""

import shutil

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import demo_adapters
from outrider.platform.core.errors import AdapterError, AsleepError, InvalidRequestError

PROMPTS = ["The capital of France is " * 12, "Once upon a time there was " * 10]
PARAMS = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def llm():
    with LLM() as llm:
        yield llm


def texts(llm, adapter):
    return [output.outputs[0].text for output in llm.generate(PROMPTS, PARAMS, adapter, use_tqdm=False)]


def num_cached(llm):
    return [output.num_cached_tokens for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_the_prefix_cache_is_emptied(llm):
    before = texts(llm, None)
    assert all(num_cached(llm))
    assert llm.reset_prefix_cache()
    assert num_cached(llm) == [0, 0]
    assert texts(llm, None) == before


def test_nothing_is_held_once_all_requests_are_finished():
    """If steps overlap, one is in flight when a stop token, or an abort, ends the last request."""
    with LLM(async_scheduling=True) as llm:
        endless, engine = PARAMS.clone(ignore_eos=True), llm.llm_engine
        tokens = llm.generate(PROMPTS[0], endless, use_tqdm=False)[0].outputs[0].token_ids

        def check():
            assert llm.stats().kv_cache_usage == 0.0
            assert llm.reset_prefix_cache()
            assert not engine.engine_core.has_work()

        llm.generate(PROMPTS[0], PARAMS.clone(stop_token_ids=tokens[3:4]), use_tqdm=False)
        check()
        engine.add_request("mine", PROMPTS[0], endless)
        for _ in range(3):
            engine.step()
        engine.abort_request("mine")
        check()


def test_a_failing_last_step_does_not_lose_the_answer(monkeypatch):
    with LLM(async_scheduling=True) as llm:
        endless, engine = PARAMS.clone(ignore_eos=True), llm.llm_engine
        tokens = llm.generate(PROMPTS[0], endless, use_tqdm=False)[0].outputs[0].token_ids
        step = engine.engine_core.step

        def fail_when_nothing_waits():
            if not engine.has_unfinished_requests():
                raise RuntimeError("no memory")
            return step()

        monkeypatch.setattr(engine.engine_core, "step", fail_when_nothing_waits)
        [output] = llm.generate(PROMPTS[0], PARAMS.clone(stop_token_ids=tokens[3:4]), use_tqdm=False)
        assert output.outputs[0].token_ids == tokens[:4]
        monkeypatch.undo()


def test_sleep(llm, tmp_path):
    folder = shutil.copytree(demo_adapters()["sql"], tmp_path / "mine")
    llm.load_lora_adapter(LoRARequest("mine", path=str(folder)), pinned=True)
    before = texts(llm, None), texts(llm, "mine")
    assert before[0] != before[1]
    for level in (1, 2):
        for step in (1, level, 1):  # deeper, and then as deeply as before
            llm.sleep(step)
        assert llm.is_sleeping()
        for refused in (lambda: texts(llm, None), lambda: llm.adapters.list()):
            with pytest.raises(AsleepError):
                refused()
        assert llm.reset_prefix_cache()
        assert llm.stats().num_running == 0
        llm.wake_up()
        assert not llm.is_sleeping()
        assert (texts(llm, None), texts(llm, "mine")) == before
        assert [info.pinned for info in llm.adapters.list() if info.name == "mine"] == [True]
    llm.load_lora_adapter(LoRARequest("gone", path=str(shutil.copytree(folder, tmp_path / "gone"))))
    llm.sleep(2)
    shutil.rmtree(tmp_path / "gone")
    shutil.rmtree(folder)
    shutil.copytree(demo_adapters()["json"], folder)
    llm.wake_up()
    with pytest.raises(AdapterError, match="mine"):
        texts(llm, "mine")
    assert {"mine", "gone"} & {info.name for info in llm.adapters.list()} == {"mine"}


def test_a_wrong_level(llm):
    with pytest.raises(InvalidRequestError, match="level must be 1 or 2"):
        llm.sleep(3)
    assert not llm.is_sleeping()
