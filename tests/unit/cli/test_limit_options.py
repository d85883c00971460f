"""Options that bound the cost of clients and faults."""

import pytest

from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser
from outrider.platform.http.server_config import ServerConfig

NAMES = ("max_connections", "client_timeout", "max_body_bytes", "strict_fields", "engine_hang_timeout", "cors_origins")


def parse(*arguments: str) -> ServerConfig:
    return serve.resolve(build_parser().parse_args(["serve", *arguments]))[1]


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch):
    for name in ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE"):
        monkeypatch.delenv(name, raising=False)


def test_defaults_are_those_of_the_server():
    config, defaults = parse(), ServerConfig()
    for name in NAMES:
        assert getattr(config, name) == getattr(defaults, name), name


def test_all_reach_the_server():
    config = parse(
        *("--max-connections", "7", "--client-timeout", "0.5", "--max-body-bytes", "1000"),
        *("--engine-hang-timeout", "0", "--cors-origin", "https://a.example", "--cors-origin", "http://localhost:3000"),
        "--strict-fields",
    )
    assert (config.max_connections, config.client_timeout, config.max_body_bytes) == (7, 0.5, 1000)
    assert config.engine_hang_timeout == 0
    assert config.strict_fields
    assert config.cors_origins == ("https://a.example", "http://localhost:3000")


@pytest.mark.parametrize("origin", ["*", "https://example.com", "http://[::1]:8080", "chrome-extension://abc"])
def test_origins(origin):
    assert parse("--cors-origin", origin).cors_origins == (origin,)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max-connections", "0"),
        ("max-connections", "-1"),
        ("max-connections", "many"),
        ("max-body-bytes", "0"),
        ("client-timeout", "0"),
        ("client-timeout", "inf"),
        ("client-timeout", "nan"),
        ("engine-hang-timeout", "-1"),
        ("cors-origin", ""),
        ("cors-origin", "example.com"),
        ("cors-origin", "https://example.com/"),
        ("cors-origin", "https://*.example.com"),
    ],
)
def test_bad_values_are_named(capsys, option, value):
    with pytest.raises(SystemExit):
        parse(f"--{option}={value}")
    assert f"argument --{option}: must be" in capsys.readouterr().err
