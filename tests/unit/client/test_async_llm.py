"""`AsyncLLM` with a fake engine in a real process: streams, errors of single requests, aborts, adapters."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_engine
import msgspec
import pytest
from async_helpers import FOREVER, LONG, aborted, collect, first_output, make, run, until

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.process.ipc import Add, decode, encode
from outrider.platform.core.errors import (
    AdapterError,
    EngineDeadError,
    InvalidRequestError,
    InvalidUserInputError,
    NotFoundError,
    OutriderError,
)
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.sampling_params import SamplingParams
from outrider.platform.http.adapters.model_registry import ModelRegistry
from outrider.platform.http.adapters.start_adapters import load_adapters
from outrider.platform.http.server_config import ServerConfig

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# --- streams --------------------------------------------------------------------------------------------------------


def test_streams(model_path: str, runner: Callable[[Any], Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert llm.state == "ready"
        assert (llm.info.architecture, llm.info.model) == ("Fake", model_path)
        prompt = "the quick brown fox"
        whole = await collect(llm.generate(prompt, SamplingParams(max_tokens=4, logprobs=1), request_id="r"))
        assert whole[-1].finished
        assert whole[-1].request_id == "r"
        assert whole[-1].outputs[0].token_ids == llm.tokenizer.encode(prompt)[:4]
        assert whole[-1].outputs[0].logprobs is not None
        parts = await collect(llm.generate(prompt, SamplingParams(max_tokens=4), delta=True))
        assert "".join(part.outputs[0].text for part in parts) == whole[-1].outputs[0].text
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        metrics = parts[-1].metrics
        assert metrics is not None
        assert metrics.num_verifications == 4
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time

    run(make(model_path), scenario, runner)


def test_many_at_once_with_n_and_stops(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, max_tokens=60, stop=["fox"])
        streams = [collect(llm.generate(f"{i} the quick brown fox ", params)) for i in range(20)]
        for i, outputs in enumerate(await asyncio.gather(*streams)):
            assert [sequence.text for sequence in outputs[-1].outputs] == [f"{i} the quick brown "] * 2
        stop = llm.tokenizer.decode([70, 71])
        [*_, last] = await collect(llm.generate(FOREVER, SamplingParams(stop=[stop]), request_id="endless"))
        assert last.outputs[0].stop_reason == stop
        await aborted(llm, "endless")

    run(make(model_path, "fast"), scenario)


def test_slow_consumer_gets_fewer_and_larger_outputs(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = llm.generate([70, 71], LONG, delta=True)
        outputs = [await anext(stream)]
        await until(lambda: len(llm.output_processor) == 0)
        outputs += await collect(stream)
        assert len(outputs) <= 2  # one if the engine was through before the first was taken
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == 100

    run(make(model_path), scenario)


def test_starts_on_first_use_and_once(model_path: str) -> None:
    async def scenario() -> None:
        llm = make(model_path)
        assert llm.state == "starting"
        with pytest.raises(EngineDeadError):
            _ = llm.info
        results = await asyncio.gather(*(collect(llm.generate([70 + i])) for i in range(3)))
        assert [outputs[-1].prompt_token_ids for outputs in results] == [[70], [71], [72]]
        pid = llm.engine_pid
        await llm.start()
        assert llm.engine_pid == pid
        await llm.shutdown()
        await llm.shutdown()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


# --- errors of one request ------------------------------------------------------------------------------------------


def test_errors_of_single_requests_stop_nothing_else(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        other = await first_output(llm)
        with pytest.raises(InvalidRequestError, match="empty"):
            await collect(llm.generate(""))
        with pytest.raises(AdapterError, match="broken"):
            await collect(llm.generate([5], lora_request=LoRARequest("b", path="broken")))
        with pytest.raises(OutriderError, match="RuntimeError: bug in add_request"):
            await collect(llm.generate([fake_engine.RAISE_IN_ADD]))
        with pytest.raises(AdapterError) as caught:
            await collect(llm.generate([fake_engine.FAIL_REQUEST], SamplingParams(n=2)))
        assert caught.value.param == "lora"
        with pytest.raises(NotFoundError):
            await collect(llm.generate([5], lora_request="nobody"))
        with pytest.raises(InvalidRequestError, match="priority"):
            await collect(llm.generate([5], priority=2**70))
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            await collect(llm.generate([5], lora_request=LoRARequest("\ud800", path="/a")))
        with pytest.raises(InvalidRequestError, match="request_id"):
            await collect(llm.generate([5], request_id="", lora_request=LoRARequest("x", 7, "/x")))
        with pytest.raises(NotFoundError, match="integer 7"):  # nothing was done for that request
            await llm.pin_lora(7)
        assert llm.num_running == 1
        assert not (await anext(other)).finished
        await other.aclose()  # type: ignore[attr-defined]

    run(make(model_path, "slow"), scenario)


def test_request_id_in_use(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = await first_output(llm, request_id="r")
        with pytest.raises(InvalidRequestError) as caught:
            await collect(llm.generate([5], request_id="r"))
        assert caught.value.param == "request_id"
        assert llm.num_running == 1
        await llm.abort("r")
        old = await collect(stream)
        assert old[-1].finished
        assert (await collect(llm.generate([5], request_id="r")))[-1].finished

    run(make(model_path, "slow"), scenario)


def test_an_id_in_use_again_gets_nothing_of_the_old_request(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        for _ in range(20):
            stream = await first_output(llm, request_id="r")
            await stream.aclose()  # type: ignore[attr-defined]
            # Late output of the old one arrives while this one runs.
            [*_, last] = await collect(llm.generate([5, 6, 7], SamplingParams(max_tokens=6), request_id="r"))
            assert last.outputs[0].token_ids == [5, 6, 7, 5, 6, 7]
            assert last.request_id == "r"

    run(make(model_path), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["request_id", "cache_salt", "tenant"])
@pytest.mark.parametrize("value", [5, b"x", "\ud800"])
def test_texts_of_other_types_are_refused(model_path: str, name: str, value: Any) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        pid = llm.engine_pid
        with pytest.raises(InvalidRequestError) as caught:
            await collect(llm.generate([5], **{name: value}))
        assert caught.value.param == name
        assert (await collect(llm.generate([5])))[-1].finished
        assert llm.engine_pid == pid

    run(make(model_path), scenario)


def test_chat_takes_the_template_of_the_model_the_adapter_or_the_call(model_path: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}adapter {{ m.content }}{% endfor %}")
    adapter = LoRARequest("own", path=str(tmp_path))

    async def scenario(llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "hello"}]

        async def first_prompt(**options: Any) -> str:
            outputs = [output async for output in llm.chat(messages, SamplingParams(max_tokens=2), **options)]
            assert outputs[-1].finished
            return str(outputs[-1].prompt)

        assert await first_prompt() == "<|user|>hello</s><|assistant|>"
        assert await first_prompt(add_generation_prompt=False, tenant="t", priority=3) == "<|user|>hello</s>"
        assert await first_prompt(lora_request=adapter) == "adapter hello"
        own = "{% for m in messages %}mine {{ m.content }}{% endfor %}"
        assert await first_prompt(lora_request=adapter, chat_template=own) == "mine hello"
        with pytest.raises(InvalidRequestError, match="bad role"):
            await anext(llm.chat([{"role": "bad", "content": "x"}]))
        stream = llm.chat(messages, LONG, "left", delta=True)
        await anext(stream)
        await stream.aclose()
        assert llm.num_running == 0, "leaving the iterator aborts the request"

    run(make(model_path), scenario)


def test_methods_shared_with_llm(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        assert (await llm.get_tokenizer()).vocab_size > 0
        assert await llm.get_default_sampling_params() == SamplingParams()
        assert llm.engine_info == llm.info

    run(make(model_path), scenario)


def test_tenant_and_weight_reach_the_engine(model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        engine = llm.engine.process()
        sent: list[Any] = []
        send = engine.send
        monkeypatch.setattr(engine, "send", lambda message: (sent.append(decode(encode(message))), send(message)))
        await collect(llm.generate([5], SamplingParams(n=2), tenant="a", weight=2.5))
        with pytest.raises(InvalidRequestError) as caught:
            await collect(llm.generate([5], tenant="a", weight=0.0))
        assert caught.value.param == "weight"
        [added] = [message for message in sent if isinstance(message, Add)]
        assert [(request.tenant, request.weight) for request in added.requests] == [("a", 2.5)] * 2

    run(make(model_path), scenario)


def test_undecodable_messages_are_answered_and_stop_nothing(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream, pid = await first_output(llm), llm.engine_pid
        engine = llm.engine.process()
        wrong: Any = 5
        prepared = llm.input_processor.prepare("r", [5])
        request = prepared.sequences()
        request[0].tenant = wrong
        state = llm.output_processor.add(prepared, request)
        engine.send(Add(request))
        await until(lambda: state.finished)
        assert isinstance(state.error, InvalidRequestError)
        with pytest.raises(InvalidRequestError, match="cannot read"):
            await engine.call("adapters.unload", name=wrong)
        for frames in (
            [b"A", b"\xc1"],
            [b"?", b"x"],
            [b"A"],
            [b"A", b"\x80", b"x"],
            [b"A", msgspec.msgpack.encode([5])],
        ):
            engine._link._socket.send_multipart(frames)
        assert not (await anext(stream)).finished
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await collect(llm.generate([5])))[-1].finished
        assert llm.engine_pid == pid

    run(make(model_path, "slow"), scenario)


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_leaving_the_iterator_aborts(model_path: str, runner: Callable[[Any], Any]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        async for _ in llm.generate(FOREVER, LONG, request_id="left"):
            break
        await aborted(llm, "left")

        stream = await first_output(llm, request_id="closed")
        await stream.aclose()  # type: ignore[attr-defined]
        await aborted(llm, "closed")

        task = asyncio.create_task(collect(llm.generate(FOREVER, LONG, request_id="cancelled")))
        await until(lambda: llm.num_running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await aborted(llm, "cancelled")
        assert (await llm.stats()).num_running == 0

    run(make(model_path, "slow"), scenario, runner)


def test_abort_by_id_ends_the_stream(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        stream = await first_output(llm, request_id="r")
        await llm.abort("r")
        await llm.abort("unknown")
        outputs = await collect(stream)
        assert outputs[-1].outputs[0].finish_reason == "abort"
        await aborted(llm, "r")

    run(make(model_path, "slow"), scenario)


def test_abort_of_several(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        streams = [await first_output(llm, request_id=name) for name in "ab"]
        await llm.abort(["a", "unknown", "b"])
        assert [(await collect(stream))[-1].outputs[0].finish_reason for stream in streams] == ["abort"] * 2

    run(make(model_path), scenario)


# --- adapters -------------------------------------------------------------------------------------------------------


def test_adapters(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lora = LoRARequest("sql", path="/sql")
        info = await llm.adapters.load(lora, pinned=True)
        assert await llm.adapters.list() == await llm.list_lora_adapters() == [info]
        assert not (await llm.unpin_lora("sql")).pinned
        assert (await llm.pin_lora("sql")).pinned
        assert (await collect(llm.generate([5], lora_request="sql")))[-1].lora_request == lora
        with pytest.raises(InvalidUserInputError):
            await llm.adapters.load(lora)
        assert not (await llm.adapters.load(lora, load_inplace=True)).pinned
        with pytest.raises(AdapterError):
            await llm.adapters.load(LoRARequest("b", path="broken"))
        await llm.adapters.unload("sql")
        with pytest.raises(NotFoundError):
            await llm.adapters.unload("sql")

    run(make(model_path), scenario)


def test_steps_go_on_while_an_adapter_is_read(model_path: str, tmp_path: Path) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        await llm.adapters.load(LoRARequest("a", path="/a"))
        permit = tmp_path / "permit"
        loading = asyncio.create_task(llm.adapters.load(LoRARequest("slow", path=f"until:{permit}")))
        behind = asyncio.create_task(llm.adapters.load(LoRARequest("b", path="/b")))
        assert (await collect(llm.generate([5])))[-1].finished
        while [info.name for info in await llm.adapters.list()] != ["a", "b"]:  # as soon as it is read
            await asyncio.sleep(0.01)
        with pytest.raises(InvalidUserInputError):  # at once: its files would never be there
            await llm.adapters.load(LoRARequest("a", path=f"until:{permit}"))
        assert not loading.done()
        assert set(llm.adapters.requests) == {"a"}
        permit.touch()
        assert [(await task).name for task in (loading, behind)] == ["slow", "b"]
        assert {info.name for info in await llm.adapters.list()} == {"a", "slow", "b"}
        assert list(llm.adapters.requests) == ["a", "slow", "b"]

    run(make(model_path), scenario)


def test_adapters_of_the_options_are_read_at_once_and_listed_in_their_order(model_path: str, tmp_path: Path) -> None:
    marker, permit = tmp_path / "marker", tmp_path / "permit"
    marker.touch()
    config = ServerConfig(lora_modules={"z": f"until:{permit}", "a": f"once:{marker}", "m": "/m"})

    async def scenario(llm: AsyncLLM) -> None:
        models = ModelRegistry(llm, ("base",))
        loading = asyncio.create_task(load_adapters(models, config))
        await until(lambda: not marker.exists())  # read while the first one still is
        assert "z" not in [info.name for info in await llm.adapters.list()]
        permit.touch()
        await loading
        assert list(models.known()) == ["z", "a", "m"]
        with pytest.raises(AdapterError, match=r"^bad=broken: the adapter is broken$"):
            await load_adapters(models, ServerConfig(lora_modules={"fine": "/fine", "bad": "broken"}))

    run(make(model_path), scenario)


def test_a_name_is_forgotten_only_when_the_engine_has(model_path: str) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        lora = LoRARequest("kills-when-unloaded", path="/a")
        await llm.adapters.load(lora)
        with pytest.raises(EngineDeadError):
            await llm.adapters.unload(lora.name)
        assert llm.adapters.requests == {lora.name: lora}
        await until(lambda: llm.num_restarts == 1 and llm.state == "ready")
        assert [info.name for info in await llm.adapters.list()] == [lora.name]
        await llm.adapters.load(LoRARequest("b", path="/b"))
        await llm.engine.process().call("adapters.unload", name="b")
        with pytest.raises(NotFoundError):
            await llm.adapters.unload("b")
        assert set(llm.adapters.requests) == {lora.name}

    run(make(model_path), scenario)
