"""Sampling parameters of generation_config.json: of the model, of a chosen file, of an adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import fake_engine
import pytest

from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.client.sampling_defaults import SamplingDefaults
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import AdapterError, InvalidRequestError
from outrider.platform.core.lora_request import LoRAMix, LoRAPart, LoRARequest
from outrider.platform.core.sampling_params import SamplingParams

WRITTEN = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": None,
    "max_new_tokens": 3,
    "eos_token_id": [1, 9],
}


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture
def model(model_path: str, tmp_path: Path) -> Path:
    shutil.copytree(model_path, tmp_path / "model")
    return write(tmp_path / "model", **WRITTEN)


def started(model: Path, **options: Any) -> LLM:
    return LLM.from_engine_args(EngineArgs(model=str(model), **options), engine="fake_engine:FakeEngine")


def engine_params(llm: LLM, *arguments: Any, prompt: Any = (10,), **options: Any) -> SamplingParams:
    """Parameters that the engine gets for one prompt."""
    llm.generate(list(prompt), *arguments, use_tqdm=False, **options)
    engine = llm.llm_engine.engine_core
    assert isinstance(engine, fake_engine.FakeEngine)
    return engine.added[-1].params


def test_requests_without_parameters_take_the_models(model: Path) -> None:
    with started(model) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.7, top_k=5, max_tokens=3)
        assert engine_params(llm) == SamplingParams(temperature=0.7, top_k=5, max_tokens=3)
        given = engine_params(llm, SamplingParams(max_tokens=2))
        assert (given.temperature, given.top_k, given.max_tokens) == (1.0, 0, 2)
        room = llm.engine_info.max_model_len - 1
        assert engine_params(llm, prompt=[10] * room).max_tokens == 1, "no more than fits"


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_no_file(model: Path, choice: str) -> None:
    adapter = LoRARequest("a", path=str(write(model.parent / "a", temperature=0.1)))
    with started(model, generation_config=choice) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        assert engine_params(llm, lora_request=adapter) == SamplingParams()


def test_a_file_that_the_option_names(model: Path, tmp_path: Path) -> None:
    """Its folder will do too; and its end tokens count."""
    other = write(tmp_path / "other", top_p=0.5, repetition_penalty=1.1, min_p=0.05, eos_token_id=8)
    for choice in (other, other / "generation_config.json"):
        with started(model, generation_config=str(choice)) as llm:
            wanted = SamplingParams(top_p=0.5, repetition_penalty=1.1, min_p=0.05)
            assert llm.get_default_sampling_params() == engine_params(llm) == wanted
            assert {1, 8, 9} <= set(llm.llm_engine.engine_core.added[-1].eos_token_ids)  # type: ignore[attr-defined]


def test_an_adapters_defaults_precede_the_models(model: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", path=str(write(tmp_path / "a", temperature=0.1, top_p=0.9)))
    plain = LoRARequest("b", path=str(tmp_path))
    with started(model) as llm:
        own = engine_params(llm, lora_request=adapter)
        assert (own.temperature, own.top_p, own.top_k, own.max_tokens) == (0.1, 0.9, 5, 3)
        assert engine_params(llm, SamplingParams(max_tokens=2), lora_request=adapter).temperature == 1.0
        assert engine_params(llm, lora_request=(adapter, 0.5)).temperature == 0.1
        assert engine_params(llm, lora_request=[(adapter, 0.5), (plain, 0.5)]).temperature == 0.7
        assert engine_params(llm, lora_request=plain).temperature == 0.7
        write(tmp_path / "a", temperature=0.2)
        llm.load_lora_adapter(adapter)
        assert engine_params(llm, lora_request="a").temperature == 0.2, "after a reload its file is read again"


def test_asynchronous_requests_take_them_too(model: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", path=str(write(tmp_path / "a", temperature=0.1)))
    llm = AsyncLLM.from_engine_args(EngineArgs(model=str(model)))
    llm.sampling_defaults.read_model(str(model))
    wanted = {"temperature": 0.1, "top_k": 5, "max_tokens": 3}
    assert llm.sampling_defaults.of(adapter).result() == wanted
    assert llm.sampling_defaults.of(LoRAMix((LoRAPart(adapter, 0.5),))).result() == wanted
    assert llm.sampling_defaults.of(None).result() == {**wanted, "temperature": 0.7}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ('{"temperature": "hot"}', "temperature must be a number"),
        ('{"top_k": -7}', "top_k must be in"),
        ('{"max_new_tokens": 0}', "max_tokens must be at least 1"),
        ("[1]", "not a JSON object"),
        ("{" * 100_000, "not valid JSON"),
        (" " * (1 << 20) + "{}", "1048576"),
    ],
)
def test_wrong_values_are_named(model: Path, written: str, said: str) -> None:
    (model / "generation_config.json").write_text(written)
    with pytest.raises(InvalidRequestError, match=said):
        started(model)
    (model / "generation_config.json").unlink()
    folder = write(model.parent / "a")
    (folder / "generation_config.json").write_text(written)
    with started(model) as llm, pytest.raises(AdapterError, match=said):
        engine_params(llm, lora_request=LoRARequest("a", path=str(folder)))


def test_a_file_that_is_not_there_is_found_before_the_engine_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="there is no file") as caught:
        started(tmp_path / "no-model", generation_config=str(tmp_path))
    assert caught.value.param == "generation_config"
    with pytest.raises(InvalidRequestError, match="there is no file"):
        SamplingDefaults("off", None)  # type: ignore[arg-type]


def test_values_that_override_all_files(model: Path, tmp_path: Path) -> None:
    adapter = LoRARequest("a", path=str(write(tmp_path / "adapter", temperature=0.2, top_k=9)))
    with started(model, enable_lora=True, override_generation_config={"temperature": 0.5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=5, max_tokens=3)
        assert engine_params(llm, lora_request=adapter) == SamplingParams(temperature=0.5, top_k=9, max_tokens=3)
    for wrong in ({"temprature": 0.5}, {"temperature": -1}, [1]):
        with pytest.raises(InvalidRequestError, match="override_generation_config"):
            started(model, override_generation_config=wrong)
