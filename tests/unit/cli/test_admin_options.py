"""`--database` of `outrider serve`."""

import sys

import pytest

from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser, main
from outrider.platform.core.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def _nothing_in_the_environment(monkeypatch):
    for name in ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE"):
        monkeypatch.delenv(name, raising=False)


def config(*arguments: str):
    return serve.resolve(build_parser().parse_args(["serve", *arguments]))[1]


def test_without_a_database_option():
    assert config().database is None


def test_from_the_option_or_the_environment(monkeypatch):
    monkeypatch.setenv("OUTRIDER_DATABASE", "sqlite:///a.db")
    assert config().database == "sqlite:///a.db"
    assert config("--database", "sqlite:///b.db").database == "sqlite:///b.db"


def test_keys_are_those_of_the_database(monkeypatch):
    """A client's variable in the same shell means nothing to the server; an operator's key may be given too."""
    monkeypatch.setenv("OUTRIDER_API_KEY", "mine")
    options = config("--database", "sqlite:///a.db", "--admin-api-key", "operator")
    assert (options.api_keys, options.admin_api_keys) == ((), ("operator",))
    with pytest.raises(InvalidRequestError, match="--database") as refused:
        config("--database", "sqlite:///a.db", "--api-key", "x")
    assert refused.value.param == "api_key"


@pytest.mark.parametrize("address", ["secret", "mysql://u:secret@h/d", "sqlite://"])
def test_addresses_are_checked_before_the_model_is_loaded(address, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["serve", "--database", address])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "argument --database: " in error
    assert "secret" not in error


def test_without_the_libraries(monkeypatch):
    monkeypatch.setitem(sys.modules, "outrider.platform.tenancy.database.connection", None)
    with pytest.raises(InvalidRequestError, match=r"pip install 'outrider\[serve\]'"):
        config("--database", "sqlite:///a.db")


def test_options_do_not_show_the_password():
    options = config("--database", "postgresql://u:secret@h/d")
    assert options.database == "postgresql://u:secret@h/d"
    assert "secret" not in repr(options)
