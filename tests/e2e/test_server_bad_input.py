"""Bad adapters over HTTP to a real server, which goes on serving others."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.models.demo import demo_adapters

from ..error_answers import error_in


@pytest.fixture(autouse=True)
def _others_are_served(http):
    yield
    response = http.post("/v1/completions", json={"model": "sql", "prompt": "All", "max_tokens": 2})
    assert response.status_code == 200, response.text


def copy_adapter(tmp_path: Path, **config) -> Path:
    """The demo's SQL adapter, with changes to its configuration."""
    folder = tmp_path / "adapter"
    shutil.copytree(demo_adapters()["sql"], folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def change_tensors(folder: Path, change) -> None:
    file = folder / "adapter_model.safetensors"
    save_file({name: change(name, tensor) for name, tensor in load_file(file).items()}, file)


def rank_above_the_limit(tmp_path):
    folder = copy_adapter(tmp_path, r=128)

    def widen(name, tensor):
        axis = 0 if "lora_A" in name else 1
        return torch.repeat_interleave(tensor, 128 // tensor.shape[axis], dim=axis)

    change_tensors(folder, widen)
    return folder


def wrong_shapes(tmp_path):
    folder = copy_adapter(tmp_path)
    change_tensors(folder, lambda name, tensor: tensor[:, :-1].contiguous() if "lora_A" in name else tensor)
    return folder


def no_weights(tmp_path):
    folder = copy_adapter(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    return folder


def corrupt_weights(tmp_path):
    folder = copy_adapter(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(b"not safetensors")
    return folder


def no_config(tmp_path):
    folder = copy_adapter(tmp_path)
    (folder / "adapter_config.json").unlink()
    return folder


def broken_config(tmp_path):
    folder = copy_adapter(tmp_path)
    (folder / "adapter_config.json").write_text("{")
    return folder


def no_folder(tmp_path):
    return tmp_path / "nothing"


def other_base(tmp_path):
    """An adapter of a model with other layers."""
    folder = copy_adapter(tmp_path)
    file = folder / "adapter_model.safetensors"
    save_file({name.replace("layers.0.", "layers.77."): t for name, t in load_file(file).items()}, file)
    return folder


@pytest.mark.parametrize(
    "make",
    [rank_above_the_limit, wrong_shapes, no_weights, corrupt_weights, no_config, broken_config, no_folder, other_base],
)
def test_adapters(http, tmp_path, make):
    body = {"lora_name": "bad", "lora_path": str(make(tmp_path))}
    error = error_in(http.post("/v1/load_lora_adapter", json=body), 400)
    assert error["type"] == "InvalidAdapter"
    assert error["message"]
    error_in(http.post("/v1/completions", json={"model": "bad", "prompt": "x"}), 404)


@pytest.mark.parametrize("field", ["lora_path", "draft_path"])
@pytest.mark.parametrize("path", ["/nowhere", "/" + "a" * 5000, "/" + "a" * 1_000_000, "/a\0b"])
def test_paths_of_adapters(server, http, tmp_path, field, path):
    """Also those that no file system takes: one short answer, and nothing in the log."""
    logged = len(server.output)
    body = {"lora_name": "bad", "lora_path": str(copy_adapter(tmp_path))} | {field: path}
    error = error_in(http.post("/v1/load_lora_adapter", json=body), 400)
    assert error["param"] == field
    assert len(error["message"]) < 500
    assert server.output[logged:] == ""


def test_adapters_come_and_go(http, tmp_path):
    folder = str(copy_adapter(tmp_path))
    load = {"lora_name": "extra", "lora_path": folder}
    response = http.post("/v1/load_lora_adapter", json=load)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'extra' added successfully.")
    assert error_in(http.post("/v1/load_lora_adapter", json=load), 400)["type"] == "InvalidUserInput"
    prompt = {"prompt": "List all customers", "max_tokens": 10, "temperature": 0}
    texts = [
        http.post("/v1/completions", json={"model": m, **prompt}).json()["choices"][0]["text"] for m in ("extra", "sql")
    ]
    assert texts[0] == texts[1]
    response = http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'extra' removed successfully.")
    assert error_in(http.post("/v1/unload_lora_adapter", json={"lora_name": "extra"}), 404)["type"] == "NotFoundError"
    error_in(http.post("/v1/completions", json={"model": "extra", "prompt": "x"}), 404)


@pytest.mark.parametrize("stream", [True, False])
def test_requests_ended_by_an_unload_get_an_error(http, server, tmp_path, stream):
    """With `abort`: an event of the stream, or the status; never half an answer as if it were whole."""
    assert http.post("/v1/load_lora_adapter", json={"lora_name": "extra", "lora_path": str(copy_adapter(tmp_path))})
    body = {"model": "extra", "prompt": "List", "max_tokens": 1900, "ignore_eos": True, "stream": stream}
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(http.post, "/v1/completions", json=body)
        server.wait_for(lambda: server.metric("lora_requests", adapter="extra", state="running") == 1)
        gone = http.post("/v1/unload_lora_adapter", json={"lora_name": "extra", "mode": "abort"})
        assert gone.status_code == 200, gone.text
    if stream:
        *_, event, done = answer.result().text.split("\n\n")[:-1]
        error = json.loads(event.removeprefix("data: "))["error"]
        assert done == "data: [DONE]"
    else:
        error = error_in(answer.result(), 404)
    assert error["type"] == "NotFoundError"
    assert "was unloaded" in error["message"]
