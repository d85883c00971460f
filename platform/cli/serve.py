"""`outrider serve`: its options, and the start of the server."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ..client.text.chat_template import TAKEN_VARIABLES
from ..core.config import EngineArgs, check_args
from ..core.errors import InvalidRequestError, OutriderError
from ..core.speculative_config import parse_speculative
from ..http.server_config import ServerConfig
from .options.adapters import LoraModule, adapter_sources, add_adapter_options, enable_lora, lora_modules
from .options.api_keys import ADMIN_API_KEY_VARIABLE, API_KEY_VARIABLE, given_keys, key
from .options.engine import add_engine_options, flag, given_options, json_object
from .options.kernel_configs import add_kernel_configs_option, use_kernel_configs
from .options.limits import add_limit_options, limits, seconds_above
from .options.model_names import ModelNames, names_of_model
from .options.observability import add_observability_options, observability
from .options.parser import CONFIG_FLAG, Parser
from .options.tenancy import add_tenancy_options, given_database, journal_options
from .options.vllm_flags import add_vllm_flags, flags_without_effect

_EPILOG = """\
examples:
  outrider serve                                       the embedded demo model, its adapters and its draft model
  outrider serve Qwen/Qwen3-0.6B --enable-lora --lora-modules sql=/adapters/sql
  outrider serve ./model --speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'
  outrider serve --config options.yaml

vLLM's names of options are taken too, where they mean the same, and underscores for dashes.
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
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="HF directory or hub id (default: the embedded demo model)"
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same as the argument")
    parser.add_argument(
        CONFIG_FLAG, metavar="FILE", help="YAML file of options by their names; those on the command line come first"
    )
    _add_server_options(parser)
    add_tenancy_options(parser)
    add_limit_options(parser)
    add_observability_options(parser)
    add_adapter_options(parser)
    groups = add_engine_options(parser)
    groups["speculative decoding"].add_argument(
        "--no-speculation", action="store_true", help='the same as --speculative-config \'{"method": "off"}\''
    )
    add_kernel_configs_option(groups["model"])
    add_vllm_flags(parser)
    parser.set_defaults(run=run)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    defaults = ServerConfig()
    group = parser.add_argument_group("server")
    group.add_argument("--host", default=defaults.host, help="address to listen on (default: %(default)s)")
    group.add_argument(
        "--port",
        type=_port,
        default=defaults.port,
        metavar="N",
        help="port; 0 chooses a free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        type=key,
        action="append",
        metavar="KEY",
        help="key that clients must send; may be repeated; not with --database "
        f"(default: the variable {API_KEY_VARIABLE}, else open)",
    )
    group.add_argument(
        "--admin-api-key",
        type=key,
        action="append",
        metavar="KEY",
        help="key that alone may load, unload and pin adapters; may be repeated "
        f"(default: the variable {ADMIN_API_KEY_VARIABLE}, else every client may)",
    )
    group.add_argument(
        "--served-model-name",
        type=_not_empty,
        nargs="+",
        metavar="NAME",
        help="names of the model in the API, and no others (default: the last part of MODEL; requests may also use "
        "MODEL as it is given here, its path and its hub id)",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="Jinja template that takes the place of the model's; also the template itself",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="variables of the chat template that requests leave out of their chat_template_kwargs, such as "
        '{"enable_thinking": false}',
    )
    group.add_argument(
        "--trust-request-chat-template",
        action="store_true",
        help="accept chat_template in requests: templates can loop",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=seconds_above(-1.0),
        default=defaults.shutdown_timeout,
        metavar="X",
        help="seconds that running requests get after SIGTERM (default: %(default)s)",
    )


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 65535, got {text!r}")
    return int(text)


def _not_empty(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def run(namespace: argparse.Namespace) -> int:
    """Serve until a signal stops the server; returns the exit status."""
    try:
        args, config = resolve(namespace)
        use_kernel_configs(namespace)
    except InvalidRequestError as error:
        namespace.parser.error(f"argument {flag(error.param or 'model')}: {error.message}")
    from ..http.server import serve

    try:
        return serve(args, config)
    except OutriderError as error:
        option = _option_of(error, args)
        if option is None:
            raise
        raise OutriderError(f"argument {flag(option)}: {error.message}", param=error.param) from error


def _option_of(error: OutriderError, args: EngineArgs) -> str | None:
    """The option that caused an error at the start of the engine, if any."""
    param = (error.param or "").partition(".")[0].partition("[")[0]
    if param == "model":  # other folders are read by the same functions
        draft = (args.speculative_config or {}).get("model")
        for option, path in (("tokenizer", args.tokenizer), ("speculative_config", draft)):
            if isinstance(path, str) and path != args.model and path in error.message:
                return option
        return None  # MODEL has no flag
    own = {"host", "port", "database", "journal", "lora_modules", "lora_resolver"}
    known = {field.name for field in dataclasses.fields(EngineArgs)} | own
    return param if param in known else None


def resolve(namespace: argparse.Namespace) -> tuple[EngineArgs, ServerConfig]:
    """Options of the engine and the server, with the demo model's defaults filled in.

    Raises:
        InvalidRequestError: an option is wrong whatever the model; `param` names it.
    """
    from ..client.demo_defaults import apply_demo_defaults, is_demo

    given = given_options(namespace)
    ignored = flags_without_effect(namespace, given.get("speculative_config"))
    if namespace.model is None:
        namespace.model = namespace.model_flag
    elif namespace.model_flag not in (None, namespace.model):
        ignored["model"] = f"the argument {namespace.model} comes first"
    if namespace.no_speculation:
        if given.get("speculative_config") is not None:
            raise InvalidRequestError("not allowed together with --speculative-config", param="no_speculation")
        given["speculative_config"] = {"method": "off"}
    modules = lora_modules(namespace)
    enable_lora(namespace, given)
    args = EngineArgs(model=namespace.model, **given)
    names = _model_names(namespace, args, is_demo(args))
    args.served_model_name = names.shown[0]
    args, demo_adapters = apply_demo_defaults(args, explicit=given)
    check_args(args)
    parse_speculative(args.speculative_config)
    if not modules:
        modules = {name: LoraModule(name, str(path)) for name, path in demo_adapters.items()}
    clash = sorted({*names.shown, *names.aliases} & set(modules))
    if clash:
        raise InvalidRequestError(f"{clash[0]!r} is the model's own name", param="lora_modules")
    demo_folders = tuple({str(path.parent): None for path in demo_adapters.values()})
    config = _server_config(namespace, names, modules, demo_folders)
    return args, dataclasses.replace(config, without_effect=ignored)


def _model_names(namespace: argparse.Namespace, args: EngineArgs, demo: bool) -> ModelNames:
    from ...models.demo import DEMO_MODEL_NAME

    if namespace.served_model_name:
        return ModelNames(tuple(namespace.served_model_name))
    return ModelNames((DEMO_MODEL_NAME,)) if demo else names_of_model(str(args.model))


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


def _server_config(
    namespace: argparse.Namespace,
    names: ModelNames,
    modules: dict[str, LoraModule],
    demo_folders: tuple[str, ...],
) -> ServerConfig:
    sources = adapter_sources(namespace)
    database = given_database(namespace)
    if database is not None and namespace.api_key:
        raise InvalidRequestError(
            "not allowed together with --database, whose keys are those of its tenants", param="api_key"
        )
    return ServerConfig(
        host=namespace.host,
        port=namespace.port,
        api_keys=given_keys(namespace.api_key, API_KEY_VARIABLE, "api_key") if database is None else (),
        admin_api_keys=given_keys(namespace.admin_api_key, ADMIN_API_KEY_VARIABLE, "admin_api_key"),
        database=database,
        **journal_options(namespace),
        served_model_names=names.shown,
        model_aliases=names.aliases,
        lora_modules={name: module.path for name, module in modules.items()},
        lora_draft_paths={name: module.draft_path for name, module in modules.items() if module.draft_path},
        lora_sources=sources,
        lora_roots=(*(namespace.lora_root or ()), *demo_folders),
        lora_remote=tuple(namespace.lora_remote or ()),
        chat_template=_chat_template(namespace.chat_template),
        chat_template_kwargs=_template_variables(namespace.default_chat_template_kwargs),
        trust_request_chat_template=namespace.trust_request_chat_template,
        shutdown_timeout=namespace.shutdown_timeout,
        **observability(namespace),
        **limits(namespace),
    )
