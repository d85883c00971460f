"""Command lines to engine and server options."""

import dataclasses
import json

import pytest

from outrider.models.demo import demo_adapters, demo_eagle3_path
from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser, main
from outrider.platform.cli.options.field_flags import flag
from outrider.platform.core.config import ENGINE_OPTIONS, EngineArgs
from outrider.platform.core.errors import AdapterError, InvalidRequestError, NotFoundError


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    monkeypatch.delenv("OUTRIDER_ADMIN_API_KEY", raising=False)
    monkeypatch.delenv("OUTRIDER_DATABASE", raising=False)


def resolve(*arguments: str):
    return serve.resolve(build_parser().parse_args(["serve", *arguments]))


def fails(capsys, *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *arguments])
    assert exit_.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


SAMPLES = {
    "revision": "v2", "tokenizer": "/tok", "tokenizer_revision": "v3", "download_dir": "/cache",
    "generation_config": "none", "override_generation_config": {"temperature": 0.5},
    "dtype": "float32", "device": "cpu", "load_format": "dummy", "seed": 5, "max_model_len": 100,
    "model_impl": "transformers", "quantization": "int8",
    "skip_tokenizer_init": True,
    "max_num_seqs": 3, "max_num_batched_tokens": 200, "max_logprobs": 7, "block_size": 8, "num_gpu_blocks_override": 50,
    "kv_cache_memory_bytes": 10**6, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False,
    "kv_cache_dtype": "fp8", "swap_space": 0.5, "preemption_mode": "recompute",
    "enable_chunked_prefill": False, "prompt_pacing": False, "scheduling_policy": "priority", "max_num_queued_reqs": 9,
    "enable_lora": True, "async_scheduling": True,
    "fair_prompt_cost": 0.5, "fair_output_cost": 3.0, "fair_rejected_draft_cost": 0.0,
    "max_loras": 2, "max_cpu_loras": 16, "max_lora_rank": 16,
    "lora_memory": "512MiB", "max_cpu_lora_memory": "2GiB", "enforce_eager": True, "batch_invariant": True,
    "tensor_parallel_size": 1, "distributed_executor_backend": "mp",
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
}  # fmt: skip


def as_arguments(option: str, value: object) -> list[str]:
    name = flag(option)
    if isinstance(value, bool):
        return [name if value else name.replace("--", "--no-", 1)]
    return [name, json.dumps(value) if isinstance(value, dict) else str(value)]


def test_every_engine_option_is_a_flag_with_a_text():
    options = {field.name for field in dataclasses.fields(EngineArgs)} - {"model", "served_model_name"}
    assert options == set(SAMPLES), "a new option of EngineArgs needs a sample here"
    assert options == {name for name, option in ENGINE_OPTIONS.items() if option.text} - {"model", "served_model_name"}


@pytest.mark.slow
@pytest.mark.parametrize("option", sorted(SAMPLES))
def test_flags_set_their_option(option):
    args, _ = resolve("/some/model", *as_arguments(option, SAMPLES[option]))
    assert getattr(args, option) == SAMPLES[option]
    assert args == dataclasses.replace(
        EngineArgs(model="/some/model", served_model_name="model"), **{option: SAMPLES[option]}
    )


def test_demo_defaults():
    args, config = resolve()
    assert args.model is None
    assert args.enable_lora
    assert args.speculative_config == {
        "method": "eagle3",
        "model": str(demo_eagle3_path()),
        "num_speculative_tokens": 4,
        "adaptive": True,
    }
    assert config.served_model_names == ("outrider-demo",)
    assert config.lora_modules == {name: str(path) for name, path in demo_adapters().items()}
    assert (config.host, config.port, config.api_keys) == ("127.0.0.1", 8000, ())


def test_the_demo_by_its_name():
    assert resolve("outrider-demo") == resolve()


def test_explicit_options_win_over_the_demos():
    args, config = resolve("--no-enable-lora", "--no-speculation", "--max-loras", "3")
    assert not args.enable_lora
    assert args.speculative_config == {"method": "off"}
    assert args.max_loras == 3
    assert config.lora_modules == {}
    args, config = resolve("--lora-modules", "x=/x", "--speculative-config", '{"method": "ngram"}')
    assert config.lora_modules == {"x": "/x"}
    assert args.speculative_config == {"method": "ngram"}


def test_another_model_gets_no_demo_defaults():
    args, config = resolve("/models/Qwen3-0.6B/")
    assert (args.enable_lora, args.speculative_config) == (False, None)
    assert config.served_model_names == ("Qwen3-0.6B",)
    assert config.lora_modules == {}


def test_the_model_answers_to_the_name_it_was_started_with(tmp_path, monkeypatch):
    """A link shows its own name, a snapshot of the hub's cache the repository's; requests may use every spelling."""
    snapshot = tmp_path / "models--acme--tiny-1b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "my-model").symlink_to(snapshot)
    monkeypatch.chdir(tmp_path)
    resolved = str(snapshot.resolve())
    _, config = resolve("./my-model/")
    assert config.served_model_names == ("my-model",)
    wanted = {"./my-model", "./my-model/", str(tmp_path / "my-model"), resolved, "acme/tiny-1b", "tiny-1b"}
    assert wanted <= set(config.model_aliases)
    _, config = resolve(resolved)
    assert config.served_model_names == ("tiny-1b",)
    assert {resolved, f"{resolved}/", "acme/tiny-1b"} <= set(config.model_aliases)
    _, config = resolve("Qwen/Qwen3-0.6B")
    assert (config.served_model_names, config.model_aliases) == (("Qwen3-0.6B",), ("Qwen/Qwen3-0.6B",))
    (tmp_path / "tiny.Q8_0.gguf").touch()
    _, config = resolve("tiny.Q8_0.gguf")
    assert config.served_model_names == ("tiny.Q8_0",)
    assert {"tiny.Q8_0.gguf", str(tmp_path / "tiny.Q8_0.gguf")} <= set(config.model_aliases)
    _, config = resolve("my-model", "--served-model-name", "one")
    assert (config.served_model_names, config.model_aliases) == (("one",), ())
    with pytest.raises(InvalidRequestError, match="the model's own name"):
        resolve("Qwen/Qwen3-0.6B", "--lora-modules", "Qwen/Qwen3-0.6B=/x")


def test_lora_modules():
    args, config = resolve(
        "/m", "--lora-modules", "a=/one", '{"name": "b", "path": "/two=2"}', "--lora-modules", "c=/3"
    )
    assert config.lora_modules == {"a": "/one", "b": "/two=2", "c": "/3"}
    assert config.lora_draft_paths == {}
    assert args.enable_lora


def test_lora_modules_with_draft_weights():
    _, config = resolve("/m", "--lora-modules", '{"name": "a", "path": "/a", "draft_path": "/drafts"}', "b=/b")
    assert config.lora_modules == {"a": "/a", "b": "/b"}
    assert config.lora_draft_paths == {"a": "/drafts"}


def test_served_names():
    args, config = resolve("/m", "--served-model-name", "one", "two")
    assert config.served_model_names == ("one", "two")
    assert args.served_model_name == "one"


def test_keys(monkeypatch):
    assert resolve("--api-key", "a", "--api-key", "b")[1].api_keys == ("a", "b")
    monkeypatch.setenv("OUTRIDER_API_KEY", "from-env")
    assert resolve()[1].api_keys == ("from-env",)
    assert resolve("--api-key", "a")[1].api_keys == ("a",)


def test_admin_keys(monkeypatch):
    assert resolve()[1].admin_api_keys == ()
    assert resolve("--admin-api-key", "a", "--admin-api-key", "b")[1].admin_api_keys == ("a", "b")
    monkeypatch.setenv("OUTRIDER_ADMIN_API_KEY", "from-env")
    _, config = resolve("--api-key", "c")
    assert (config.api_keys, config.admin_api_keys) == (("c",), ("from-env",))


def test_adapter_sources_are_options(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    args, config = resolve(
        "/m", "--lora-dir", "a", "--lora-root", "~/b", "--lora-root", str(tmp_path), "--lora-remote", "hf, S3",
        "--max-lora-bytes", "1MiB", "--lora-cache-dir", "/cache", "--lora-cache-bytes", "2GB", "--lora-resolver", "m:f",
        "--lora-upload-bytes", "3MiB",
    )  # fmt: skip
    assert args.enable_lora
    assert config.lora_roots == (str(tmp_path / "b"), str(tmp_path))
    assert config.lora_remote == ("hf", "s3")
    sources = config.lora_sources
    assert (sources.directories, sources.roots) == ((str(tmp_path / "a"),), config.lora_roots)
    assert (sources.max_adapter_bytes, sources.max_cache_bytes) == (1 << 20, 2 * 10**9)
    assert sources.max_upload_bytes == 3 << 20
    assert (sources.cache_dir, sources.resolvers) == ("/cache", ("m:f",))
    assert resolve("/m")[1].lora_sources.max_adapter_bytes == 4 << 30
    assert resolve("/m")[1].lora_sources.max_upload_bytes == 4 << 30


def test_the_demos_adapters_may_be_loaded_over_http():
    folders = {str(path.parent) for path in demo_adapters().values()}
    assert set(resolve()[1].lora_roots) == folders
    assert set(resolve("--lora-modules", "x=/x")[1].lora_roots) == folders
    assert resolve("/m")[1].lora_roots == ()


def test_an_unsendable_key_in_the_environment_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_API_KEY", "ключ")
    message = fails(capsys)
    assert "--api-key" in message
    assert "OUTRIDER_API_KEY" in message
    assert "ключ" not in message


def test_server_options(tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    arguments = "--host 0.0.0.0 --port 0 --shutdown-timeout 1.5 --log-level info --access-log".split()
    _, config = resolve(*arguments, "--chat-template", str(template), "--trust-request-chat-template")
    assert (config.host, config.port, config.shutdown_timeout) == ("0.0.0.0", 0, 1.5)
    assert (config.log_level, config.access_log) == ("info", True)
    assert (config.chat_template, config.trust_request_chat_template) == ("{{ messages }}", True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("--max-loras x", "--max-loras"),
        ("--max-loras 0", "--max-loras"),
        ("--max-loras 4 --max-cpu-loras 2", "--max-cpu-loras"),
        ("--dtype int8", "--dtype"),
        ("--scheduling-policy lifo", "--scheduling-policy"),
        ("--gpu-memory-utilization 2", "--gpu-memory-utilization"),
        ("--port 70000", "--port"),
        ("--port -1", "--port"),
        ("--shutdown-timeout soon", "--shutdown-timeout"),
        ("--shutdown-timeout nan", "--shutdown-timeout"),
        ("--speculative-config {", "--speculative-config"),
        ("--speculative-config []", "--speculative-config"),
        ('--speculative-config {"method":"magic"}', "--speculative-config"),
        ('--speculative-config {"method":"ngram"} --no-speculation', "--no-speculation"),
        ("--lora-modules x", "--lora-modules"),
        ("--lora-modules =x", "--lora-modules"),
        ('--lora-modules {"name":"x"}', "--lora-modules"),
        ('--lora-modules {"name":"x","path":"y","size":1}', "--lora-modules"),
        ('--lora-modules {"name":"x","path":"y","draft_path":5}', "draft_path"),
        ("--lora-modules {", "--lora-modules"),
        ("--lora-modules x=1 x=2", "--lora-modules"),
        ("--lora-modules outrider-demo=1", "--lora-modules"),
        ("--lora-modules x=1 --no-enable-lora", "--lora-modules"),
        ("--chat-template /nowhere", "--chat-template"),
        ("--lora-dir /nowhere", "--lora-dir"),
        ("--lora-root /nowhere", "--lora-root"),
        ("--lora-dir /tmp --no-enable-lora", "--lora-dir"),
        ("--lora-resolver m:f --no-enable-lora", "--lora-resolver"),
        ("--lora-remote file", "--lora-root"),
        ("--lora-remote s3://", "--lora-remote"),
        ("--lora-remote ,", "--lora-remote"),
        ("--max-lora-bytes lots", "--max-lora-bytes"),
        ("--lora-cache-bytes 0", "--lora-cache-bytes"),
        ("--admin-api-key \x07", "--admin-api-key"),
        ("--api-key  ", "--api-key"),
        ("--api-key ключ", "--api-key"),
        ("--api-key \x07", "--api-key"),
        ("--tensor-parallel-size 0", "--tensor-parallel-size"),
        ("--max-lora 4", "--max-lora"),
    ],
)
def test_wrong_values_name_the_option(capsys, arguments, option):
    assert option in fails(capsys, *arguments.split(" "))


@pytest.mark.parametrize(
    ("arguments", "error", "shown"),
    [
        ([], InvalidRequestError("cannot listen", param="port"), "argument --port: cannot listen"),
        ([], InvalidRequestError("no such host", param="host"), "argument --host: no such host"),
        ([], NotFoundError("none", param="tokenizer"), "argument --tokenizer: none"),
        ([], InvalidRequestError("small", param="kv_cache_memory_bytes"), "argument --kv-cache-memory-bytes: small"),
        ([], AdapterError("a: none", param="lora_modules"), "argument --lora-modules: a: none"),
        ([], InvalidRequestError("off", param="speculative_config.model"), "argument --speculative-config: off"),
        (["/m"], NotFoundError("model '/m': none", param="model"), "model '/m': none"),
        (["/m", "--tokenizer", "/t"], NotFoundError("model '/t'", param="model"), "argument --tokenizer: model '/t'"),
        (
            ["/m", "--speculative-config", '{"method": "draft_model", "model": "/d"}'],
            NotFoundError("model '/d'", param="model"),
            "argument --speculative-config: model '/d'",
        ),
        ([], InvalidRequestError("odd", param="hidden_size"), "odd"),
        ([], InvalidRequestError("odd"), "odd"),
    ],
)
def test_an_engines_refusal_is_one_line_with_the_option(capsys, monkeypatch, arguments, error, shown):
    from outrider.platform.http import server

    def refuse(args, config):
        raise error

    monkeypatch.setattr(server, "serve", refuse)
    assert main(["serve", *arguments]) == 1
    assert capsys.readouterr().err == f"outrider: error: {shown}\n"


def test_version(capsys):
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("outrider ")


def test_unknown_commands():
    with pytest.raises(SystemExit) as exit_:
        main(["fly"])
    assert exit_.value.code == 2


def test_formats_of_tools_and_reasoning():
    _, config = resolve("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--enable-auto-tool-choice")
    assert (config.tool_call_parser, config.reasoning_parser) == ("hermes", "qwen3")
    assert list(config.without_effect) == ["enable_auto_tool_choice"]
