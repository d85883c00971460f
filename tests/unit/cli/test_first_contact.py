"""The command line as somebody meets it who has never used it, or comes from vLLM."""

import json

import pytest

from outrider.models.checkpoint.json_files import read_model_config
from outrider.models.demo import demo_adapters
from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser, main
from outrider.platform.core.errors import NotFoundError
from outrider.platform.core.speculative_config import parse_speculative


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch):
    for name in ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE"):
        monkeypatch.delenv(name, raising=False)


def resolve(*arguments: str):
    return serve.resolve(build_parser().parse_args(["serve", *arguments]))


def fails(capsys, *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("usage: outrider")
    assert "serve a model over HTTP" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize(
    ("line", "usage", "suggestion"),
    [
        ("sevre", "usage: outrider [-h]", "'serve'"),
        ("bench servee", "usage: outrider bench", "'serve'"),
        ("serve --max-modle-len 4096", "usage: outrider serve", "'--max-model-len'"),
        ("serve --max_modle_len=4096", "usage: outrider serve", "'--max-model-len'"),
        ("serve /m --tensor-paralel-size 1", "usage: outrider serve", "'--tensor-parallel-size'"),
        ("serve --dtype bfloat61", "usage: outrider serve", "'bfloat16'"),
        ("chat --sytem x", "usage: outrider chat", "'--system'"),
        ("admin tenant create --wieght 2 x", "usage: outrider admin tenant create", "'--weight'"),
    ],
)
def test_wrong_words_get_the_usage_of_their_command_and_a_suggestion(capsys, line, usage, suggestion):
    first, *_, last = fails(capsys, *line.split())
    assert first.startswith(usage)
    assert last.endswith(f"did you mean {suggestion}?")


def test_an_adapter_in_place_of_the_model_is_called_one():
    with pytest.raises(NotFoundError, match=r"is an adapter and no model: .*--lora-modules"):
        read_model_config(demo_adapters()["sql"])


@pytest.mark.parametrize("line", ["serve --zzzzzzzz", "serve one two"])
def test_nothing_is_suggested_that_is_not_close(capsys, line):
    assert "did you mean" not in fails(capsys, *line.split())[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("-tp 1", "tensor_parallel_size", 1),
        ("-tp=1", "tensor_parallel_size", 1),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-tp 2 -ep", "tensor_parallel_size", 2),
        ("--distributed-executor-backend ray", "distributed_executor_backend", "ray"),
        ("--dtype half", "dtype", "float16"),
        ("--dtype float", "dtype", "float32"),
        ("--max-model-len 4k", "max_model_len", 4000),
        ("--max-model-len 4K", "max_model_len", 4096),
        ("--max-model-len 25.6k", "max_model_len", 25600),
        ("--max-model-len auto", "max_model_len", None),
        ("--max-model-len -1", "max_model_len", None),
        ("--max_model_len 100", "max_model_len", 100),
        ("--max_num_batched_tokens=8k", "max_num_batched_tokens", 8000),
        ("--load-format safetensors", "load_format", "auto"),
        ("--load-format dummy", "load_format", "dummy"),
        ("--max-model-len 32_768", "max_model_len", 32768),
        ("--kv-cache-memory 4GiB", "kv_cache_memory_bytes", 4 << 30),
        ("--enforce-eager True", "enforce_eager", True),
        ("--enable-chunked-prefill False", "enable_chunked_prefill", False),
        ("--enable-prefix-caching=false", "enable_prefix_caching", False),
        ("--no-enable-prefix-caching=false", "enable_prefix_caching", True),
        ("--tp 1 --context-length 4096", "max_model_len", 4096),
        ("--max-running-requests 8", "max_num_seqs", 8),
        ("--disable-radix-cache", "enable_prefix_caching", False),
        ("--disable-cuda-graph", "enforce_eager", True),
        ("--revision v2", "revision", "v2"),
        ("--download-dir /hub", "download_dir", "/hub"),
        ("--tokenizer /t", "tokenizer", "/t"),
        ("--tokenizer-revision v3", "tokenizer_revision", "v3"),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--enable-chunked-prefill", "enable_chunked_prefill", True),
        ("--gpu-memory-utilization .8", "gpu_memory_utilization", 0.8),
        (
            "--speculative-config.method ngram --speculative_config.num_speculative_tokens=3",
            "speculative_config",
            {"method": "ngram", "num_speculative_tokens": 3},
        ),
        ("--spec-method ngram --spec-tokens 3", "speculative_config", {"method": "ngram", "num_speculative_tokens": 3}),
    ],
)
def test_vllms_spellings_of_engine_options(line, option, value):
    assert getattr(resolve("/m", *line.split())[0], option) == value


@pytest.mark.parametrize(
    ("line", "option", "value"),
    [
        ("--disable-log-requests --log-level info", "log_requests", False),
        ("--enable-log-requests", "log_requests", True),
        ("--allowed-origins [\"https://a.example\",\"https://b.example\"]", "cors_origins",
         ("https://a.example", "https://b.example")),
        ("--allowed-origins [\"*\"]", "cors_origins", ("*",)),
        ("--otlp-traces-endpoint http://c:4318", "otlp_endpoint", "http://c:4318"),
        ("--uvicorn-log-level info", "uvicorn_log_level", "info"),
        ("--default-chat-template-kwargs {\"think\":false}", "chat_template_kwargs", {"think": False}),
    ],
)  # fmt: skip
def test_vllms_spellings_of_server_options(line, option, value):
    assert getattr(resolve(*line.split())[1], option) == value


@pytest.mark.parametrize(
    "line",
    [
        "-pp 1", "-dp 1", "--pipeline-parallel-size=1", "--data_parallel_size 1", "--tokenizer-mode auto",
        "--task generate", "--runner auto", "--model-impl auto", "--quantization None", "--cpu-offload-gb 0",
        "--no-enable-auto-tool-choice", "--api-server-count 1", "-dcp 1", "--nnodes 1 --node-rank 0", "--hf-token",
    ],
)  # fmt: skip
def test_values_equal_to_the_default_behaviour_are_accepted_silently(line):
    args, config = resolve("/m", *line.split())
    assert (args, config.without_effect) == (resolve("/m")[0], {})


@pytest.mark.parametrize(
    "line",
    [
        "--trust-remote-code",
        "--num-lookahead-slots 4", "--disable-log-stats",
        "--enable-prompt-tokens-details", "--compilation-config {\"level\":3}",
        "--limit-mm-per-prompt image=1", "--disable-uvicorn-access-log", "--max-num-partial-prefills 1",
        "--trust-remote-code True", "--master-addr 127.0.0.1", "--kv-cache-metrics", "--enable-metrics",
        "--enable-auto-tool-choice",
    ],
)  # fmt: skip
def test_ineffective_options_are_accepted_and_reported(line):
    name = line.split()[0].removeprefix("--").replace("-", "_")
    args, config = resolve(*line.split(), "/m")  # a flag does not take the model for its value
    assert args == resolve("/m")[0]
    assert config.without_effect[name]


def test_ineffective_keys_of_a_speculative_config_are_reported():
    config = {"method": "ngram", "num_speculative_tokens": 3, "disable_by_batch_size": 8, "quantization": None}
    _, server = resolve("/m", "--speculative-config", json.dumps(config))
    assert list(server.without_effect) == ["speculative_config.disable_by_batch_size"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-tp 2 --distributed-executor-backend uni", ("--distributed-executor-backend", "one process")),
        ("-tp 2 --batch-invariant", ("--batch-invariant", "tensor_parallel_size")),
        ("--distributed-executor-backend external_launcher", ("--distributed-executor-backend", "external_launcher")),
        ("-pp 2", ("--pipeline-parallel-size", "not there yet")),
        ("--data-parallel-size 4", ("--data-parallel-size", "load balancer")),
        ("--ssl-keyfile k.pem --ssl-certfile c.pem", ("--ssl-", "proxy")),
        ("--tokenizer-mode mistral", ("--tokenizer-mode", "mistral")),
        ("--load-format gguf", ("--load-format", "gguf")),
        ("--task reward", ("--task", "reward")),
        ("--enable-eplb", ("--enable-eplb", "mixtures of experts")),
        ("--pipeline-parallel-size", ("--pipeline-parallel-size", "expected one argument")),
        ("--enforce-eager=maybe", ("--enforce-eager", "maybe")),
        ("--mem-fraction-static 0.8", ("--mem-fraction-static", "see gpu_memory_utilization")),
        ("--speculative-algorithm EAGLE3", ("--speculative-algorithm", "speculative_config=")),
        ('--default-chat-template-kwargs {"messages":[]}', ("--default-chat-template-kwargs", "messages")),
        ("--chat-template /no/such.jinja", ("--chat-template", "/no/such.jinja")),
        ('--lora-modules {"name":"a","path":"/a","load_inplace":true}', ("--lora-modules", "load_inplace")),
        ("--max-model-len 4x", ("--max-model-len", "4x")),
        ("--max-model-len 0", ("--max-model-len", "at least 1")),
        ("--max-num-seqs 1.5", ("--max-num-seqs", "1.5")),
        ('--allowed-origins [1]', ("--cors-origin", "origin")),
        ("--allowed-origins [", ("--cors-origin", "JSON")),
        ("--speculative-config.method", ("--speculative-config.method", "expected one argument")),
    ],
)  # fmt: skip
def test_options_that_would_change_something_are_refused_by_name(capsys, line, words):
    last = fails(capsys, "serve", *line.split())[-1]
    assert all(word in last for word in words), last


@pytest.mark.parametrize("line", ["-O3", "-O 3", "-O=3", "-O.mode=3"])
def test_the_level_of_optimisation(line):
    assert list(resolve("/m", *line.split())[1].without_effect) == ["optimization_level"]


def test_a_chat_template_is_a_file_or_the_template_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.jinja").write_text("from a file")
    assert resolve("/m", "--chat-template", "~/x.jinja")[1].chat_template == "from a file"
    assert resolve("/m", "--chat-template", "{{ messages }}")[1].chat_template == "{{ messages }}"


def test_adapters_with_vllms_fields():
    module = {"name": "a", "path": "/a", "base_model_name": "m", "is_3d_lora_weight": False}
    assert resolve("/m", "--lora-modules", json.dumps(module))[1].lora_modules == {"a": "/a"}


@pytest.mark.parametrize(
    "config", [{"model": "ngram"}, {"model": "[ngram]"}, {"method": "[ngram]"}, {"method": "ngram", "model": "ngram"}]
)
def test_prompt_lookup_as_vllm_writes_it(config):
    parsed = parse_speculative({**config, "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    assert (parsed.method, parsed.model, parsed.prompt_lookup_max) == ("ngram", None, 4)


@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3-Instruct-8B", "eagle"),
        ("/drafts/medusa-1b/", "medusa"),
        ("/home/eagle-eye/small", "draft_model"),
    ],
)
def test_the_method_of_a_draft_is_known_by_the_name_of_its_model(model, method):
    config = json.dumps({"model": model, "num_speculative_tokens": 3})
    args, _ = resolve("/m", "--speculative-config", config)
    assert parse_speculative(args.speculative_config).method == method


def test_the_longest_lookup_is_not_below_the_shortest():
    assert parse_speculative({"method": "ngram", "prompt_lookup_min": 7}).prompt_lookup_max == 7


def test_the_model_as_an_option():
    assert resolve("--model", "/m")[0].model == "/m"
    args, config = resolve("/m", "--model", "/other")
    assert (args.model, list(config.without_effect)) == ("/m", ["model"])


# --- --config -------------------------------------------------------------------------------------------------------

OPTIONS = """
model: /m
port: 9000
max-model-len: 4k
enable_lora: true
enable-prefix-caching: false
access-log: false
tensor-parallel-size: 1
disable-log-requests: true
trust-remote-code: true
seed: null
api-key: [one, two]
served-model-name: [first, second]
lora-modules:
- a=/a
- {name: b, path: /b}
speculative-config: {method: ngram, num_speculative_tokens: 3}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "options.yaml"
    path.write_text(OPTIONS)
    return path


def test_options_from_a_file(file):
    args, config = resolve("--config", str(file))
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("/m", 4000, False)
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert (config.port, config.api_keys, config.served_model_names) == (9000, ("one", "two"), ("first", "second"))
    assert config.lora_modules == {"a": "/a", "b": "/b"}
    assert (config.access_log, config.log_requests) == (False, False)
    assert list(config.without_effect) == ["trust_remote_code"]


def test_the_command_line_comes_before_the_file(file):
    args, config = resolve(
        "/other", f"--config={file}", "--port", "1", "--api-key", "mine", "--enable-prefix-caching",
        "--enable-log-requests", "--lora-modules", "c=/c", "--max_model_len=7", "--speculative-config.method=suffix",
    )  # fmt: skip
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("/other", 7, True)
    assert args.speculative_config == {"method": "suffix"}
    assert (config.port, config.api_keys, config.lora_modules) == (1, ("mine",), {"c": "/c"})
    assert config.log_requests


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-modle-len: 5", ("max-modle-len", "did you mean 'max-model-len'?")),
        ("port: x", ("--port",)),
        ("config: other.yaml", ("config",)),
        ("- port", ("names of options",)),
        ("port: [", ("not valid YAML",)),
    ],
)
def test_files_that_are_wrong(capsys, tmp_path, text, words):
    path = tmp_path / "options.yaml"
    path.write_text(text)
    last = fails(capsys, "serve", "--config", str(path))[-1]
    assert all(word in last for word in words), last


def test_a_file_that_is_not_there(capsys):
    assert "/no/such.yaml" in fails(capsys, "serve", "--config", "/no/such.yaml")[-1]
    assert "expected one argument" in fails(capsys, "serve", "--config")[-1]
