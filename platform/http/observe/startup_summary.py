"""Summary that the server prints when it has started."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .... import __version__
from ...core.messages import AdapterInfo, EngineInfo
from ..server_config import ServerConfig


class DatabaseFacts(NamedTuple):
    """Facts about the database of tenants and keys."""

    address: str
    """Address without the password."""
    has_admin_key: bool
    """True if the server can be administered over HTTP."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Facts about a server that has just started."""

    info: EngineInfo
    adapters: Sequence[AdapterInfo]
    config: ServerConfig
    port: int
    """Port in use, also if 0 was requested."""
    seconds: float
    """Seconds from the command to now."""
    database: DatabaseFacts | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters of requests that leave them out."""


def address(host: str, port: int) -> str:
    """The server's URL."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def reachable_address(host: str, port: int) -> str:
    """A URL that works on this machine: a server that listens everywhere is not called 0.0.0.0."""
    return address({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def format_count(number: int) -> str:
    """1234567 -> "1.2 M"."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.1f} {unit}"
    return str(number)


def print_summary(startup: Startup, console: Console | None = None) -> None:
    """Print the summary, an example, and last the line that says the server is ready."""
    console = console or Console(soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(startup):
        table.add_row(name, Text(text))
    example = Text("\n" + _example(startup), style="dim")
    console.print(Panel(Group(table), title=f"Outrider {__version__}", title_align="left", expand=False))
    console.print(example)
    if startup.database is not None and not startup.database.has_admin_key:
        console.print(Text("\n" + _first_steps(startup.database)))
    url = address(startup.config.host, startup.port)
    console.print(Text(f"\nOutrider is ready on {url} (started in {startup.seconds:.1f} s)", style="bold green"))
    console.file.flush()


def _weights(info: EngineInfo) -> str:
    """Form of quantised weights, and their memory."""
    bits = 8 * info.weight_bytes / max(1, info.num_parameters)
    return f"{info.quantization}, {format_count(info.weight_bytes)}B, {bits:.2f} bits a weight"


def _rows(startup: Startup) -> list[tuple[str, str]]:
    info, config = startup.info, startup.config
    tokens, parameters = info.num_kv_blocks * info.block_size, format_count(info.num_parameters)
    short = "" if info.kv_cache_dtype == "auto" else f" in {info.kv_cache_dtype}"
    if info.enable_lora:
        names = ", ".join(f"{adapter.name} (rank {adapter.rank})" for adapter in startup.adapters)
        adapters = names or f"none yet; room for {info.max_loras} of rank {info.max_lora_rank}"
        adapters += "".join(f"; by name from {path}" for path in config.lora_sources.directories)
    else:
        adapters = "off"
    if startup.database is not None:
        guarded = "keys of the database"
    elif config.api_keys:
        guarded = f"{len(config.api_keys)} API key{'s' if len(config.api_keys) > 1 else ''}"
    else:
        guarded = "open: no API key"
    database = [("Database", startup.database.address)] if startup.database is not None else []
    sampling = ", ".join(f"{name} {value}" for name, value in startup.sampling_defaults.items())
    sampling_row = [("Sampling", f"{sampling} unless a request says otherwise (generation_config.json)")]
    return [
        ("Model", f"{', '.join(config.served_model_names)}  ({info.model})"),
        ("", f"{info.architecture} ({info.model_impl}), {parameters} parameters, {info.dtype} on {info.device}"),
        *([("Weights", _weights(info))] if info.quantization else []),
        *([("AMX tiles", info.tiles)] if info.tiles else []),
        ("Context", f"{info.max_model_len:,} tokens"),
        ("KV cache", f"{info.num_kv_blocks:,} blocks of {info.block_size} tokens = {tokens:,} tokens{short}"),
        ("Adapters", adapters),
        ("Speculation", info.speculation),
        *(sampling_row if sampling else []),
        *database,
        ("Address", f"{address(config.host, startup.port)}/v1  ({guarded})"),
        ("Console", f"{reachable_address(config.host, startup.port)}/console"),
    ]


def _example(startup: Startup) -> str:
    model = startup.adapters[0].name if startup.adapters else startup.config.served_model_names[0]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]})
    route = "/v1/chat/completions"
    if not startup.info.has_tokenizer:
        route = "/v1/completions"
        body = json.dumps({"model": model, "prompt": [1, 2, 3], "return_token_ids": True})
    key = ' -H "Authorization: Bearer $OUTRIDER_API_KEY"' if startup.config.api_keys or startup.database else ""
    url = reachable_address(startup.config.host, startup.port)
    example = f"Try it:  curl {url}{route} -H 'Content-Type: application/json'{key} -d '{body}'"
    return f"{example}\nor:      outrider chat --url {url}" if startup.info.has_tokenizer else example


def _first_steps(database: DatabaseFacts) -> str:
    """First steps with a database without keys."""
    hidden = "***" in database.address
    where = "...  # as the server has it, with the password" if hidden else shlex.quote(database.address)
    return (
        "No key may administer this server yet. These commands make a tenant, a key for its requests and one for you:\n"
        f"  export OUTRIDER_DATABASE={where}\n"
        "  outrider admin tenant create my-team\n"
        "  outrider admin key create --tenant my-team\n"
        "  outrider admin tenant create operators\n"
        "  outrider admin key create --tenant operators --scope admin"
    )
