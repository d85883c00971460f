"""Two processes compute one model: text, adapters, drafts, grammars, preemption, and the death of one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from outrider import LLM, LoRARequest, SamplingParams
from outrider.platform.core.errors import EngineDeadError, InvalidRequestError, OutriderError
from outrider.platform.engine.executor import parallel, rank_process

from ..quantized_files import CASES, write_quantized
from ..rank_tests import RankTests, expected, whole  # noqa: F401  (fixtures)
from ..rank_texts import NUM_BLOCKS, OPTIONS, PROMPTS
from ..thread_ranks import ranks_as_threads
from ..tiny_families import FAMILIES, Family, build


def ranks() -> list[int]:
    """Process ids of this process's other ranks."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command, stat = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if b"executor.rank_process" in command and int(stat.rpartition(")")[2].split()[1]) == os.getpid():
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(tensor_parallel_size=2, num_gpu_blocks_override=NUM_BLOCKS, **OPTIONS) as made:
        assert len(ranks()) == 1
        yield made
    assert not ranks(), "they end with the engine"


class TestTexts(RankTests):
    """See `RankTests`."""


def test_engine_info_covers_all_ranks(llm: LLM, whole: LLM) -> None:  # noqa: F811
    found, one = llm.llm_engine.engine_info, whole.llm_engine.engine_info
    assert found.num_parameters == one.num_parameters
    assert one.weight_bytes <= found.weight_bytes < 1.02 * one.weight_bytes, "norms are held twice"


def test_prompt_logprobs_and_sleep(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    first = llm.generate(PROMPTS[:1], params)[0].prompt_logprobs
    llm.llm_engine.engine_core.release_memory()
    again = llm.generate(PROMPTS[:1], params)[0].prompt_logprobs
    assert first is not None
    assert [entry and sorted(entry) for entry in first] == [entry and sorted(entry) for entry in again or ()]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_rounded_while_they_are_loaded(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_as_threads(monkeypatch)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "quantization": quantization}
    found = []
    for size in (1, 2):
        with LLM(tensor_parallel_size=size, **options) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=24, temperature=0))
            found.append([output.outputs[0].text for output in outputs])
    assert found[0] == found[1]


def make_jobs(prompts: Any, adapter: Path) -> list[Any]:
    """Requests on a tiny model, each without and with an adapter."""
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    adapters = (None, LoRARequest("a", path=str(adapter)))
    return [([token % 131 for token in prompt], greedy, a) for prompt in prompts[:3] for a in adapters]


def texts_of_sizes(
    make_engine: Any, run: Any, model: Path, jobs: list[Any], options: dict[str, Any] | None = None
) -> list[list[list[int]]]:
    """Tokens by one process without `options` and by two with them."""
    found = []
    for size in (1, 2):
        more = (options or {}) if size == 2 else {}
        engine = make_engine(
            model=str(model), enable_lora=True, max_loras=1, max_lora_rank=8, tensor_parallel_size=size, **more
        )
        found.append([outcome.token_ids for outcome in run(engine, jobs)])
    return found


@pytest.mark.parametrize("family", ["opt", "gpt2", "falcon", "olmo2"])
def test_other_families_match_one_rank(
    family: str, make_engine: Any, run: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT's form and norms over all heads, with an adapter on every projection, and with drafts. GPT-2's adapter has
    magnitudes, for weights that its checkpoint has transposed."""
    ranks_as_threads(monkeypatch)
    model, (base, adapter) = build(FAMILIES[family]), (tmp_path / name for name in ("base", "adapter"))
    model.save_pretrained(base)
    options = {"target_modules": FAMILIES[family].targets, "use_dora": family == "gpt2"}
    lora = LoraConfig(r=4, init_lora_weights=False, **options)
    get_peft_model(model, lora).save_pretrained(adapter)
    jobs = make_jobs(prompts, adapter)
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    found = texts_of_sizes(make_engine, run, base, jobs, options)
    assert found[0] == found[1]
    assert found[0][::2] != found[0][1::2], "the adapter changes texts"


def test_an_adapter_on_act_order_gptq(
    make_engine: Any, run: Any, prompts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ's `desc_act`: a rank has columns of `o_proj` and `down_proj` whose inputs other ranks compute."""
    ranks_as_threads(monkeypatch)
    case, (base, quantized, adapter) = CASES["gptq-act"], (tmp_path / name for name in ("base", "quantized", "adapter"))
    model = build(Family("Llama", case.sizes))
    model.save_pretrained(base)
    write_quantized(base, quantized, case)
    lora = LoraConfig(r=4, target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(model, lora).save_pretrained(adapter)
    found = texts_of_sizes(make_engine, run, quantized, make_jobs(prompts, adapter))
    assert found[0] == found[1]
    assert found[0][::2] != found[0][1::2], "the adapter changes texts"


def test_a_size_that_does_not_divide_the_heads() -> None:
    with pytest.raises(InvalidRequestError, match="num_attention_heads 8") as caught:
        LLM(tensor_parallel_size=3, device="cpu")
    assert caught.value.param == "tensor_parallel_size"


def test_ray_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'outrider\[ray\]'") as caught:
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray", device="cpu")
    assert caught.value.param == "distributed_executor_backend"


def test_a_rank_that_cannot_join_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_as_threads(monkeypatch)

    def refuse(*arguments: Any) -> None:
        raise OSError("no way to rank 0")

    monkeypatch.setattr(rank_process, "ProcessRanks", refuse)
    with pytest.raises(OutriderError, match="no way to rank 0"):
        LLM(tensor_parallel_size=2, device="cpu")
    assert "outrider-join" not in {thread.name for thread in threading.enumerate()}, "no thread waits for it"

    def hang(*arguments: Any) -> None:
        arguments[-1]()
        time.sleep(1)
        raise EOFError

    monkeypatch.setattr(rank_process, "ProcessRanks", hang)
    monkeypatch.setattr(parallel, "_JOIN_SECONDS", 0.3)
    with pytest.raises(EngineDeadError, match=r"tensor_parallel_size 2: ranks \[1\] did not join the others"):
        LLM(tensor_parallel_size=2, device="cpu")


def test_the_death_of_a_rank_ends_the_engine(llm: LLM) -> None:
    """The last test: the engine is that of all others."""
    llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    (rank,) = ranks()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="rank 1 of 2 is gone"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2))
    assert llm.llm_engine.engine_core.has_work(), "an idle server notices it, too"
    with pytest.raises(EngineDeadError, match="rank 1 of 2 is gone"):
        llm.llm_engine.engine_core.step()
