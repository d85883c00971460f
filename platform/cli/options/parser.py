"""The parser of every command: argparse with vLLM's spellings and with suggestions for unknown options."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from ...core.compat.vllm_options import ALIASES
from ...core.text import did_you_mean

CONFIG_FLAG = "--config"
_TRUTH = ("true", "false")
_NUMBER_AT_ONCE = re.compile(r"(?P<flag>-[a-zA-Z]+)(?P<number>\d+)")
_KEY_OF_JSON = re.compile(r"(?P<flag>--[^.=]+)\.(?P<path>[^=]+)(?:=(?P<value>.*))?", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Parser with these rules in addition to argparse's:

    - Underscores stand for dashes in the names of options.
    - `ALIASES` are accepted if the option that they mean exists; a number may follow at once, as in `-O3`.
    - A flag may have the value true or false: `--enforce-eager True`, `--enable-chunked-prefill=false`.
    - `--option.key.key value` sets a key of an option whose value is a JSON object.
    - `--config FILE`, if a parser has it, gives further options; those of the command line win.
    - An unknown option or command gets a suggestion, and the usage of the command that it was given to.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.set_defaults(parser=self)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse."""
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self._refuse(parsed.parser, unknown)
        return parsed

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """See argparse."""
        if args is None:
            return super().parse_known_args(args, namespace)
        given = self._with_keys_of_json(self._with_switches(self._in_own_spelling(args)))
        if self.knows(CONFIG_FLAG):
            from .config_file import with_config_file

            given = with_config_file(self, given)
        return super().parse_known_args(given, namespace)

    def knows(self, flag: str) -> bool:
        """True when there is an option of that name."""
        return flag in self._option_string_actions

    @property
    def flags(self) -> list[str]:
        """Names of all options that help shows."""
        shown = (flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS)
        return [*shown, *(flag for flag, own in ALIASES.items() if self.knows(own))]

    def find_action(self, flag: str) -> argparse.Action | None:
        """The option of that name, if there is one."""
        return self._option_string_actions.get(flag)

    def in_own_spelling(self, argument: str) -> str:
        """`argument` with dashes for underscores and our name for an alias, if it is an option here."""
        match = _NUMBER_AT_ONCE.fullmatch(argument)
        if match is not None and match["flag"] in ALIASES:
            argument = f"{match['flag']}={match['number']}"
        flag, sign, value = argument.partition("=")
        name, dot, path = flag.partition(".")
        own = name.replace("_", "-") if name.startswith("--") else name
        if not self.knows(own):
            own = ALIASES.get(own, "")
            if not self.knows(own.partition(".")[0]):
                return argument
        return f"{own}{dot}{path}{sign}{value}"

    def _in_own_spelling(self, arguments: Sequence[str]) -> list[str]:
        end = list(arguments).index("--") if "--" in arguments else len(arguments)
        named = (self.in_own_spelling(text) if text.startswith("-") else text for text in arguments[:end])
        return [*named, *arguments[end:]]

    def _with_switches(self, arguments: Sequence[str]) -> list[str]:
        """Write `--flag` or `--no-flag` for a flag that is followed by true or false."""
        rest: list[str] = []
        remaining = iter(arguments)
        upcoming = next(remaining, None)
        while upcoming is not None:
            text, upcoming = upcoming, next(remaining, None)
            flag, sign, value = text.partition("=")
            if text == "--":
                return [*rest, text, *([] if upcoming is None else [upcoming]), *remaining]
            if not isinstance(self.find_action(flag), argparse.BooleanOptionalAction | argparse._StoreTrueAction):
                rest.append(text)
                continue
            if not sign and upcoming is not None and upcoming.lower() in _TRUTH:
                value, upcoming = upcoming, next(remaining, None)
            if value.lower() not in _TRUTH:
                rest.append(text)  # without a value, or with one that argparse refuses
            elif value.lower() == "true":
                rest.append(flag)
            elif self.knows(opposite := _opposite(flag)):
                rest.append(opposite)
        return rest

    def _with_keys_of_json(self, arguments: Sequence[str]) -> list[str]:
        """Join all `--option.key value` of an option into one `--option=JSON`, before the other arguments."""
        rest: list[str] = []
        objects: dict[str, dict[str, Any]] = {}
        remaining = iter(arguments)
        for text in remaining:
            match = _KEY_OF_JSON.fullmatch(text)
            if match is None or not self.knows(match["flag"]):
                rest.append(text)
                if text == "--":
                    break
                continue
            value = match["value"] if match["value"] is not None else next(remaining, None)
            if value is None:
                self.error(f"argument {text}: expected one argument")
            *folders, key = match["path"].split(".")
            place = objects.setdefault(match["flag"], {})
            for folder in folders:
                place = place.setdefault(folder.replace("-", "_"), {})
                if not isinstance(place, dict):
                    self.error(f"argument {text}: {folder} has a value already")
            place[key.replace("-", "_")] = plain(value)
        made = [f"{flag}={json.dumps(value)}" for flag, value in objects.items()]
        return [*made, *rest, *remaining]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            hint = did_you_mean(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{hint}") from None

    def _refuse(self, parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
        """Exit with the usage of the command that got the unknown arguments."""
        hint = ""
        if isinstance(parser, Parser):
            options = (text.partition("=")[0] for text in unknown if text.startswith("-"))
            hints = (did_you_mean(option.replace("_", "-"), parser.flags) for option in options)
            hint = next(filter(None, hints), "")
        parser.error(f"unrecognized arguments: {' '.join(itertools.islice(unknown, 20))}{hint}")


def _opposite(flag: str) -> str:
    return flag.replace("--no-", "--", 1) if flag.startswith("--no-") else flag.replace("--", "--no-", 1)


def plain(text: str) -> Any:
    """Parse a value: an argparse type. JSON text becomes its value, "None" and "" become None, other text stays."""
    if text in ("None", ""):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text
