"""`--config FILE`: options of a command in a YAML file, whose keys are the names of flags."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.text import did_you_mean, shorten

if TYPE_CHECKING:
    from .parser import Parser

_FLAG = "--config"


def with_config_file(parser: Parser, arguments: Sequence[str]) -> list[str]:
    """Add the options of the file that `arguments` name. Options that are among `arguments` win."""
    rest, file = _without_file(arguments)
    if file is None:
        return rest
    end = rest.index("--") if "--" in rest else len(rest)
    given = {id(parser.find_action(text.partition("=")[0])) for text in rest[:end] if text.startswith("-")}
    added: list[str] = []
    for key, value in _read(parser, file).items():
        flag = parser.in_own_spelling(f"--{key}")
        action = parser.find_action(flag)
        if action is None or flag == _FLAG:
            hint = did_you_mean(key, [known.removeprefix("--") for known in parser.flags])
            parser.error(f"argument {_FLAG}: {file}: there is no option {shorten(key)!r}{hint}")
        if id(action) not in given:
            added += _arguments(parser, flag, value)
    return [*rest[:end], *added, *rest[end:]]


def _without_file(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    rest: list[str] = []
    file = None
    remaining = iter(arguments)
    for text in remaining:
        if text == "--":
            return [*rest, text, *remaining], file
        flag, sign, value = text.partition("=")
        if flag != _FLAG:
            rest.append(text)
            continue
        file = value if sign else next(remaining, None)
        if file is None:
            return [*rest, text], None  # argparse says that a value is missing
    return rest, file


def _read(parser: Parser, file: str) -> Mapping[str, Any]:
    import yaml

    try:
        options = yaml.safe_load(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        parser.error(f"argument {_FLAG}: cannot read the file: {error}")
    except yaml.YAMLError as error:
        parser.error(f"argument {_FLAG}: {file} is not valid YAML: {' '.join(str(error).split())}")
    if options is None:
        return {}
    if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
        parser.error(f"argument {_FLAG}: {file} must hold names of options with their values")
    return options


def _arguments(parser: Parser, flag: str, value: Any) -> Iterator[str]:
    """Arguments of the command line for one option of the file."""
    if value is None:
        return
    if isinstance(value, bool):
        off = flag.replace("--", "--no-", 1)
        if value:
            yield flag
        elif parser.knows(off):
            yield off
        return
    if not isinstance(value, list):
        yield f"{flag}={_text(value)}"
        return
    action = parser.find_action(flag)
    if action is not None and action.nargs == "+":
        yield flag
        yield from map(_text, value)
    else:
        yield from (f"{flag}={_text(item)}" for item in value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
