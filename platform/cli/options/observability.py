"""Options of `outrider serve` for logs, metrics and traces."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ...core.errors import InvalidRequestError
from ...core.logs import FORMATS
from ...http.server_config import ServerConfig


def add_observability_options(parser: argparse.ArgumentParser) -> None:
    """Add the options, in a group of their own."""
    group, defaults = parser.add_argument_group("observability"), ServerConfig()
    group.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=defaults.log_level,
        help="(default: %(default)s)",
    )
    group.add_argument(
        "--log-format",
        choices=FORMATS,
        default=defaults.log_format,
        help="lines for people, or one JSON object a line, of both processes, on standard error (default: %(default)s)",
    )
    group.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        help="one line for each request: ids, tenant, key, adapter, counts, times, status; never a prompt "
        "(default: with --log-format json, and from --log-level info on)",
    )
    group.add_argument(
        "--log-prompts", action="store_true", help="also write prompts and answers into those lines (default: never)"
    )
    group.add_argument(
        "--uvicorn-log-level",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
        help="of the web server alone (default: --log-level)",
    )
    group.add_argument("--access-log", action="store_true", help="one line for each request as web servers write it")
    group.add_argument(
        "--open-metrics",
        action="store_true",
        help="with --database, show /metrics to everybody: tenants' names are in it (default: with an admin's key)",
    )
    group.add_argument(
        "--otlp-endpoint",
        metavar="URL",
        help="send a trace of each request to this OpenTelemetry collector, such as http://localhost:4318; "
        "needs pip install 'outrider[tracing]' (default: none)",
    )


def observability(namespace: argparse.Namespace) -> dict[str, Any]:
    """Fields of `ServerConfig` that these flags set.

    Raises:
        InvalidRequestError: a package that one of them needs is missing.
    """
    requests = namespace.log_requests
    if requests is None:
        requests = namespace.log_format == "json" or namespace.log_level in ("debug", "info") or namespace.log_prompts
    if namespace.log_prompts and not requests:
        raise InvalidRequestError("needs the lines that --no-log-requests turns off", param="log_prompts")
    for option, wanted, package, extra in (
        ("otlp_endpoint", namespace.otlp_endpoint is not None, "opentelemetry.sdk", "tracing"),
        ("log_format", namespace.log_format == "json", "pythonjsonlogger", "serve"),
    ):
        if wanted and not _is_installed(package):
            raise InvalidRequestError(f"needs pip install 'outrider[{extra}]'", param=option)
    return {
        "log_level": namespace.log_level,
        "log_format": namespace.log_format,
        "log_requests": requests,
        "log_prompts": namespace.log_prompts,
        "uvicorn_log_level": namespace.uvicorn_log_level,
        "access_log": namespace.access_log,
        "open_metrics": namespace.open_metrics,
        "otlp_endpoint": namespace.otlp_endpoint,
    }


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
