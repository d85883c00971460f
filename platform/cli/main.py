"""Entry point of the command `outrider`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from ... import __version__
from ..core.errors import OutriderError


def build_parser() -> argparse.ArgumentParser:
    """Parser of all commands. A parsed namespace has `run`, which takes the namespace and returns the exit status."""
    # Imported here, so that an interrupt in the first second is one line, too.
    from . import deploy, run_batch, serve, train_draft
    from .admin import admin_command as admin
    from .bench import bench_command as bench
    from .chat import chat_command as chat
    from .options.parser import Parser

    parser = Parser(prog="outrider", description="Speculative decoding and multi-tenant LoRA serving that compose.")
    parser.add_argument("--version", action="version", version=f"outrider {__version__}")
    parser.set_defaults(run=_show_help)
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve.add_parser(commands)
    deploy.add_parser(commands)
    run_batch.add_parser(commands)
    chat.add_parser(commands)
    admin.add_parser(commands)
    bench.add_parser(commands)
    train_draft.add_parser(commands)
    version = commands.add_parser("version", help="show the version")
    version.set_defaults(run=_show_version)
    return parser


def _show_help(namespace: argparse.Namespace) -> int:
    namespace.parser.print_help()
    return 0


def _show_version(namespace: argparse.Namespace) -> int:
    print(f"outrider {__version__}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 0 well, 1 a typed error (one line on stderr), 2 wrong usage."""
    try:
        namespace = build_parser().parse_args(arguments)
        return int(namespace.run(namespace))
    except OutriderError as error:
        print(f"outrider: error: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The interpreter flushes standard output at its end, and needs a file that takes the rest.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("outrider: error: the reader of the output is gone", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("outrider: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
