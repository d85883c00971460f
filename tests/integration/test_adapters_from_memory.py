"""Adapters that are made of tensors, with the demo: they compute what the same adapter from its folder does."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from outrider import LLM, AdapterReplacedError, LoRARequest, SamplingParams, TensorLoRARequest
from outrider.lora.adapter import AdapterSource
from outrider.models.demo import demo_adapters
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError

PROMPT = "List all customers"
PARAMS = SamplingParams(temperature=0, max_tokens=24)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM() as llm:
        yield llm


@pytest.fixture(autouse=True)
def _unloaded(llm):
    """Each test leaves the engine without its adapter."""
    yield
    llm.remove_lora("policy")
    assert llm.llm_engine.sources.memory.num_bytes == 0


def tensors(name: str):
    return safetensors.torch.load_file(Path(demo_adapters()[name]) / "adapter_model.safetensors")


def config(name: str) -> dict:
    return json.loads((Path(demo_adapters()[name]) / "adapter_config.json").read_text())


def load(llm, name: str, **options):
    return llm.load_lora_adapter("policy", tensors=tensors(name), peft_config=config(name), **options)


def made_of(name: str) -> TensorLoRARequest:
    return TensorLoRARequest("policy", 1, peft_config=config(name), lora_tensors=tensors(name))


def answer(llm, adapter):
    [output] = llm.generate(PROMPT, PARAMS, adapter, use_tqdm=False)
    return output.outputs[0].text, output.metrics.adapter_digest


@pytest.fixture(scope="module")
def from_folders(llm, tmp_path_factory):
    """Text and digest of the demo's adapters, without their draft weights, by name."""
    found = {}
    for name in ("sql", "support"):
        folder = tmp_path_factory.mktemp("plain") / name
        shutil.copytree(demo_adapters()[name], folder, ignore=shutil.ignore_patterns("draft"))
        info = llm.load_lora_adapter(LoRARequest(f"plain-{name}", path=folder))
        found[name] = answer(llm, f"plain-{name}")
        assert found[name][1] == info.digest
    return found


def test_tensors_are_an_adapter(llm, from_folders):
    info = load(llm, "sql")
    assert info.digest == from_folders["sql"][1]
    assert answer(llm, "policy") == from_folders["sql"]
    with pytest.raises(InvalidUserInputError, match="already been loaded"):
        load(llm, "support")
    assert answer(llm, "policy") == from_folders["sql"]
    load(llm, "support", load_inplace=True)
    assert answer(llm, "policy") == from_folders["support"]


def test_a_request_brings_tensors(llm, from_folders):
    first, second = made_of("sql"), made_of("support")
    assert answer(llm, first) == answer(llm, first) == from_folders["sql"]
    assert answer(llm, "policy") == from_folders["sql"]
    assert answer(llm, second) == answer(llm, "policy") == from_folders["support"]
    [output] = llm.generate(PROMPT, PARAMS, [(first, 0.5)], use_tqdm=False)
    assert output.lora_request.name == "+policy:0.5"


def test_vllms_verbs(llm, from_folders):
    assert llm.add_lora(made_of("sql"))
    assert llm.list_loras() == {1}
    assert answer(llm, "policy") == from_folders["sql"]
    assert llm.remove_lora(1)


def test_after_a_sleep_without_weights(llm, from_folders):
    load(llm, "sql", pinned=True)
    llm.sleep(2)
    llm.wake_up()
    assert answer(llm, "policy") == from_folders["sql"]
    assert [info.pinned for info in llm.list_lora_adapters() if info.name == "policy"] == [True]
    answer(llm, made_of("support"))  # it is not loaded, but brought by a request
    llm.sleep(2)
    llm.wake_up()
    assert answer(llm, "policy") == from_folders["support"]


def test_the_reader_process_reads_memory(llm, from_folders):
    info = load(llm, "sql")
    manager = llm.llm_engine.engine_core._adapters
    reader = manager._transfers.reader
    if reader is None:
        pytest.skip("no reader process on this machine")
    assert reader.wait_ready(60)
    request = llm.adapters.loaded.requests["policy"]
    adapter = reader.read(AdapterSource(request.path, roots=request.roots, files=request.files))
    assert adapter is not None
    assert adapter.digest.hex() == info.digest


def running(engine, number: int) -> None:
    """A request on the adapter that has begun."""
    engine.add_request(f"r{number}", PROMPT, LONG, lora_request="policy")
    while not any(output.request_id == f"r{number}" for output in engine.step()):
        pass


def finish(engine) -> dict[str, str]:
    """Texts of the requests that finish."""
    texts = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                texts[output.request_id] = output.outputs[0].text
    return texts


def test_running_requests_finish_on_their_version(llm):
    engine = llm.llm_engine
    load(llm, "sql")
    running(engine, 0)
    [expected] = finish(engine).values()
    running(engine, 1)
    load(llm, "support", load_inplace=True)
    running(engine, 2)
    texts = finish(engine)
    assert texts["r1"] == expected
    assert texts["r2"] != expected


def test_running_requests_are_aborted(llm):
    engine = llm.llm_engine
    load(llm, "sql")
    running(engine, 1)
    load(llm, "sql", load_inplace=True, running="abort")
    assert engine.get_num_unfinished_requests() == 1, "the content is the same"
    wrong = config("sql") | {"r": 4096}
    with pytest.raises(AdapterError, match="rank 4096"):
        llm.load_lora_adapter("policy", tensors=tensors("sql"), peft_config=wrong, load_inplace=True, running="abort")
    running(engine, 2)
    load(llm, "support", load_inplace=True, running="abort")
    failed = []
    for _ in range(2):
        with pytest.raises(AdapterReplacedError) as caught:
            finish(engine)
        failed += caught.value.__notes__
    assert sorted(failed) == ["request 'r1'", "request 'r2'"]
    running(engine, 3)
    assert finish(engine).keys() == {"r3"}


def cut(tensors, config):
    key = next(iter(tensors))
    tensors[key] = tensors[key][:, :3]


def round_down(tensors, config):
    for key in tensors:
        tensors[key] = tensors[key].to(torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, config: tensors.popitem(), "lora_"),
        (cut, "shape"),
        (lambda tensors, config: next(iter(tensors.values())).fill_(float("nan")), "finite"),
        (round_down, "int32"),
        (lambda tensors, config: config.update(r=9999), "rank 9999"),
        (lambda tensors, config: config.update(peft_type="IA3"), "IA3"),
        (lambda tensors, config: config.clear(), "peft_type"),
    ],
    ids=["missing", "shape", "nan", "dtype", "rank", "kind", "empty"],
)
def test_the_checks_are_those_of_files(llm, from_folders, change, words):
    load(llm, "support")
    values, fields = tensors("sql"), config("sql")
    change(values, fields)
    with pytest.raises(AdapterError, match=words):
        llm.load_lora_adapter("policy", tensors=values, peft_config=fields, load_inplace=True)
    assert answer(llm, "policy") == from_folders["support"], "the one that had the name stays"


def test_wrong_arguments(llm):
    with pytest.raises(InvalidRequestError, match="running must be one of"):
        load(llm, "sql", running="stop")
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
        llm.load_lora_adapter("policy")
