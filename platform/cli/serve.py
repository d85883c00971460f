"""`outrider serve`: its options, and the start of the server."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..client.kernel_configs import use_kernel_configs
from ..client.text.chat_template import TAKEN_VARIABLES
from ..core.config import EngineArgs
from ..core.errors import InvalidRequestError, OutriderError
from ..core.option import declared_options
from ..http.server_config import ServerConfig
from .options.adapter_options import LoraModule, adapter_sources, enable_lora, lora_modules
from .options.api_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, given_keys
from .options.database_option import given_database
from .options.engine_options import add_engine_options, given_options, resolve_engine
from .options.field_flags import flag
from .options.model_names import ModelNames, names_of_model
from .options.parser import CONFIG_FLAG, Parser
from .options.server_options import add_server_options
from .options.vllm_flags import add_vllm_flags, flags_without_effect

_EPILOG = """\
examples:
  outrider serve                                       the embedded demo model, its adapters and its draft model
  outrider serve Qwen/Qwen3-0.6B --enable-lora --lora-modules sql=/adapters/sql
  outrider serve ./model --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
  outrider serve --config options.yaml

vLLM's names of options are accepted too if they mean the same, and underscores for dashes.
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "serve",
        usage="outrider serve [MODEL] [options]",
        allow_abbrev=False,
        help="serve a model over HTTP",
        description="Serve a model and its LoRA adapters over an OpenAI-compatible HTTP API.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model(parser)
    add_options(parser)
    parser.set_defaults(run=run)


def add_model(parser: Parser) -> None:
    """Add the model, as an argument and as an option."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="HF directory or hub id (default: the embedded demo model)"
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as the argument")


def add_options(parser: Parser) -> None:
    """Add the options of the server and of its engine, but for the model."""
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE", help="YAML file of options by their names; those on the command line come first"
    )
    add_server_options(parser)
    add_engine_options(parser)
    add_vllm_flags(parser)


def run(namespace: argparse.Namespace) -> int:
    """Serve until a signal stops the server; returns the exit status."""
    from ..http.server import serve

    return run_with(namespace, serve)


def run_with(namespace: argparse.Namespace, work: Callable[[EngineArgs, ServerConfig], int]) -> int:
    """Call `work` with the options; errors name the flag."""
    try:
        args, config = resolve(namespace)
        use_kernel_configs(namespace.kernel_configs)
    except InvalidRequestError as error:
        namespace.parser.error(f"argument {flag(error.param or 'model')}: {error.message}")
    try:
        return work(args, config)
    except OutriderError as error:
        option = _find_option(error, args)
        if option is None:
            raise
        raise OutriderError(f"argument {flag(option)}: {error.message}", param=error.param) from error


def _find_option(error: OutriderError, args: EngineArgs) -> str | None:
    """The option that caused an error at the start of the engine, if any."""
    param = (error.param or "").partition(".")[0].partition("[")[0]
    if param == "model":  # other folders are read by the same functions
        draft = (args.speculative_config or {}).get("model")
        for option, path in (("tokenizer", args.tokenizer), ("speculative_config", draft)):
            if isinstance(path, str) and path != args.model and path in error.message:
                return option
        return None  # MODEL has no flag
    own = {"host", "port", "database", "journal", "batch_dir", "lora_modules", "lora_resolver"}
    known = {field.name for field in dataclasses.fields(EngineArgs)} | own
    return param if param in known else None


def resolve(namespace: argparse.Namespace) -> tuple[EngineArgs, ServerConfig]:
    """Options of the engine and the server, with the demo model's defaults filled in.

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    given = given_options(namespace)
    ignored = flags_without_effect(namespace, given.get("speculative_config"))
    if namespace.model is None:
        namespace.model = namespace.model_flag
    elif namespace.model_flag not in (None, namespace.model):
        ignored["model"] = f"the argument {namespace.model} comes first"
    modules = lora_modules(namespace)
    enable_lora(namespace, given)
    args, demo_adapters = resolve_engine(namespace, namespace.model, given)
    names = _model_names(namespace, args.model)
    args.served_model_name = names.shown[0]
    if not modules:
        modules = {name: LoraModule(name, str(path)) for name, path in demo_adapters.items()}
    clash = sorted({*names.shown, *names.aliases} & set(modules))
    if clash:
        raise InvalidRequestError(f"{clash[0]!r} is the model's own name", param="lora_modules")
    config = _server_config(namespace, names, modules)
    demo_folders = {str(path.parent): None for path in demo_adapters.values()}
    return args, dataclasses.replace(config, lora_roots=(*config.lora_roots, *demo_folders), without_effect=ignored)


def _model_names(namespace: argparse.Namespace, model: str | None) -> ModelNames:
    from ...models.demo import DEMO_MODEL_NAME

    if namespace.served_model_name:
        return ModelNames(tuple(namespace.served_model_name))
    return ModelNames((DEMO_MODEL_NAME,)) if model is None else names_of_model(model)


def _chat_template(text: str | None) -> str | None:
    """The template in the file `text`; `text` itself when it has braces."""
    if text is None or "{" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(f"cannot read the file: {error}", param="chat_template") from error


def _template_variables(given: dict[str, Any]) -> dict[str, Any]:
    taken = sorted(TAKEN_VARIABLES & set(given))
    if taken:
        raise InvalidRequestError(f"must not contain {taken[0]!r}", param="default_chat_template_kwargs")
    return given


def _log_requests(wanted: bool | None, config: ServerConfig) -> bool:
    """True when each request gets a line in the log; None is the default for the other options.

    Raises:
        InvalidRequestError: --log-prompts without those lines.
    """
    if wanted is None:
        return config.log_format == "json" or config.log_level in ("debug", "info") or config.log_prompts
    if config.log_prompts and not wanted:
        raise InvalidRequestError("needs the lines that --no-log-requests turns off", param="log_prompts")
    return wanted


def _check_installed(config: ServerConfig) -> None:
    """Refuse an option whose package is not installed."""
    for option, is_wanted, package, extra in (
        ("otlp_endpoint", config.otlp_endpoint is not None, "opentelemetry.sdk", "tracing"),
        ("log_format", config.log_format == "json", "pythonjsonlogger", "serve"),
    ):
        try:
            found = not is_wanted or importlib.util.find_spec(package) is not None
        except ModuleNotFoundError:  # of the package around it
            found = False
        if not found:
            raise InvalidRequestError(f"needs pip install 'outrider[{extra}]'", param=option)


def _server_config(namespace: argparse.Namespace, names: ModelNames, modules: Mapping[str, LoraModule]) -> ServerConfig:
    """The options of the server: fields of `ServerConfig`, and those of the table in `server_options`."""
    declared = declared_options(ServerConfig)
    given = ServerConfig(**{name: getattr(namespace, name) for name in declared if hasattr(namespace, name)})
    _check_installed(given)
    database = given_database(namespace)
    if database is not None and namespace.api_key:
        raise InvalidRequestError(
            "not allowed together with --database, whose keys are those of its tenants", param="api_key"
        )
    if given.shared_limits and database is None:
        raise InvalidRequestError("needs --database, in which servers count together", param="shared_limits")
    return dataclasses.replace(
        given,
        api_keys=given_keys(namespace.api_key, API_KEY_VARIABLE, "api_key") if database is None else (),
        admin_api_keys=given_keys(namespace.admin_api_key, ADMIN_API_KEY_VARIABLE, "admin_api_key"),
        database=database,
        journal=given.journal or None,
        served_model_names=names.shown,
        model_aliases=names.aliases,
        lora_modules={name: module.path for name, module in modules.items()},
        lora_draft_paths={name: module.draft_path for name, module in modules.items() if module.draft_path},
        lora_sources=adapter_sources(namespace),
        lora_roots=namespace.lora_root,
        lora_remote=namespace.lora_remote or (),
        chat_template=_chat_template(namespace.chat_template),
        chat_template_kwargs=_template_variables(namespace.default_chat_template_kwargs),
        cors_origins=namespace.cors_origin,
        log_requests=_log_requests(namespace.log_requests, given),
    )
