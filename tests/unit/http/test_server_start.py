"""Start of a server around the application: the address, the summary."""

import asyncio
import dataclasses
import io
import socket

import pytest
from rich.console import Console

from outrider.platform.core.errors import AdapterSourceError, InvalidRequestError
from outrider.platform.core.messages import AdapterInfo
from outrider.platform.http.adapters.start_adapters import load_adapters
from outrider.platform.http.observe.startup_summary import (
    DatabaseFacts,
    Startup,
    address,
    format_count,
    print_summary,
    reachable_address,
)
from outrider.platform.http.server import bind
from outrider.platform.http.server_config import ServerConfig


def test_two_servers_cannot_have_one_port():
    with bind("127.0.0.1", 0) as holder, pytest.raises(InvalidRequestError, match="in use") as refused:
        bind("127.0.0.1", holder.getsockname()[1])
    assert refused.value.param == "port"


def test_an_address_in_use_is_found_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidRequestError) as refused:
        bind("127.0.0.1", taken.getsockname()[1])
    assert refused.value.param == "port"


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "x" * 100])
def test_addresses_that_do_not_exist(host):
    with pytest.raises(InvalidRequestError, match=f"cannot listen on {host}") as refused:
        bind(host, 0)
    assert refused.value.param == "host"


def summary(info, adapters=(), **config) -> str:
    out = io.StringIO()
    startup = Startup(info, list(adapters), ServerConfig(**config), 8123, 4.2)
    print_summary(startup, Console(file=out, width=120, soft_wrap=True))
    return out.getvalue()


def test_summary(llm):
    text = summary(llm.info, [AdapterInfo("sql", "/p", "d", 16, 16, "device")], served_model_names=("base",))
    for part in (
        "base  (/models/base)", "(native), 1.2 M parameters, float32 on cpu", "100 blocks of 16 tokens = 1,600 tokens",
        "sql (rank 16)", "ngram, 3 drafts a step", "http://127.0.0.1:8123/v1", "no API key",
        "Console      http://127.0.0.1:8123/console", '"model": "sql"',
    ):  # fmt: skip
        assert part in text, part
    assert text.splitlines()[-1] == "Outrider is ready on http://127.0.0.1:8123 (started in 4.2 s)"


def test_summary_lists_products_that_use_tiles(llm):
    assert "AMX tiles" not in summary(llm.info)
    info = dataclasses.replace(llm.info, tiles="not used: products of bfloat16 are wrong")
    assert "AMX tiles    not used: products of bfloat16 are wrong" in summary(info)


def test_summary_has_the_sampling_defaults(llm):
    out = io.StringIO()
    startup = Startup(llm.info, [], ServerConfig(), 8123, 4.2, sampling_defaults={"temperature": 0.7, "top_k": 20})
    print_summary(startup, Console(file=out, width=120, soft_wrap=True))
    assert "temperature 0.7, top_k 20 unless a request says otherwise (generation_config.json)" in out.getvalue()
    assert "Sampling" not in summary(llm.info)


def test_summary_never_shows_a_key(llm):
    text = summary(llm.info, api_keys=("secret-1", "secret-2"))
    assert "2 API keys" in text
    assert "secret" not in text
    assert "Bearer $OUTRIDER_API_KEY" in text


@pytest.mark.parametrize("has_admin_key", [True, False])
@pytest.mark.parametrize(
    ("database", "export"),
    [
        ("sqlite:////a b/x.db", "OUTRIDER_DATABASE='sqlite:////a b/x.db'"),
        ("postgresql+psycopg://u:***@h/d", "OUTRIDER_DATABASE=...  #"),
    ],
)
def test_summary_with_a_database(llm, database, export, has_admin_key):
    out = io.StringIO()
    startup = Startup(llm.info, [], ServerConfig(), 8123, 4.2, DatabaseFacts(database, has_admin_key))
    print_summary(startup, Console(file=out, width=120, soft_wrap=True))
    text = out.getvalue()
    assert database in text
    assert "(keys of the database)" in text
    assert "Bearer $OUTRIDER_API_KEY" in text
    assert (export in text) == (not has_admin_key)
    assert ("outrider admin key create --tenant operators --scope admin" in text) == (not has_admin_key)


def test_summary_without_adapters(llm):
    assert "none yet; room for 4 of rank 16" in summary(llm.info)


def test_names_in_brackets_are_no_markup(llm):
    assert "[red]x[/red]" in summary(llm.info, served_model_names=("[red]x[/red]",))


@pytest.mark.parametrize(("number", "text"), [(7, "7"), (1500, "1.5 K"), (3_500_000, "3.5 M"), (7 * 10**9, "7.0 B")])
def test_counts(number, text):
    assert format_count(number) == text


def test_addresses():
    assert address("::1", 80) == "http://[::1]:80"
    assert reachable_address("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert reachable_address("example.org", 80) == "http://example.org:80"


def test_an_adapter_that_cannot_be_loaded_is_named_without_its_password():
    class Models:
        async def fetch(self, request):
            raise AdapterSourceError("cannot be reached", param="lora_path")

    config = ServerConfig(lora_modules={"mine": "https://me:s3cret@host/mine?token=hidden"})
    with pytest.raises(AdapterSourceError) as caught:
        asyncio.run(load_adapters(Models(), config))
    assert caught.value.message == "mine=https://host/mine: cannot be reached"
