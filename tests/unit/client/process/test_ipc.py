"""Messages survive the trip; the socket and its folder go away."""

import asyncio
import dataclasses
import gc
import stat
from pathlib import Path
from typing import Any

import pytest

from outrider.platform.client.process import ipc
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import EngineDeadError, ErrorInfo, InvalidRequestError, OutriderError
from outrider.platform.core.lora_request import LoRAMix, LoRAPart, LoRARequest
from outrider.platform.core.messages import (
    AdapterInfo,
    EngineInfo,
    EngineRequest,
    EngineStats,
    PromptTable,
    SpeculationCounts,
    SpeculationEntry,
    TokenDelta,
    TokenLogprobs,
)
from outrider.platform.core.repetition import RepetitionDetectionParams
from outrider.platform.core.sampling_params import MAX_SEED, RequestOutputKind, SamplingParams

FULL_PARAMS = SamplingParams(
    n=2, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5,
    repetition_penalty=1.5, seed=-MAX_SEED, stop="x", stop_token_ids=[3], bad_words=["b"],
    include_stop_str_in_output=True, ignore_eos=True, max_tokens=7, min_tokens=2, logprobs=1, prompt_logprobs=0,
    logit_bias={5: 1}, allowed_token_ids=[1, 2], detokenize=True, skip_special_tokens=False,
    spaces_between_special_tokens=False, speculative=False, pooling="mean", bad_words_token_ids=[[1, 2], [3]],
    structured_outputs={"regex": "a+"}, output_kind=RequestOutputKind.DELTA, logprob_token_ids=[4],
    thinking_token_budget=5, thinking_start_token_ids=[6], thinking_end_token_ids=[7],
    repetition_detection=RepetitionDetectionParams(3, 1, 2),
)  # fmt: skip
INFO = EngineInfo("m", "Llama", "float32", "cpu", 10, 20, 5, 3, 16, 100, True, 8, 64, "off", 0.5)
LOGPROBS = TokenLogprobs([1, 2], [-0.5, float("-inf")], 3)
ADAPTER = AdapterInfo("a", "/a", "d", 8, 8, "host", True, 2, "loaded")
REQUEST = EngineRequest(
    "r", [1, 2], FULL_PARAMS, [0], LoRARequest("a", 7, "/a"), priority=-1, tenant="t", cache_salt="s", group="g",
    arrival_time=1.5, weight=2.5, num_shared_tokens=1,
)  # fmt: skip
MIX = LoRAMix((LoRAPart(LoRARequest("a", 7, "/a"), 0.7), LoRAPart(LoRARequest("b", path="/b", draft_path="/d"), -0.3)))
COUNTS = SpeculationCounts(1, 2, 1, [1, 0], [3, 0, 1])
PROMPT = PromptTable()
PROMPT.extend([LOGPROBS, LOGPROBS._replace(rank=9)])
DELTA = TokenDelta(
    "r", [1], [LOGPROBS], PROMPT, "stop", 5, ErrorInfo("NotFoundError", "m", "p"), 9, COUNTS, 1, pooled=[0.5]
)
MESSAGES = [
    ipc.Add([REQUEST, EngineRequest("q", [1], SamplingParams(speculative=3))]),
    ipc.Add([EngineRequest("mix", [1], SamplingParams(), lora=MIX)]),
    ipc.Abort(["r"]),
    ipc.Call(3, "adapters.unload", {"name": "a", "mode": "abort"}),
    ipc.Stop(),
    ipc.Ready(INFO),
    ipc.Deltas([DELTA, TokenDelta("q")]),
    ipc.Reply(3, ipc.encode_value(None), ErrorInfo("NotFoundError", "m")),
    ipc.Dying(ErrorInfo("InternalServerError", "m")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: ipc.Message) -> None:
    decoded = ipc.decode(ipc.encode(message))
    assert decoded == message
    if isinstance(decoded, ipc.Add):  # equal tuples need not be of the same type
        assert [type(request.lora) for request in decoded.requests] == [type(r.lora) for r in message.requests]


def test_log_probabilities_of_a_prompt_are_decoded_as_arrays() -> None:
    """As objects, those of one long prompt would hold up the process that decodes them for a second."""
    table = PromptTable()
    for _ in range(100):
        table.extend([TokenLogprobs([7, 8, 9], [-0.25, -0.5, float("-inf")], rank) for rank in range(50)])
    message = ipc.encode(ipc.Deltas([TokenDelta("r", prompt_logprobs=table)]))
    gc.collect()
    before = len(gc.get_objects())
    decoded = ipc.decode(message)
    assert len(gc.get_objects()) - before < 100
    assert isinstance(decoded, ipc.Deltas)
    read = decoded.deltas[0].prompt_logprobs
    assert read is not None
    assert len(read) == 5001
    assert [read[0], read[1], read[-1]] == [
        None,
        *(TokenLogprobs([7, 8, 9], [-0.25, -0.5, float("-inf")], rank) for rank in (0, 49)),
    ]
    with pytest.raises(IndexError):
        read[5001]


def test_every_parameter_is_tried_with_another_value_than_its_default() -> None:
    same = [
        f.name
        for f in dataclasses.fields(SamplingParams)
        if getattr(FULL_PARAMS, f.name) == getattr(SamplingParams(), f.name)
    ]
    assert same == ["top_k", "detokenize"]


def test_every_field_of_a_request_is_tried_with_another_value_than_its_default() -> None:
    plain = EngineRequest("q", [], SamplingParams())
    assert not [f.name for f in dataclasses.fields(EngineRequest) if getattr(REQUEST, f.name) == getattr(plain, f.name)]


@pytest.mark.parametrize(
    ("verb", "value"),
    [
        ("adapters.load", ADAPTER),
        ("adapters.unload", None),
        ("adapters.list", [ADAPTER]),
        (
            "stats",
            EngineStats(
                num_waiting_by_reason={"x": 1}, speculation=[SpeculationEntry("", "t", COUNTS)], adapters=[ADAPTER]
            ),
        ),
    ],
)
def test_results_of_calls(verb: str, value: Any) -> None:
    assert ipc.decode_value(verb, ipc.encode_value(value)) == value


def test_arguments_of_calls_arrive_in_their_types() -> None:
    request = LoRARequest("a", path="/a", draft_path="/d")
    for verb, arguments, arrived in (
        ("adapters.load", {"request": request, "pinned": True}, {"load_inplace": False, "running": "finish"}),
        ("adapters.register", {"requests": [request]}, {}),
        ("adapters.unload", {"name": "a"}, {"mode": "drain"}),
        ("adapters.pin", {"name": "a"}, {}),
        ("stats", {}, {}),
    ):
        call = ipc.decode(ipc.encode(ipc.Call(1, verb, arguments)))
        assert isinstance(call, ipc.Call)
        assert ipc.decode_arguments(call) == {**arrived, **arguments}


def test_calls_with_wrong_arguments_are_refused() -> None:
    for verb, arguments in (("adapters.pin", {"name": 3}), ("adapters.pin", {}), ("adapters.load", {"request": {}})):
        with pytest.raises(InvalidRequestError, match=f"cannot read the call '{verb}'"):
            ipc.decode_arguments(ipc.Call(1, verb, arguments))
    with pytest.raises(OutriderError, match=r"no call 'shutdown'; it has adapters\.load, "):
        ipc.decode_arguments(ipc.Call(1, "shutdown"))


def test_config() -> None:
    config = ipc.ProcessConfig(
        EngineArgs(speculative_config={"method": "ngram", "x": [1]}), "m:f", "/f", ["/p"], 20, True
    )
    content = ipc.encode_config(config)
    assert int.from_bytes(content[:8], "little") == len(content) - 8
    assert ipc.decode_config(content[8:]) == config


def test_numpy_numbers_are_sent_as_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert ipc.encode(ipc.Abort([numpy.int64(3)])) == ipc.encode(ipc.Abort([3]))  # type: ignore[list-item]


def test_link_carries_messages_both_ways_and_leaves_nothing() -> None:
    async def scenario() -> Path:
        client = ipc.ClientLink()
        folder = Path(client.folder)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        with pytest.raises(EngineDeadError):
            client.send(ipc.Stop())  # no client is connected
        with pytest.raises(InvalidRequestError, match="cannot be sent"):
            client.send(ipc.Add([EngineRequest("r", [1], SamplingParams(), priority=2**70)]))
        engine = ipc.EngineLink(client.folder)
        engine.send(ipc.Ready(INFO))
        arrived: asyncio.Queue[ipc.Message] = asyncio.Queue()
        client.listen(arrived.put_nowait)
        assert await arrived.get() == ipc.Ready(INFO)
        client.send(ipc.Abort(["a"]))
        client.send(ipc.Stop())
        got: list[Any] = []
        while len(got) < 2:
            got += await asyncio.to_thread(engine.receive, 5000)
        assert got == [ipc.Abort(["a"]), ipc.Stop()]
        assert engine.receive(0) == []
        engine.close()
        client.close()
        return folder

    assert not asyncio.run(scenario()).exists()


def test_long_temporary_folders_are_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))

    async def scenario() -> None:
        link = ipc.ClientLink()
        assert not link.folder.startswith(str(deep))
        link.close()

    asyncio.run(scenario())
    assert list(deep.iterdir()) == []
