"""`LLM` over the fake engine: prompts, pairing, order, errors, progress, adapters."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_engine
import pytest

from outrider.kernels.tuning import VARIABLE, DeviceName
from outrider.kernels.tuning.files import ConfigFile
from outrider.platform.client import engine_factory
from outrider.platform.client.engine_factory import engine_args
from outrider.platform.client.llm import LLM
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    AdapterError,
    InvalidRequestError,
    NotFoundError,
    OutriderError,
    PromptTooLongError,
    ShuttingDownError,
    UnsupportedModelError,
)
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.outputs import RequestOutput
from outrider.platform.core.sampling_params import SamplingParams


@pytest.fixture
def llm(model_path: str) -> Iterator[LLM]:
    with LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine") as made:
        yield made
        assert not fake_engine_in(made).has_work()


def fake_engine_in(llm: LLM) -> fake_engine.FakeEngine:
    engine = llm.llm_engine.engine_core
    assert isinstance(engine, fake_engine.FakeEngine)
    return engine


def output_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


SHORT = SamplingParams(max_tokens=2)


def test_kernel_configs_are_found_or_refused(model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_factory, "DEFAULT_ENGINE", "fake_engine:FakeEngine")
    monkeypatch.setenv(VARIABLE, "")
    with LLM(model_path):
        assert os.environ[VARIABLE] == ""
    ConfigFile(DeviceName("x", (9, 0)), "3.6.0", "2026-01-31").write(tmp_path / "x.json")
    monkeypatch.chdir(tmp_path)
    with LLM(model_path, kernel_configs=Path("x.json")) as made:
        assert os.environ[VARIABLE] == str(tmp_path / "x.json")
        assert output_ids(made.generate([7, 6, 5], SHORT, use_tqdm=False)) == [[7, 6]]
    (tmp_path / "x.json").write_text('{"version": 7}')
    for options in ({"kernel_configs": str(tmp_path)}, {}):  # by the keyword, and by the variable
        with pytest.raises(InvalidRequestError, match=r"x.json: version: must be 1, got 7") as raised:
            LLM(model_path, **options)
        assert raised.value.param == "kernel_configs"


def test_one_prompt_and_many(llm: LLM) -> None:
    assert [output.prompt for output in llm.generate("hello", use_tqdm=False)] == ["hello"]
    prompts: list[Any] = ["hello", {"prompt": "dog"}, {"prompt_token_ids": [9, 8]}, [7, 6, 5]]
    outputs = llm.generate(prompts, SHORT, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["hello", "dog", None, None]
    assert output_ids(outputs)[2:] == [[9, 8], [7, 6]]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    assert output_ids(llm.generate([7, 6, 5], SHORT, use_tqdm=False)) == [[7, 6]]
    assert llm.generate([], use_tqdm=False) == []


def test_results_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n) for n in (5, 1, 3)]
    outputs = llm.generate([[10], [11], [12]], params, use_tqdm=False)
    assert output_ids(outputs) == [[10] * 5, [11], [12] * 3]


def test_default_sampling_params(llm: LLM) -> None:
    assert len(llm.generate([[10]], use_tqdm=False)[0].outputs[0].token_ids) == 16


def test_lists_are_paired(llm: LLM) -> None:
    lora = LoRARequest("a", path="/a")
    llm.generate([[10], [11]], SHORT, lora_request=[lora, None], use_tqdm=False, priority=[1, 2])
    added = fake_engine_in(llm).added
    assert [(request.lora, request.priority) for request in added] == [(lora, 1), (None, 2)]
    outputs = llm.generate([[10], [11]], SHORT, lora_request=lora, use_tqdm=False, priority=5)
    assert [output.lora_request for output in outputs] == [lora, lora]


def test_tenants_and_their_weights(llm: LLM) -> None:
    llm.generate([[10], [11]], SHORT, use_tqdm=False, tenant=["a", "b"], weight=[2, 0.5])
    llm.generate([[10], [11]], SHORT, use_tqdm=False, tenant="c", weight=3.0)
    llm.generate([[10]], SHORT, use_tqdm=False)
    added = [(request.tenant, request.weight) for request in fake_engine_in(llm).added]
    assert added == [("a", 2), ("b", 0.5), ("c", 3.0), ("c", 3.0), ("", 1.0)]
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([[10], [11]], SHORT, use_tqdm=False, weight=[1.0, -1.0])
    assert caught.value.param == "weight"
    assert len(fake_engine_in(llm).added) == len(added), "nothing was started"


@pytest.mark.parametrize("name", ["sampling_params", "lora_request", "priority", "tenant", "weight"])
def test_lists_of_the_wrong_length(llm: LLM, name: str) -> None:
    one = {"sampling_params": SHORT, "lora_request": None, "priority": 0, "tenant": "a", "weight": 1.0}[name]
    with pytest.raises(InvalidRequestError, match=f"{name} has 1 entries for 2 prompts") as caught:
        llm.generate(["a", "b"], use_tqdm=False, **{name: [one]})
    assert caught.value.param == name


def test_n_and_stop_strings(llm: LLM, tokenizer: Any) -> None:
    params = SamplingParams(n=2, max_tokens=50, stop=["fox"])
    [output] = llm.generate("the quick brown fox jumps ", params, use_tqdm=False)
    assert [sequence.text for sequence in output.outputs] == ["the quick brown "] * 2
    assert fake_engine_in(llm).aborted == [f"{output.request_id}~0#{i}" for i in range(2)]


def test_wrong_request_starts_nothing(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        llm.generate([[5], [5] * 200], use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.generate(3, use_tqdm=False)  # type: ignore[arg-type]
    assert fake_engine_in(llm).added == []


def test_refused_by_the_engine_aborts_the_others(llm: LLM) -> None:
    broken = LoRARequest("b", path="broken")
    with pytest.raises(AdapterError):
        llm.generate([[5], [6]], lora_request=[None, broken], use_tqdm=False)
    assert len(fake_engine_in(llm).aborted) == 1
    assert output_ids(llm.generate([[9]], SHORT, use_tqdm=False)) == [[9, 9]]


def test_failing_sequence_raises_its_error_and_aborts_the_others(llm: LLM) -> None:
    with pytest.raises(AdapterError, match="broken"):
        llm.generate([[fake_engine.FAIL_REQUEST], [6]], SamplingParams(n=2), use_tqdm=False)
    assert not fake_engine_in(llm).has_work()
    assert len(llm.llm_engine.output_processor) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupt_aborts_all(llm: LLM, error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine_in(llm)

    def step() -> Any:
        raise error

    monkeypatch.setattr(engine, "step", step)
    with pytest.raises(error):
        llm.generate([[5], [6]], SamplingParams(n=2), use_tqdm=False)
    assert len(engine.aborted) == 4
    assert len(llm.llm_engine.output_processor) == 0


def test_engine_that_forgets_a_request_is_noticed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine_in(llm), "has_work", lambda: False)
    with pytest.raises(OutriderError, match="lost"):
        llm.generate("hello", use_tqdm=False)


def test_adapters_are_lora_requests(llm: LLM) -> None:
    calls = llm.load_lora_adapter, llm.add_lora, lambda wrong: llm.register_lora_adapters([wrong])
    for call in calls:
        for wrong in ("sql", None, ("sql", 1)):
            with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
                call(wrong)  # type: ignore[arg-type]


def test_chat_uses_the_template_of_each_adapter(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}")
    lora, turn = LoRARequest("own", path=tmp_path), [{"role": "user", "content": "hello"}]
    outputs = llm.chat([turn, turn], SHORT, [lora, None], use_tqdm=False)
    assert [output.prompt for output in outputs] == ["[user] hello", "<|user|>hello</s><|assistant|>"]
    [output] = llm.chat(turn, SHORT, lora, use_tqdm=False, chat_template="{{ messages[0].content }}")
    assert output.prompt == "hello"


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    [output] = llm.chat(conversation, SHORT, use_tqdm=False)
    assert output.prompt == "<|user|>hello</s><|assistant|>"
    assert output.prompt_token_ids == llm.get_tokenizer().encode(output.prompt, add_special_tokens=False)
    outputs = llm.chat([conversation, conversation], SHORT, use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in outputs] == ["<|user|>hello</s>"] * 2
    with pytest.raises(InvalidRequestError):
        llm.chat([], SHORT)
    with pytest.raises(TypeError, match="wrong"):
        llm.chat(conversation, SHORT, wrong=1)


def test_chat_takes_the_options_of_generate(llm: LLM) -> None:
    turn, seen = [{"role": "user", "content": "hello"}], []
    outputs = llm.chat([turn, turn], SHORT, None, False, lambda *end: seen.append(end), tenant=["a", "b"], priority=2)
    assert sorted(seen, key=lambda end: end[0]) == [*enumerate(outputs)]
    engine: Any = llm.llm_engine.engine_core
    assert [(request.tenant, request.priority) for request in engine.added] == [("a", 2), ("b", 2)]


def test_adapters_by_name(llm: LLM) -> None:
    request = LoRARequest("sql", path="/sql")
    info = llm.load_lora_adapter(request, pinned=True)
    assert (info.name, info.pinned) == ("sql", True)
    assert llm.list_lora_adapters() == [info]
    [output] = llm.generate([[5]], SHORT, lora_request="sql", use_tqdm=False)
    assert output.lora_request == request
    assert not llm.unpin_lora("sql").pinned
    assert llm.pin_lora("sql").pinned
    llm.unload_lora_adapter("sql")
    with pytest.raises(NotFoundError, match="'sql' is not loaded; loaded are: none"):
        llm.generate([[5]], SHORT, lora_request="sql", use_tqdm=False)
    with pytest.raises(NotFoundError):
        llm.unload_lora_adapter("sql")


def test_progress_bar_counts_requests_and_speed(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    bars = []

    class Bar:
        def __init__(self, total: int, **options: Any) -> None:
            self.total, self.count, self.postfix, self.closed = total, 0, "", False
            bars.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.postfix = text

        def update(self, count: int) -> None:
            self.count += count

        def close(self) -> None:
            self.closed = True

    llm.generate([[5], [6]], SHORT, use_tqdm=Bar)
    [bar] = bars
    assert (bar.total, bar.count, bar.closed) == (2, 2, True)
    assert "input: " in bar.postfix
    assert "output: " in bar.postfix
    llm.generate([[5], [6]], SHORT)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate([[5], [6]], SHORT, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_metrics_and_stats(llm: LLM) -> None:
    [output] = llm.generate([[5]], SHORT, use_tqdm=False)
    assert output.metrics is not None
    assert output.metrics.num_verifications == 2
    assert llm.stats().num_steps == 2
    assert llm.engine_info.architecture == "Fake"


def test_unknown_option_is_named() -> None:
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM("x", max_modle_len=5)
    assert engine_args("LLM", "x", {"max_model_len": 5}).max_model_len == 5


def test_demo_defaults_without_a_model() -> None:
    demo, plain = engine_args("LLM", None, {}), engine_args("LLM", None, {"enable_lora": False})
    assert demo.enable_lora
    assert demo.speculative_config is not None
    assert not plain.enable_lora


def test_error_at_the_start() -> None:
    with pytest.raises(UnsupportedModelError):
        LLM.from_engine_args(EngineArgs(model="unsupported"), engine="fake_engine:FakeEngine")


def test_engine_is_closed_when_there_is_no_tokenizer(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(fake_engine.FakeEngine, "shutdown", lambda self: closed.append(self))
    with pytest.raises(OutriderError):
        LLM.from_engine_args(EngineArgs(model=str(tmp_path)), engine="fake_engine:FakeEngine")
    assert len(closed) == 1


def test_shutdown_twice(model_path: str) -> None:
    llm = LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine")
    llm.shutdown()
    llm.shutdown()
    assert fake_engine_in(llm).closed == 1


def test_after_shutdown(model_path: str) -> None:
    llm = LLM.from_engine_args(EngineArgs(model=model_path), engine="fake_engine:FakeEngine")
    llm.shutdown()
    with pytest.raises(ShuttingDownError, match="shut down"):
        llm.generate("a", use_tqdm=False)
    with pytest.raises(ShuttingDownError):
        llm.load_lora_adapter(LoRARequest("a", path="/a"))


@pytest.mark.parametrize("prompts", [b"abc", bytearray(b"abc"), memoryview(b"abc"), 5, None])
def test_not_a_prompt(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(prompts, use_tqdm=False)
    assert caught.value.param == "prompts"


@pytest.mark.slow
def test_needs_no_web_stack(model_path: str) -> None:
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(fake_engine.__file__).rsplit('/', 1)[0]!r})\n"
        "for name in ('zmq', 'msgspec', 'fastapi', 'pydantic', 'uvicorn', 'psutil'): sys.modules[name] = None\n"
        "from outrider import LLM, SamplingParams\n"
        "from outrider.platform.core.config import EngineArgs\n"
        f"llm = LLM.from_engine_args(EngineArgs(model={model_path!r}), engine='fake_engine:FakeEngine')\n"
        "print(llm.generate([5], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[5, 5]\n", done.stderr
