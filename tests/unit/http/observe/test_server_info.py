"""`/server_info` in the form that trainers of vLLM read."""

from dataclasses import replace


def test_the_fields_that_trainers_read(http):
    config = http.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["model_config"]["dtype"] == "torch.float32"
    assert config["model_config"]["max_model_len"] == 64
    assert config["lora_config"] == {"max_loras": 4, "max_lora_rank": 16}
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert config["weight_transfer_config"] is None


def test_a_server_without_adapters_has_no_lora_config(http, llm):
    llm.info = replace(llm.info, enable_lora=False)
    assert http.get("/server_info").json()["vllm_config"]["lora_config"] is None


def test_only_operators_may_ask(make_http):
    http = make_http(api_keys=("k",), admin_api_keys=("a",))
    assert http.get("/server_info", headers={"Authorization": "Bearer k"}).status_code == 403
    assert http.get("/server_info", headers={"Authorization": "Bearer a"}).status_code == 200


def test_an_engine_that_starts_has_no_facts_yet(http, llm):
    llm.state = "starting"
    assert http.get("/server_info").status_code == 503
