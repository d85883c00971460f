"""`TensorLoRARequest`: tensors become a safetensors file, once for each object."""

import gc
from enum import Enum, StrEnum
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.adapters.sources.tensors import config_bytes, tensor_pieces
from outrider.platform.core.adapter_files import CONFIG_FILE, WEIGHT_FILES
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError
from outrider.platform.core.lora_request import LoRAMix, LoRARequest, TensorLoRARequest, mix_of, tensor_request


def request(name: str = "policy", value: float = 1.0, **options) -> TensorLoRARequest:
    return TensorLoRARequest(name, peft_config={"r": 1}, lora_tensors={"a": torch.full((2, 3), value)}, **options)


def tensors_of(local: LoRARequest) -> dict[str, torch.Tensor]:
    return safetensors.torch.load(local.folder.read(WEIGHT_FILES[0], 1 << 20) or b"")


def localize(sources: AdapterSources, lora, **options):
    return sources.localize(lora, **options).result()


def test_every_kind_of_tensor():
    base = torch.arange(24.0)
    given = {
        "plain": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "transposed": base.view(4, 6).T,
        "shares": base[:6],
        "shares too": base[:6],
        "trained": torch.nn.Parameter(torch.randn(2, 2)),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "flag": torch.tensor([True, False]),
    }
    sizes = []
    found = safetensors.torch.load(b"".join(tensor_pieces(given, sizes.append)))
    assert sizes == [sum(tensor.nbytes for tensor in given.values())]
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].float(), tensor.detach().float()), name


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        None,
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.uint16),
    ],
    ids=["list", "none", "complex", "sparse", "meta", "uint16"],
)
def test_what_cannot_be_written(wrong):
    with pytest.raises(AdapterError) as caught:
        list(tensor_pieces({"good": torch.zeros(1), "wrong": wrong}, print))
    assert caught.value.param == "lora_tensors"
    assert "'wrong'" in caught.value.message


class Task(StrEnum):
    CAUSAL = "CAUSAL_LM"


class Kind(Enum):
    LORA = "LORA"


def test_a_configuration_as_peft_has_it():
    config = {"task_type": Task.CAUSAL, "peft_type": Kind.LORA, "target_modules": {"q_proj"}}
    assert config_bytes(config) == b'{"task_type": "CAUSAL_LM", "peft_type": "LORA", "target_modules": ["q_proj"]}'
    made = TensorLoRARequest("a", peft_config=SimpleNamespace(to_dict=lambda: config), lora_tensors={})
    assert made.peft_config == config
    with pytest.raises(AdapterError, match="peft_config"):
        config_bytes({"x": object()})


@pytest.mark.parametrize(("field", "value"), [("peft_config", "{}"), ("lora_tensors", [1]), ("lora_tensors", {1: 2})])
def test_wrong_fields(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        TensorLoRARequest("a", **{"peft_config": {}, "lora_tensors": {}, field: value})
    assert caught.value.param == field


def test_vllms_spelling():
    made = TensorLoRARequest("7", 7, "dummy", peft_config={}, lora_tensors={})
    assert (made.name, made.lora_int_id) == ("7", 7)
    assert made.path != TensorLoRARequest("7", 7, "dummy", peft_config={}, lora_tensors={}).path
    assert "lora_tensors" not in repr(made)


def test_a_name_with_tensors():
    made, rest = tensor_request("a", {"tensors": {}, "peft_config": {"r": 1}, "pinned": True})
    assert isinstance(made, TensorLoRARequest)
    assert (made.name, rest) == ("a", {"pinned": True})
    given = LoRARequest("b", 3, "/x")
    assert tensor_request(given, {"load_inplace": True}) == (given, {"load_inplace": True})
    assert tensor_request(given, {"tensors": {}, "peft_config": {}})[0].lora_int_id == 3
    for options in ({"tensors": {}}, {"peft_config": {}}):
        with pytest.raises(InvalidRequestError, match="is missing"):
            tensor_request("a", options)


def test_an_object_is_copied_once():
    sources, lora = AdapterSources(), request(lora_int_id=5)
    local = localize(sources, lora)
    assert (local.name, local.lora_int_id, type(local)) == ("policy", 5, LoRARequest)
    assert local.folder.read(CONFIG_FILE, 100) == b'{"r": 1}'
    lora.lora_tensors["a"][:] = 2.0
    assert localize(sources, lora) == local
    assert torch.equal(tensors_of(local)["a"], torch.ones(2, 3))
    again = localize(sources, lora, again=True)
    assert again.path != local.path
    assert localize(sources, lora) == again
    sources.restrict("policy")
    assert sources.memory.num_bytes == 0
    assert torch.equal(tensors_of(localize(sources, lora))["a"], torch.full((2, 3), 2.0)), "made again"


def test_a_mix_with_one():
    sources = AdapterSources()
    mix = mix_of([(request(), 0.5), (LoRARequest("b", path="/b"), 0.5)])
    local = localize(sources, mix)
    assert isinstance(local, LoRAMix)
    (b, _), (policy, _) = local.parts
    assert (b.path, type(policy)) == ("/b", LoRARequest)
    with pytest.raises(InvalidRequestError, match="names two adapters"):
        mix_of([(request(), 0.5), (request(), 0.5)])


def test_contents_of_requests_do_not_pile_up():
    sources = AdapterSources()
    loaded = localize(sources, request(value=0.0), again=True)
    sources.restrict("policy", (loaded.path, None))
    made = [localize(sources, request(value=float(value))) for value in range(1, 5)]
    assert sources.folders_of("policy") == (loaded.path, made[-2].path, made[-1].path)
    assert [torch.equal(tensors_of(local)["a"], torch.full((2, 3), v)) for local, v in ((loaded, 0.0), (made[-1], 4.0))]
    gc.collect()
    assert sources.folders_of("policy") == (loaded.path, made[-2].path, made[-1].path)


def test_no_room_for_tensors():
    sources = AdapterSources(SourceOptions(max_upload_bytes=100))
    with pytest.raises(InvalidUserInputError, match="--lora-upload-bytes"):
        localize(sources, request())
    assert sources.memory.num_bytes == 0
