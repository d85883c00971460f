"""`/server_info` in the form that trainers of vLLM read."""

from dataclasses import replace

import pytest


def test_the_fields_that_trainers_read(http):
    config = http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == 64
    assert config["lora_config"] == {"max_loras": 4, "max_lora_rank": 16}
    assert config["parallel_config"] == {"tensor_parallel_size": 1, "data_parallel_size": 1}
    assert config["weight_transfer_config"] is None


def test_a_server_without_adapters_has_no_lora_config(http, llm):
    llm.info = replace(llm.info, enable_lora=False)
    assert http.get("/server_info").json()["vllm_config"]["lora_config"] is None


@pytest.mark.parametrize("include_dp", ["", "?include_dp=false"])
def test_the_world_size_is_the_number_of_ranks(http, llm, include_dp):
    llm.info = replace(llm.info, tensor_parallel_size=2)
    assert http.get(f"/get_world_size{include_dp}").json() == {"world_size": 2}


@pytest.mark.parametrize("path", ["/server_info", "/get_world_size"])
def test_only_operators_may_ask(make_http, path):
    http = make_http(api_keys=("k",), admin_api_keys=("a",))
    assert http.get(path, headers={"Authorization": "Bearer k"}).status_code == 403
    assert http.get(path, headers={"Authorization": "Bearer a"}).status_code == 200


@pytest.mark.parametrize("path", ["/server_info", "/get_world_size"])
def test_an_engine_that_starts_has_no_facts_yet(http, llm, path):
    llm.state = "starting"
    assert http.get(path).status_code == 503
