"""`pause_generation` with steps that overlap: nothing is lost or computed, and the text is the same."""

import pytest

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_model_path

PROMPT = "The capital of France is " * 12
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(async_scheduling=True, max_num_seqs=2) as llm:
        yield llm


def test_a_wait_ends_when_the_client_aborts_what_runs():
    with LLM(async_scheduling=False) as llm:  # nothing is in flight that would be committed
        engine, core = llm.llm_engine, llm.llm_engine.engine_core
        engine.add_request("a", PROMPT, PARAMS)
        while not engine.step():
            pass
        llm.pause_generation("wait")
        engine.abort_request(["a"])
        assert not core.has_work()
        engine.add_request("later", PROMPT, PARAMS)
        llm.update_weights(demo_model_path())  # nothing runs
        llm.resume_generation()
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
        assert outputs[-1].num_cached_tokens == 0
        core.check_integrity()


@pytest.mark.parametrize("clear_cache", [True, False])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_modes(llm, mode, clear_cache):
    engine, core = llm.llm_engine, llm.llm_engine.engine_core
    expected = llm.generate(PROMPT, PARAMS, use_tqdm=False)[0].outputs[0].token_ids
    outputs = {}

    def step():
        outputs.update({output.request_id: output.outputs[0] for output in engine.step()})

    for name in ("a", "b", "queued"):
        engine.add_request(name, PROMPT, PARAMS)
    while not outputs:
        step()
    preemptions = llm.stats().num_preemptions
    llm.pause_generation(mode, clear_cache=clear_cache)
    engine.add_request("later", PROMPT, PARAMS)
    while core.has_work():
        step()
    core.check_integrity()
    steps = llm.stats().num_steps
    assert engine.step() == []
    assert llm.stats().num_steps == steps
    assert "later" not in outputs
    ends = {"abort": "abort", "wait": "length", "keep": None}
    assert {outputs[name].finish_reason for name in ("a", "b")} == {ends[mode]}
    if mode == "keep":
        assert llm.stats().num_preemptions == preemptions, "the weights are the same"
    else:
        assert llm.reset_prefix_cache()
        assert outputs["queued"].finish_reason == ends[mode]
    llm.resume_generation()
    while engine.has_unfinished_requests():
        step()
    finished = [name for name, output in outputs.items() if output.finish_reason == "length"]
    assert len(finished) == (1 if mode == "abort" else 4)
    assert all(outputs[name].token_ids == expected for name in finished)
    assert outputs["a"].token_ids == expected[: len(outputs["a"].token_ids)]
    core.check_integrity()
