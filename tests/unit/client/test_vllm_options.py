"""Python code written for vLLM: keywords, prompts, parameters and results."""

import asyncio
import dataclasses
import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import async_helpers
import pytest
from fake_engine import VOCAB_SIZE, FakeEngine

from outrider.models.checkpoint.tokenizer import load_tokenizer
from outrider.platform.client import engine_factory
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.input_processor import InputProcessor
from outrider.platform.client.llm import LLM
from outrider.platform.client.prompts import TokensPrompt
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError, NotFoundError, ShuttingDownError
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.outputs import CompletionOutput
from outrider.platform.core.pooling import PoolingParams
from outrider.platform.core.sampling_params import RequestOutputKind, SamplingParams
from outrider.platform.core.structured_outputs import StructuredOutputsParams


@pytest.fixture(autouse=True)
def _fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_factory, "DEFAULT_ENGINE", "fake_engine:FakeEngine")


def engine_args(llm: LLM) -> EngineArgs:
    engine: Any = llm.llm_engine.engine_core
    return engine.args


# --- LLM(...) -------------------------------------------------------------------------------------------------------

HARMLESS: dict[str, Any] = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "tokenizer_mode": "auto", "quantization": None,
    "task": "generate", "cpu_offload_gb": 0, "skip_tokenizer_init": False, "hf_overrides": {}, "rope_scaling": None,
    "seed": None, "block_size": None, "enable_prefix_caching": None, "max_model_len": "auto",
    "trust_remote_code": False, "load_format": "safetensors", "hf_token": None, "enable_expert_parallel": True,
    "enable_sleep_mode": True, "enable_lora_bias": True, "convert": "embed",
}  # fmt: skip


def test_keywords_equal_to_the_default_behaviour(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(model_path, **HARMLESS) as made, LLM(model_path) as plain:
        assert engine_args(made) == engine_args(plain)
    assert "no effect" not in caplog.text


def test_keywords_without_an_effect_are_logged(model_path: str, caplog: pytest.LogCaptureFixture) -> None:
    speculative = {"method": "ngram", "draft_tensor_parallel_size": 1, "disable_by_batch_size": 8, "max_model_len": 9}
    options = {"trust_remote_code": True, "num_lookahead_slots": 4, "disable_log_stats": True, "compilation_config": 3}
    with LLM(model_path, speculative_config=speculative, **options):
        pass
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    for name in (*options, "speculative_config.disable_by_batch_size", "speculative_config.max_model_len"):
        assert sum(message.startswith(f"{name} has no effect: ") for message in logged) == 1, name
    assert not any("draft_tensor_parallel_size" in message for message in logged)


@pytest.mark.parametrize(
    ("option", "value", "own"),
    [
        ("dtype", "half", "float16"), ("dtype", "float", "float32"), ("max_model_len", "4k", 4000),
        ("max_model_len", "4K", 4096), ("max_model_len", -1, None), ("max_model_len", "auto", None),
    ],
)  # fmt: skip
def test_other_spellings_of_values(option: str, value: Any, own: Any) -> None:
    assert getattr(EngineArgs(**{option: value}), option) == own


def test_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    assert EngineArgs(dtype=torch.half).dtype == "float16"
    assert EngineArgs(dtype=torch.bfloat16).dtype == "bfloat16"


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline_parallel_size": 2}, {"tokenizer_mode": "slow"}, {"cpu_offload_gb": 4},
        {"hf_overrides": {"rope_theta": 1.0}}, {"hf_token": "secret"},
        {"task": "reward"}, {"reasoning_parser": "qwen3"}, {"speculative_model": "x"}, {"max_model_len": "4x"},
        {"logprobs_mode": "x"}, {"max_model_len": "9" * 5000},
    ],
)  # fmt: skip
def test_keywords_that_would_change_something_are_refused_by_name(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(InvalidRequestError, match=name) as caught:
        LLM("m", **options)
    assert caught.value.param == name
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"), [("max_modle_len", "max_model_len"), ("tensor_paralel_size", "tensor_para")]
)
def test_an_unknown_keyword_gets_a_suggestion(name: str, meant: str) -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(TypeError, match=f"{make.__name__}.*{name}.*did you mean '{meant}"):
            make("m", **{name: 1})


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"quantization": "fp8"}, "quantization"),
        ({"speculative_token_tree": "[(0,)]"}, "speculative_token_tree"),
        ({"num_speculative_token": 3}, "did you mean 'num_speculative_tokens'"),
        ({"revision": "v2"}, "revision"),  # of what?
    ],
)
def test_keys_of_a_speculative_config_that_would_change_something(config: dict[str, Any], word: str) -> None:
    from outrider.platform.core.speculative_config import parse_speculative

    with pytest.raises(InvalidRequestError, match=word) as caught:
        parse_speculative({"method": "ngram", **config})
    assert caught.value.param == "speculative_config"


# --- files from the hub ---------------------------------------------------------------------------------------------


@pytest.fixture
def hub(model_path: str, tmp_path: Path) -> Path:
    """A hub's cache with two revisions of a model; the second one's tokenizer lacks a token."""
    repo = tmp_path / "hub" / "models--someone--tiny"
    (repo / "refs").mkdir(parents=True)
    for ref, commit in (("main", "0" * 40), ("v2", "2" * 40)):
        (repo / "refs" / ref).write_text(commit)
        shutil.copytree(model_path, repo / "snapshots" / commit)
    template = repo / "snapshots" / ("2" * 40) / "chat_template.jinja"
    template.write_text("second: {{ messages[0].content }}")
    return tmp_path / "hub"


def rendered(model: str, **options: Any) -> str:
    """The tokenizer's chat template applied to a word; the engine takes the folder `model_path`."""
    with LLM(model, **options) as llm:
        return str(llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "x"}], tokenize=False))


def test_revisions_and_the_hubs_folder_reach_the_tokenizer(model_path: str, hub: Path) -> None:
    options = {"tokenizer": "someone/tiny", "download_dir": str(hub)}
    assert not rendered(model_path, **options).startswith("second")
    assert rendered(model_path, tokenizer_revision="v2", **options) == "second: x"
    with pytest.raises(NotFoundError, match="v3"):
        LLM(model_path, tokenizer_revision="v3", **options)
    with pytest.raises(NotFoundError, match="someone/tiny"):
        LLM(model_path, tokenizer="someone/tiny")


# --- prompts and parameters -----------------------------------------------------------------------------------------


@pytest.fixture
def processor(tokenizer: Any) -> InputProcessor:
    return InputProcessor(tokenizer, FakeEngine(EngineArgs(model="x")).info, [1])


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "hello", "prompt_token_ids": None, "multi_modal_data": None, "cache_salt": None},
        {"prompt": "hello", "multi_modal_data": {}, "mm_processor_kwargs": None, "multi_modal_uuids": {}},
        {"type": "text", "prompt": "hello", "prompt_embeds": None},
    ],
)
def test_prompts_of_vllm(processor: InputProcessor, tokenizer: Any, prompt: dict[str, Any]) -> None:
    parsed = processor.parse_prompt(prompt)
    assert (parsed.token_ids, parsed.cache_salt) == (tokenizer.encode("hello"), "")
    tokens = {"type": "token", "prompt_token_ids": [5, 6], "prompt": None, "multi_modal_data": None, "cache_salt": "s"}
    parsed = processor.parse_prompt(tokens)
    assert (parsed.token_ids, parsed.cache_salt) == ([5, 6], "s")


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ({"prompt": "a", "multi_modal_data": {"image": object()}}, "multi_modal_data"),
        ({"prompt_embeds": [1.0]}, "prompt_embeds"),
        ({"promt": "a"}, "did you mean 'prompt'"),
    ],
)
def test_prompts_that_would_mean_something_else(processor: InputProcessor, prompt: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word) as caught:
        processor.parse_prompt(prompt)
    assert caught.value.param == "prompt"


HARMLESS_FIELDS: dict[str, Any] = {
    "best_of": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "extra_args": None,
    "truncate_prompt_tokens": None, "output_kind": RequestOutputKind.CUMULATIVE, "guided_decoding": None,
    "skip_clone": True,
    "structured_outputs": None, "logits_processors": None, "flat_logprobs": False, "thinking_token_budget": None,
    "output_text_buffer_length": 0, "stream_interval": 4, "repetition_detection": None,
}  # fmt: skip


def test_fields_of_sampling_params_at_values_that_change_nothing() -> None:
    assert SamplingParams(max_tokens=5, **HARMLESS_FIELDS) == SamplingParams(max_tokens=5)
    assert SamplingParams(best_of=1).clone(n=2).n == 2  # type: ignore[call-arg]


def test_vllms_fields_of_other_parameters() -> None:
    pooling: Any = {"task": "embed", "truncate_prompt_tokens": None, "extra_kwargs": None}
    assert PoolingParams("mean", **pooling) == PoolingParams("mean")
    with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens=5 is not supported") as caught:
        PoolingParams(truncate_prompt_tokens=5)  # type: ignore[call-arg]
    assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(TypeError, match="did you mean 'normalize'"):
        PoolingParams(normalise=True)  # type: ignore[call-arg]
    plain, constraint = StructuredOutputsParams(regex="a"), StructuredOutputsParams
    assert constraint(regex="a", json=None, disable_fallback=True) == plain  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2}, {"use_beam_search": True}, {"length_penalty": 0.5}, {"truncate_prompt_tokens": 5},
        {"output_kind": "x"}, {"guided_decoding": {"regex": "a"}}, {"structured_outputs": {"jsn": {}}},
        {"logits_processors": [len]}, {"extra_args": {"a": 1}}, {"flat_logprobs": True},
    ],
)  # fmt: skip
def test_fields_of_sampling_params_that_would_change_something(fields: dict[str, Any]) -> None:
    [name] = fields
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**fields)
    assert caught.value.param == name


def test_none_is_the_default_of_numbers_and_lists() -> None:
    fields: dict[str, Any] = dict.fromkeys(("n", "temperature", "top_p", "top_k", "min_tokens", "stop", "bad_words"))
    assert SamplingParams(**fields) == SamplingParams()
    assert SamplingParams(max_tokens=None).max_tokens is None
    assert SamplingParams(stop=("a",), bad_words=("b",)) == SamplingParams(  # type: ignore[arg-type]
        stop=["a"], bad_words=["b"]
    )


def test_fields_of_lora_requests(caplog: pytest.LogCaptureFixture) -> None:
    plain = LoRARequest("a", 1, "/a")
    nothing = {"long_lora_max_len": None, "tensorizer_config_dict": None, "load_inplace": False}
    assert LoRARequest("a", 1, "/a", **nothing) == LoRARequest("a", 1, lora_local_path="/a") == plain
    assert LoRARequest("a", 1, "/a", base_model_name="m") == plain
    assert "base_model_name has no effect" in caplog.text
    with pytest.raises(InvalidRequestError, match="load_inplace=True is not supported: write"):
        LoRARequest("a", 1, "/a", load_inplace=True)
    with pytest.raises(TypeError, match="'lora_pth'; did you mean 'lora_path'"):
        LoRARequest("a", 1, "/a", lora_pth="/b")


def test_an_unknown_field_of_sampling_params_gets_a_suggestion() -> None:
    with pytest.raises(TypeError, match="max_token'; did you mean 'max_tokens'"):
        SamplingParams(max_token=5)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_all_log_probabilities(tokenizer: Any, name: str) -> None:
    info = FakeEngine(EngineArgs(model="x")).info
    whole = InputProcessor(tokenizer, dataclasses.replace(info, max_logprobs=VOCAB_SIZE), [1])
    [request] = whole.prepare("r", "a", SamplingParams(**{name: -1})).sequences()
    assert getattr(request.params, name) == VOCAB_SIZE
    with pytest.raises(InvalidRequestError, match=f"all {VOCAB_SIZE} tokens.*max_logprobs 5") as caught:
        InputProcessor(tokenizer, info, [1]).prepare("r", "a", SamplingParams(**{name: -1})).sequences()
    assert caught.value.param == name


# --- methods of LLM -------------------------------------------------------------------------------------------------


def test_keywords_of_generate_and_chat(model_path: str) -> None:
    params = SamplingParams(max_tokens=1)
    conversation = [{"role": "user", "content": "a"}]
    with LLM(model_path) as llm:
        assert llm.generate("a", params, tokenization_kwargs=None, guided_options_request=None, prompt_text="a")
        assert llm.generate(TokensPrompt(prompt_token_ids=[5]), params)[0].prompt_token_ids == [5]
        assert llm.chat(conversation, params, chat_template_content_format="auto")  # type: ignore[call-arg]
        with pytest.raises(InvalidRequestError, match=r"prompt_token_ids.*write prompts="):
            llm.generate("a", params, prompt_token_ids=[[5]])
        with pytest.raises(InvalidRequestError, match="mm_processor_kwargs"):
            llm.chat(conversation, params, mm_processor_kwargs={"crops": 4})  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'priorty'; did you mean 'priority'"):
            llm.generate("a", params, priorty=1)
        with pytest.raises(TypeError, match="'add_generation_promt'; did you mean 'add_generation_prompt'"):
            llm.chat(conversation, params, add_generation_promt=True)  # type: ignore[call-arg]


def test_missing_methods_give_the_reason(model_path: str) -> None:
    with LLM(model_path) as llm:
        with pytest.raises(AttributeError, match=r"LLM.collective_rpc is not there: code of the user's own"):
            llm.collective_rpc("f")  # type: ignore[attr-defined]
        assert not hasattr(llm, "something")


# --- results --------------------------------------------------------------------------------------------------------


def test_outputs(model_path: str) -> None:
    with LLM(model_path) as llm:
        [output] = llm.generate("hello", SamplingParams(max_tokens=2), use_tqdm=False)
    assert output.outputs[0].finished() is True
    assert CompletionOutput(0, "", []).finished() is False
    assert output.metrics is not None
    assert output.num_cached_tokens == output.metrics.num_cached_tokens > 0
    assert output.metrics.first_token_latency is not None
    assert output.metrics.time_in_queue == output.metrics.queue_seconds
    assert (output.encoder_prompt, output.kv_transfer_params) == (None, None)


def test_a_long_text_is_tokenized_without_a_warning(
    model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(model_path, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 8}))
    warnings: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", warnings.append)
    assert len(load_tokenizer(folder).encode("word " * 50)) > 50
    assert warnings == []


# --- AsyncLLM.shutdown ----------------------------------------------------------------------------------------------


def test_shutdown_need_not_be_awaited(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=1)
        with pytest.raises(InvalidRequestError, match="data_parallel_rank"):
            await async_helpers.collect(llm.generate([5], params, data_parallel_rank=1))  # type: ignore[call-arg]
        outputs = await async_helpers.collect(
            llm.generate([5], params, "mine", tokenization_kwargs=None)  # type: ignore[call-arg]
        )
        assert (outputs[-1].request_id, outputs[-1].finished) == ("mine", True)
        llm.shutdown()
        with pytest.raises(ShuttingDownError):
            await llm.start()
        await async_helpers.until(lambda: llm.state == "stopped")

    async_helpers.run(async_helpers.make(model_path), scenario)


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("steps", [0, 2])
def test_shutdown_just_before_the_event_loop_ends(model_path: str, runner: Callable[[Any], Any], steps: int) -> None:
    async def scenario() -> None:
        llm = async_helpers.make(model_path)
        await llm.start()
        llm.shutdown()
        for _ in range(steps):
            await asyncio.sleep(0)

    runner(scenario())


def test_shutdown_outside_of_an_event_loop(model_path: str) -> None:
    async_helpers.make(model_path).shutdown()  # which has not started
    loop = asyncio.new_event_loop()
    llm = async_helpers.make(model_path)
    loop.run_until_complete(llm.start())
    llm.shutdown()
    assert (llm.state, llm.engine_pid) == ("stopped", None)
    loop.run_until_complete(llm.shutdown())  # type: ignore[arg-type]
    loop.close()
    llm.shutdown()


def test_shutdown_from_another_thread(model_path: str) -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    llm = async_helpers.make(model_path)
    try:
        asyncio.run_coroutine_threadsafe(llm.start(), loop).result(60)
        llm.shutdown()
        assert llm.state == "stopped"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
