"""`outrider run-batch`: answers the requests of a file."""

from __future__ import annotations

import argparse
from functools import partial

from . import serve
from .options.option_types import positive
from .options.parser import Parser

_EPILOG = """\
Each line of the input is a request as in OpenAI's batch files:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "sql", "messages": [...]}}
Each has a line in the output, with its answer or its error, as soon as it is there.

exit status: 0 when all requests were answered, 1 when some were not
"""


def add_parser(commands: argparse._SubParsersAction[Parser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "run-batch",
        usage="outrider run-batch -i FILE -o FILE [--model MODEL] [options of serve]",
        allow_abbrev=False,
        help="answer the requests of a file",
        description="Answer the requests of a file as the server would, without a server.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one a line (JSON)")
    parser.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="answers; an old file is overwritten"
    )
    parser.add_argument(
        "--max-concurrency",
        type=positive,
        metavar="N",
        help="most requests that are answered at once (default: as many as run at once)",
    )
    parser.add_argument(
        "--model", dest="model_flag", metavar="MODEL", help="HF directory or hub id (default: the demo)"
    )
    serve.add_options(parser)
    parser.set_defaults(run=run, model=None)


def run(namespace: argparse.Namespace) -> int:
    """Answer all requests; returns the exit status."""
    from ..http.batch import BatchFiles, run_batch

    files = BatchFiles(namespace.input_file, namespace.output_file, namespace.max_concurrency)
    return serve.run_with(namespace, partial(run_batch, files))
