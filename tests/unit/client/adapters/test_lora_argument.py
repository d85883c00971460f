"""Ways to name an adapter in a request, through both clients."""

import asyncio
import functools
from collections import ChainMap
from typing import Any

import pytest

from outrider.platform.client.adapters.lora_argument import lora_of_each, resolve_lora
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.client.process.supervisor import EngineSpec
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.core.lora_request import LoRAMix, LoRAPart, LoRARequest
from outrider.platform.core.sampling_params import SamplingParams

A, B = LoRARequest("a", path="/a"), LoRARequest("b", path="/b")
KNOWN = {"a": A, "b": B, "a:2": LoRARequest("a:2", path="/odd")}
MIX = LoRAMix((LoRAPart(A, 0.7), LoRAPart(B, 0.3)))
HALF = LoRAMix((LoRAPart(A, 0.5),))


def resolve(lora: Any) -> Any:
    return resolve_lora(lora, lambda: KNOWN)


@pytest.mark.parametrize(
    ("spelled", "meant"),
    [
        (None, None),
        (A, A),
        ("a", A),
        ("a:2", KNOWN["a:2"]),
        ((A, 0.5), HALF),
        (("a", 0.5), HALF),
        ("+a:0.5", HALF),
        ([(A, 0.5)], HALF),
        (MIX, MIX),
        ("b:0.3+a:0.7", MIX),
        ([(A, 0.7), (B, 0.3)], MIX),
        ([("b", 0.3), (A, 0.7)], MIX),
        (((B, 0.3), (A, 0.7)), MIX),
        (LoRAMix(((B, 0.3), ("a", 0.7))), MIX),  # type: ignore[arg-type]
        ([(A, 0.35), (B, 0.3), ("a", 0.35)], MIX),
        ((A, 1), A),
        ([(A, 1), (B, 0)], A),
        ("+a:0.0", None),
        (LoRAMix(()), None),
        ("a+b", LoRAMix((LoRAPart(A, 1.0), LoRAPart(B, 1.0)))),
    ],
)
def test_spellings(spelled: Any, meant: Any) -> None:
    found = resolve(spelled)
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    "spelled",
    [3, [], (), [A], [A, B], [(A, 0.5), B], (A, None), (A, 0.5, 1), {"a": 0.5}, [(3, 0.5)], LoRAMix((A,))],  # type: ignore[arg-type]
)
def test_values_that_name_no_adapter(spelled: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        resolve(spelled)
    assert caught.value.param == "lora_request"
    assert "lora_request" in caught.value.message


@pytest.mark.parametrize("spelled", ["c", ("c", 0.5), "a:0.5+c", [(A, 1), ("c", 1)], "+c:0.5"])
def test_unknown_names(spelled: Any) -> None:
    with pytest.raises(NotFoundError, match="the adapter 'c' is not loaded; loaded are: a, a:2, b") as caught:
        resolve(spelled)
    assert caught.value.param == "lora_request"


def test_thousands_of_names_are_not_all_shown() -> None:
    known = {f"n{index:04}": LoRARequest(f"n{index:04}", path="/n") for index in reversed(range(5000))}
    with pytest.raises(NotFoundError, match=r"loaded are: n0000, n0001, .*, n0019 and 4980 more$"):
        resolve_lora("c", lambda: known)


def test_weights_are_checked() -> None:
    for spelled in ([(A, float("nan"))], (A, 1000), "+a:1000.0", LoRAMix((LoRAPart(A, float("inf")),)), [(A, True)]):
        with pytest.raises(InvalidRequestError, match="lora_request: the weight of adapter 'a'"):
            resolve(spelled)


@pytest.mark.parametrize(
    ("value", "each"),
    [
        (None, [None, None]),
        (A, [A, A]),
        ("a", ["a", "a"]),
        (MIX, [MIX, MIX]),
        ((A, 0.5), [(A, 0.5), (A, 0.5)]),
        ([A, B], [A, B]),
        ((A, B), [A, B]),
        ([A, None], [A, None]),
        ([MIX, None], [MIX, None]),
        ([[(A, 0.7), (B, 0.3)], (A, 0.5)], [[(A, 0.7), (B, 0.3)], (A, 0.5)]),
        ([(A, 0.7), (B, 0.3)], [[(A, 0.7), (B, 0.3)]] * 2),
        ([[(A, 0.7)], [(B, 0.3)]], [[(A, 0.7)], [(B, 0.3)]]),
    ],
)
def test_one_for_each_prompt(value: Any, each: list[Any]) -> None:
    """A list is one entry a prompt, as in vLLM, unless it is a mix."""
    assert lora_of_each(value, 2) == each


@pytest.mark.parametrize("value", [[A], [A, B, A], [], [(A, 0.5), None, None], [MIX]])
def test_lists_of_another_length(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"lora_request has {len(value)} entries for 2 prompts"):
        lora_of_each(value, 2)


def test_offline(model_path: str) -> None:
    args = EngineArgs(model=model_path, enable_lora=True)
    with LLM.from_engine_args(args, engine="fake_engine:FakeEngine") as llm:
        engine: Any = llm.llm_engine.engine_core
        for request in (A, B):
            llm.load_lora_adapter(request)
        asked = []
        listing = engine.adapters.list
        engine.adapters.list = lambda: asked.append(1) or listing()
        run = functools.partial(llm.generate, sampling_params=SamplingParams(max_tokens=1), use_tqdm=False)
        [output] = run([[5]], lora_request=[(A, 0.7), (B, 0.3)])
        assert output.lora_request == MIX
        assert not asked
        outputs = run([[5], [6], [7]], lora_request=["a:0.7+b:0.3", None, [("a", 0.7), ("b", 0.3)]])
        assert [output.lora_request for output in outputs] == [MIX, None, MIX]
        assert not asked, "names are looked up one by one: thousands may be registered"
        assert [request.lora for request in engine.added] == [MIX, MIX, None, MIX]
        with pytest.raises(NotFoundError, match="'c' is not loaded"):
            run([[5], [6]], lora_request="a+c")
        assert len(engine.added) == 4


class Names(dict[str, LoRARequest]):
    """A registry whose names are never listed as a whole."""

    def __iter__(self) -> Any:
        raise AssertionError("all names were looked at")

    keys = __iter__


def test_names_are_looked_up_one_by_one() -> None:
    """Thousands may be registered."""
    known = ChainMap(Names({"a": A, "b": B}), {})
    assert resolve_lora("a", lambda: known) == A
    assert resolve_lora("a:0.7+b:0.3", lambda: known) == MIX


def test_through_the_engine_process(model_path: str, nothing_is_left: None) -> None:
    async def main() -> None:
        spec = EngineSpec(args=EngineArgs(model=model_path, enable_lora=True), engine="fake_engine:FakeEngine")
        async with AsyncLLM.from_spec(spec) as llm:
            await llm.adapters.load(A)
            params = SamplingParams(max_tokens=1)
            for spelled, meant in (([("a", 0.7), (B, 0.3)], MIX), (("a", 0.5), HALF), ("+a:0.5", HALF)):
                outputs = [output async for output in llm.generate([5], params, lora_request=spelled)]
                assert outputs[-1].lora_request == meant
            assert [output async for output in llm.generate([5], params, lora_request="a")]
            with pytest.raises(NotFoundError, match="'b' is not loaded"):
                await anext(llm.generate([5], params, lora_request="a:0.7+b:0.3"))

    asyncio.run(main())
