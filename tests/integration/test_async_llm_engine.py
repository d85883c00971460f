"""`LLM` and `AsyncLLM` over the real engine and the embedded demo model."""

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import LLM, AsyncLLM, RequestOutput, SamplingParams
from outrider.models.demo import demo_eagle3_path, demo_model_path
from outrider.platform.core.errors import AdapterError, EngineDeadError, NotFoundError, PromptTooLongError
from outrider.platform.core.lora_request import LoRARequest

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
PROMPTS = ["Hello, who are", "The capital of", "{"]
DRAFTS = {"method": "eagle3", "model": str(demo_eagle3_path()), "num_speculative_tokens": 4}
"""A number of drafts that does not depend on how long steps take."""
SEEDED = SamplingParams(seed=5, temperature=0.9, max_tokens=16, n=2, logprobs=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS, max_logprobs=-1) as made:
        yield made


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def texts(output: RequestOutput) -> list[tuple[str, list[int], str | None]]:
    return [(sequence.text, sequence.token_ids, sequence.finish_reason) for sequence in output.outputs]


def test_both_clients_give_the_same_seeded_text(llm: LLM) -> None:
    loras: list[Any] = [None, "sql", "json"]
    want = [texts(output) for output in llm.generate(PROMPTS, SEEDED, loras, use_tqdm=False)]

    async def scenario() -> list[list[RequestOutput]]:
        async with AsyncLLM(**OPTIONS) as client:
            jobs = zip(PROMPTS, loras, strict=True)
            return await asyncio.gather(*(collect(client.generate(p, SEEDED, lora_request=n)) for p, n in jobs))

    got = asyncio.run(scenario())
    assert [texts(outputs[-1]) for outputs in got] == want
    assert all(text[0][:2] != text[1][:2] for text in want)  # the two sequences have their own seeds


def test_log_probabilities_of_the_whole_vocabulary(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1)
    [output] = llm.generate("Hello", params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert output.prompt_logprobs is not None
    for position in (*output.outputs[0].logprobs, *output.prompt_logprobs[1:]):
        assert position is not None
        assert len(position) == llm.engine_info.vocab_size
        assert sum(math.exp(entry.logprob) for entry in position.values()) == pytest.approx(1, abs=1e-4)


def test_model_and_draft_revisions_in_a_download_dir(tmp_path: Path) -> None:
    repo = tmp_path / "models--someone--tiny"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "v2").write_text("2" * 40)
    (repo / "snapshots" / ("2" * 40)).symlink_to(demo_model_path())
    draft = {"method": "draft_model", "model": "someone/tiny", "num_speculative_tokens": 2}
    options = {**OPTIONS, "load_format": "dummy", "download_dir": str(tmp_path)}
    with LLM("someone/tiny", revision="v2", speculative_config={**draft, "revision": "v2"}, **options) as llm:
        assert llm.engine_info.model == str(repo / "snapshots" / ("2" * 40))
        assert llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
    with pytest.raises(NotFoundError, match="someone/tiny"):
        LLM("someone/tiny", **options)
    with pytest.raises(NotFoundError, match="'v3'") as caught:
        LLM("someone/tiny", revision="v2", speculative_config={**draft, "revision": "v3"}, **options)
    assert caught.value.param == "speculative_config"


def test_deltas_abort_errors_and_restart() -> None:
    async def scenario() -> None:
        async with AsyncLLM(**OPTIONS, speculative_config=DRAFTS) as client:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            [*_, whole] = await collect(client.generate(PROMPTS[0], params))
            parts = await collect(client.generate(PROMPTS[0], params, delta=True))
            assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
            assert whole.outputs[0].text == client.tokenizer.decode(
                whole.outputs[0].token_ids, skip_special_tokens=True
            )
            assert whole.metrics is not None
            assert whole.metrics.num_verifications > 0
            stop = whole.outputs[0].text[4:8]
            [*_, stopped] = await collect(client.generate(PROMPTS[0], params.clone(stop=[stop])))
            assert stopped.outputs[0].text == whole.outputs[0].text[: whole.outputs[0].text.find(stop)]
            with pytest.raises(PromptTooLongError):
                await collect(client.generate([5] * 250, params))
            with pytest.raises(AdapterError):
                await collect(client.generate("a", lora_request=LoRARequest("x", path="/nowhere")))
            endless = SamplingParams(max_tokens=None, ignore_eos=True)
            async for _ in client.generate("a", endless):
                break
            while (await client.stats()).num_running:
                await asyncio.sleep(0.01)
            stream = client.generate("a", endless)
            await anext(stream)
            assert client.engine_pid is not None
            os.kill(client.engine_pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await collect(stream)
            while client.state != "ready":
                await asyncio.sleep(0.05)
            [*_, again] = await collect(client.generate(PROMPTS[0], params))
            assert texts(again) == texts(whole)

    asyncio.run(asyncio.wait_for(scenario(), 120))
