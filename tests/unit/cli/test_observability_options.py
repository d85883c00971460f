"""Options of `outrider serve` about logs, metrics and traces."""

import importlib.util

import pytest

from outrider.platform.cli import serve
from outrider.platform.cli.main import build_parser
from outrider.platform.core.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    for name in ("OUTRIDER_API_KEY", "OUTRIDER_ADMIN_API_KEY", "OUTRIDER_DATABASE"):
        monkeypatch.delenv(name, raising=False)


def config(arguments):
    return serve.resolve(build_parser().parse_args(["serve", *arguments.split()]))[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ("text", False)),
        ("--log-format json", ("json", True)),
        ("--log-format json --no-log-requests", ("json", False)),
        ("--log-level info", ("text", True)),
        ("--log-level info --no-log-requests", ("text", False)),
        ("--log-requests", ("text", True)),
        ("--log-prompts", ("text", True)),
    ],
)
def test_request_lines_by_log_format_and_level(arguments, expected):
    options = config(arguments)
    assert (options.log_format, options.log_requests) == expected
    assert options.log_prompts == ("--log-prompts" in arguments)


def test_tracing_access_log_and_metrics_options():
    options = config("--otlp-endpoint http://c:4318 --open-metrics --access-log --metrics-prefix vllm")
    assert (options.otlp_endpoint, options.open_metrics, options.access_log) == ("http://c:4318", True, True)
    assert (config("").otlp_endpoint, config("").open_metrics) == (None, False)
    assert (options.metrics_prefix, config("").metrics_prefix) == ("vllm", "outrider")


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ("--log-prompts --no-log-requests", "log_prompts", "--no-log-requests"),
        ("--otlp-endpoint http://c", "otlp_endpoint", "outrider[tracing]"),
        ("--log-format json", "log_format", "outrider[serve]"),
    ],
)
def test_impossible_combinations_are_refused(arguments, param, words, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequestError) as refused:
        config(arguments)
    assert refused.value.param == param
    assert words in refused.value.message
