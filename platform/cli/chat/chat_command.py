"""`outrider chat`: a conversation in the terminal with a running server."""

from __future__ import annotations

import argparse
import io
import math
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ...core.errors import InvalidRequestError, NotFoundError, OutriderError, PromptTooLongError
from ...core.progress import START_EVERY, Progress
from ...core.text import shorten
from ..options.api_keys import API_KEY_VARIABLE, key_problem

if TYPE_CHECKING:
    from .chat_client import ChatClient

_HELP = """\
/model NAME    talk to that model or adapter; without a name, list them
/system TEXT   set the system prompt and start a new conversation; without a text, remove it
/clear         start a new conversation
/help          show this
/exit          leave (or Ctrl-D)
Ctrl-C stops the answer that is being written."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "chat",
        help="talk to a running server in the terminal",
        description="Talk to a running server. Reads lines from standard input when that is not a terminal.",
        epilog="commands in the chat:\n" + _HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server, also as host:port (default: %(default)s)"
    )
    parser.add_argument("--api-key", help="the server's key (default: the variable OUTRIDER_API_KEY)")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this message alone, print the answer and leave")
    parser.add_argument(
        "--model", "--model-name", metavar="NAME", help="model or adapter to begin with (default: the base model)"
    )
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the server's)")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer (default: to the context's end)")
    parser.set_defaults(run=run)


class Screen:
    """Output of a conversation. Answers go to standard output; in a pipe everything else goes to standard error."""

    def say(self, text: str) -> None:
        """Show a line from the program."""
        print(text, file=sys.stderr, flush=True)

    def fail(self, text: str) -> None:
        """Show an error."""
        self.say(f"error: {text}")

    def piece(self, text: str) -> None:
        """Show a piece of an answer as it comes."""
        print(text, end="", flush=True)

    def end(self, stats: str) -> None:
        """End the answer."""
        self.piece("\n")
        self.say(f"[{stats}]")


class TerminalScreen(Screen):
    """Screen for people, with colours."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """See Screen."""
        self._console.print(text, style="cyan", markup=False)

    def fail(self, text: str) -> None:
        """See Screen."""
        self._console.print(text, style="red", markup=False)

    def piece(self, text: str) -> None:
        """See Screen."""
        self._console.print(text, end="", markup=False)

    def end(self, stats: str) -> None:
        """See Screen."""
        self._console.print(f"\n{stats}", style="dim", markup=False)


class Conversation:
    """State of a chat: the model and the messages."""

    def __init__(self, client: ChatClient, screen: Screen, options: dict[str, Any]) -> None:
        self._client = client
        self._screen = screen
        self._options = options
        self._system = ""
        self._messages: list[dict[str, str]] = []
        self.model = ""
        self.failures = 0

    def choose_model(self, name: str | None) -> None:
        """Switch to `name`, or to the server's base model; NotFoundError when the server has no such model."""
        models = self._client.models()
        if name is None:
            name = next((model for model, parent in models if parent is None), None)
            if name is None:
                raise NotFoundError(f"{self._client.url} lists no model", param="model")
        known = [model for model, _ in models]
        if name not in known and name.partition(":")[2] not in known:
            raise NotFoundError(f"there is no model {shorten(name)!r}; there are {', '.join(known)}", param="model")
        self.model = name

    def set_system(self, text: str) -> None:
        """Set the system prompt and begin a new conversation."""
        self._system = text
        self._messages.clear()

    def handle(self, line: str) -> bool:
        """Run a command or send a message; False when the user wants to leave."""
        line = line.strip()
        if not line:
            return True
        if not line.startswith("/"):
            self.ask(line)
            return True
        command, _, argument = line.partition(" ")
        if command in ("/exit", "/quit"):
            return False
        try:
            self._obey(command, argument.strip())
        except OutriderError as error:
            self._fail(error)
        return True

    def _obey(self, command: str, argument: str) -> None:
        if command == "/model" and argument:
            self.choose_model(argument)
            self._screen.say(f"now talking to {self.model}")
        elif command == "/model":
            for name, parent in self._client.models():
                mark = "*" if name == self.model else " "
                self._screen.say(f"{mark} {name}" + (f"  (adapter of {parent})" if parent else ""))
        elif command == "/system":
            self.set_system(argument)
            self._screen.say("system prompt set, a new conversation" if argument else "system prompt removed")
        elif command == "/clear":
            self._messages.clear()
            self._screen.say("a new conversation")
        elif command == "/help":
            self._screen.say(_HELP)
        else:
            self._screen.fail(f"unknown command {shorten(command)}; /help lists them")
            self.failures += 1

    def ask(self, text: str) -> None:
        """Send a message and show the answer. A failed answer leaves no trace; a stopped one keeps its text so far."""
        self._messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self._system}] if self._system else []
        pieces: list[str] = []
        try:
            with closing(self._client.stream(self.model, system + self._messages, self._options)) as answer:  # type: ignore[type-var]
                for piece in answer:
                    pieces.append(piece)
                    self._screen.piece(piece)
        except KeyboardInterrupt:
            self._screen.end("stopped")
        except OutriderError as error:
            self._messages.pop()
            if pieces:
                self._screen.end("failed")
            self._fail(error)
            return
        else:
            self._screen.end(self._client.stats.describe())
        self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _fail(self, error: OutriderError) -> None:
        self.failures += 1
        hint = " (/clear begins a new conversation)" if isinstance(error, PromptTooLongError) else ""
        self._screen.fail(error.message + hint)


def run(namespace: argparse.Namespace) -> int:
    """Chat until the input ends; returns the exit status."""
    from .chat_client import ChatClient

    quick = namespace.quick
    interactive = quick is None and sys.stdin.isatty() and sys.stdout.isatty()
    screen = TerminalScreen() if interactive else Screen()
    if namespace.temperature is not None and not math.isfinite(namespace.temperature):
        raise InvalidRequestError("argument --temperature: must be a finite number", param="temperature")
    options = {"temperature": namespace.temperature, "max_tokens": namespace.max_tokens}
    options = {name: value for name, value in options.items() if value is not None}
    key = namespace.api_key or os.environ.get(API_KEY_VARIABLE, "").strip() or None
    problem = key_problem(key or "")
    if problem:
        where = f"argument --api-key: {problem}" if namespace.api_key else f"{API_KEY_VARIABLE}: {problem}"
        raise InvalidRequestError(where, param="api_key")
    _be_lenient(sys.stdin, sys.stdout, sys.stderr)
    with ChatClient(namespace.url, key) as client:
        conversation = Conversation(client, screen, options)
        with Progress(screen.say, START_EVERY) as progress:
            progress.doing(lambda: f"{client.url} has not answered yet; it may be loading its model")
            conversation.choose_model(None if namespace.model is None else _text(namespace.model))
        conversation.set_system(_text(namespace.system or ""))
        if interactive:
            screen.say(f"talking to {conversation.model} on {client.url}; /help lists the commands")
        if quick is not None:
            conversation.ask(_text(quick))  # a message, even one that begins like a command
            return 1 if conversation.failures else 0
        for line in _typed_lines(conversation) if interactive else sys.stdin:
            if not conversation.handle(line):
                break
    return 1 if conversation.failures and not interactive else 0


def _be_lenient(*streams: TextIO) -> None:
    """Replace bytes that cannot be decoded or shown by question marks."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):  # not one that a test has put there
            stream.reconfigure(errors="replace")


def _text(argument: str) -> str:
    """An argument of the command line without surrogates, which stand for bytes that are no text."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _typed_lines(conversation: Conversation) -> Iterator[str]:
    """Iterator over the lines that a person types, with history and completion of commands."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, History, InMemoryHistory
    from prompt_toolkit.shortcuts import CompleteStyle

    history: History = InMemoryHistory()
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "outrider"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chat_history").touch(mode=0o600)
        history = FileHistory(str(folder / "chat_history"))
    except OSError:
        pass  # a home that cannot be written to: this session's history is enough
    completer = WordCompleter(["/model", "/system", "/clear", "/help", "/exit"], sentence=True)
    # Readline's style keeps no empty lines below the prompt for a menu.
    style = CompleteStyle.READLINE_LIKE
    session: PromptSession[str] = PromptSession(history=history, completer=completer, complete_style=style)
    while True:
        try:
            yield session.prompt(f"{conversation.model}> ")
        except KeyboardInterrupt:
            continue  # drops the line that was being typed
        except EOFError:
            return
