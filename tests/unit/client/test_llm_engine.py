"""`LLMEngine` over the fake engine: requests that its caller steps."""

from collections.abc import Iterator

import async_helpers
import fake_engine
import pytest

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.client.llm_engine import LLMEngine
from outrider.platform.client.metrics import Counter
from outrider.platform.client.profile_folder import PROFILE_VARIABLES
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    AsleepError,
    InvalidRequestError,
    InvalidUserInputError,
    NotFoundError,
    OutriderError,
    PromptTooLongError,
    ShuttingDownError,
)
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.outputs import RequestOutput
from outrider.platform.core.sampling_params import RequestOutputKind, SamplingParams


@pytest.fixture
def engine(model_path: str) -> Iterator[LLMEngine]:
    made = LLMEngine.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine", usage_context=None)
    yield made
    made.engine_core.check_integrity()
    made.shutdown()
    with pytest.raises(ShuttingDownError):
        made.add_request("late", [5])


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def params(kind: RequestOutputKind = RequestOutputKind.CUMULATIVE, **fields: int) -> SamplingParams:
    return SamplingParams(max_tokens=5, output_kind=kind, **fields)


def test_outputs_come_in_the_form_that_was_asked_for(engine: LLMEngine) -> None:
    for kind in RequestOutputKind:
        assert engine.add_request(kind.name, [5, 6, 7], params(kind)) == kind.name
    assert engine.get_num_unfinished_requests() == 3
    outputs = run(engine)
    tokens = {name: [output.outputs[0].token_ids for output in several] for name, several in outputs.items()}
    whole = [5, 6, 7, 5, 6]
    assert tokens["FINAL_ONLY"] == [whole]
    assert len(tokens["DELTA"]) > 1
    assert [token for piece in tokens["DELTA"] for token in piece] == whole
    assert tokens["CUMULATIVE"] == [whole[: len(piece)] for piece in tokens["CUMULATIVE"]]
    assert tokens["CUMULATIVE"][-1] == whole
    assert all([output.finished for output in several] == [False] * (len(several) - 1) + [True]
               for several in outputs.values())  # fmt: skip
    assert (engine.get_num_unfinished_requests(), engine.step()) == (0, [])


def test_requests_come_at_any_time_and_ids_may_be_used_again(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6], params(n=2))
    engine.step()
    engine.add_request("b", "hello", params(RequestOutputKind.FINAL_ONLY))
    with pytest.raises(InvalidRequestError, match="already running"):
        engine.add_request("a", [5], params())
    outputs = run(engine)
    assert [len(completion.token_ids) for completion in outputs["a"][-1].outputs] == [5, 5]
    assert outputs["b"][0].prompt == "hello"
    engine.add_request("a", [8], params(RequestOutputKind.FINAL_ONLY))
    assert run(engine)["a"][0].outputs[0].token_ids == [8] * 5


def test_an_aborted_request_has_no_more_output(engine: LLMEngine) -> None:
    for name in "abc":
        engine.add_request(name, [fake_engine.NEVER_END if name == "a" else 6], params())
    engine.step()
    engine.abort_request("a")
    engine.abort_request(["c", "unknown"])
    assert run(engine).keys() == {"b"}


def test_a_failed_request_is_reported_after_the_others(engine: LLMEngine) -> None:
    engine.add_request("good", [6], params())
    engine.add_request("bad", [fake_engine.FAIL_REQUEST], params(n=2))
    assert [output.request_id for output in engine.step()] == ["good"]
    assert engine.has_unfinished_requests()
    with pytest.raises(OutriderError, match="the adapter is broken") as caught:
        engine.step()
    assert caught.value.__notes__ == ["request 'bad'"]
    assert run(engine)["good"][-1].finished


def test_a_refused_request_leaves_nothing(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="prompt"):
        engine.add_request("a", [10**6], params())
    with pytest.raises(RuntimeError):
        engine.add_request("a", [fake_engine.RAISE_IN_ADD], params())
    with pytest.raises(InvalidRequestError, match="request_id must be a string"):
        engine.add_request(["a"], [5], params())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'priorty'; did you mean 'priority'"):
        engine.add_request("a", [5], params(), priorty=1)
    assert not engine.has_unfinished_requests()
    engine.add_request("a", [5], params(), arrival_time=0.0, trace_headers=None, priority=1)
    assert run(engine)["a"]


def test_a_wrong_id_is_refused_before_its_adapter_is_known(engine: LLMEngine) -> None:
    for name in ("", "\ud800", 5):
        with pytest.raises(InvalidRequestError, match="request_id"):
            engine.prepare([5], request_id=name, lora_request=LoRARequest("x", 7, "/x"))  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="integer 7"):
        engine.pin_lora(7)


def test_adapters_by_vllms_integers(engine: LLMEngine) -> None:
    first, second = LoRARequest("one", 1, "/one"), LoRARequest("two", 2, "/two")
    assert engine.add_lora(first)
    assert engine.add_lora(first)  # again
    assert engine.list_loras() == {1}
    engine.add_request("a", [5], params(), lora_request=second)  # which makes its number known
    engine.load_lora_adapter(second)
    run(engine)
    assert engine.list_loras() == {1, 2}
    assert engine.pin_lora(2).name == "two"
    with pytest.raises(NotFoundError, match="integer 3"):
        engine.pin_lora(3)
    assert engine.remove_lora(1)
    assert not engine.remove_lora(1)
    assert not engine.remove_lora(3)
    assert engine.list_loras() == {2}
    assert [info.name for info in engine.list_lora_adapters()] == ["two"]


def test_methods_that_llm_has_too(engine: LLMEngine) -> None:
    engine.add_request("a", [5], params(RequestOutputKind.FINAL_ONLY))
    assert run(engine)["a"][0].finished
    values = {metric.name: metric.value for metric in engine.get_metrics() if isinstance(metric, Counter)}
    assert values["vllm:generation_tokens"] == 5
    engine.start_profile("/folder", "x")
    assert engine.stop_profile() == "/folder/x.json"
    assert engine.get_default_sampling_params() == SamplingParams()
    engine.sleep(2)
    assert engine.is_sleeping()
    with pytest.raises(AsleepError):
        engine.add_request("b", [5], params())
    engine.wake_up()
    engine.add_request("b", [5], params())
    assert run(engine)["b"][-1].finished


def test_generate_is_refused_while_the_engine_is_stepped_by_the_user(model_path: str) -> None:
    with LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine") as llm:
        llm.llm_engine.add_request("mine", [5], params())
        with pytest.raises(InvalidUserInputError, match="llm_engine"):
            llm.generate([6])
        assert run(llm.llm_engine)["mine"][-1].finished
        assert llm.generate([6], params(RequestOutputKind.DELTA))[0].outputs[0].token_ids == [6] * 5


@pytest.mark.parametrize("kind", ["DELTA", 3, None, True])
def test_kinds_that_do_not_exist(kind: object) -> None:
    if kind is None or kind is True:  # the default, and 1
        assert SamplingParams(output_kind=kind).output_kind in RequestOutputKind  # type: ignore[arg-type]
        return
    with pytest.raises(InvalidRequestError, match="output_kind"):
        SamplingParams(output_kind=kind)  # type: ignore[arg-type]


def test_profiles_of_the_process_that_has_the_engine(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROFILE_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequestError, match="OUTRIDER_PROFILE_DIR"):
            await llm.start_profile()
        await llm.start_profile("/folder", "x")
        assert await llm.stop_profile() == "/folder/x.json"
        await llm.check_health()
        monkeypatch.setenv("VLLM_TORCH_PROFILER_DIR", "/other")
        await llm.start_profile()
        assert (await llm.stop_profile()).startswith("/other/")
        await async_helpers.collect(llm.generate([5], params(RequestOutputKind.FINAL_ONLY)))
        values = {metric.name: metric for metric in await llm.get_metrics()}
        assert values["vllm:generation_tokens"] == Counter(
            "vllm:generation_tokens", {"model_name": llm.info.model, "engine": "0"}, 5
        )

    async_helpers.run(async_helpers.make(model_path), scenario)


def test_all_clients_have_the_same_error_for_a_long_prompt(engine: LLMEngine, model_path: str) -> None:
    prompt, params = [5] * (fake_engine.MAX_MODEL_LEN - 2), SamplingParams(max_tokens=3)
    errors = []
    with pytest.raises(PromptTooLongError) as caught:
        engine.add_request("r", prompt, params)
    errors.append(caught.value.info())
    llm = LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine")
    with pytest.raises(PromptTooLongError) as caught:
        llm.generate([prompt], params, use_tqdm=False)
    errors.append(caught.value.info())
    llm.shutdown()

    async def generate(llm: AsyncLLM) -> None:
        with pytest.raises(PromptTooLongError) as caught:
            async for _ in llm.generate(prompt, params):
                pass
        errors.append(caught.value.info())

    async_helpers.run(async_helpers.make(model_path), generate)
    assert errors[0].param == "max_tokens"
    assert errors == errors[:1] * 3
