"""Messages between the API process and its engine process: msgpack over ZeroMQ.

The Unix socket is in a folder that only this user can open.

    API process                        engine process
    ClientLink   DEALER  <----->  DEALER   EngineLink

Every run of the engine process has a link of its own, so nothing from an earlier run can arrive.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import msgspec
import zmq

from ...core.adapter_verbs import VERBS as ADAPTER_VERBS
from ...core.adapter_verbs import AdapterVerbs, Info, Infos, Nothing
from ...core.config import EngineArgs
from ...core.errors import EngineDeadError, ErrorInfo, InvalidRequestError, OutriderError
from ...core.kv_events import KVEventSource
from ...core.logs import LogFormat
from ...core.messages import AdapterInfo, EngineInfo, EngineRequest, EngineStats, TokenDelta
from ...core.weight_source import WeightSource
from ...core.wire import pack


class ProcessConfig(msgspec.Struct):
    """Configuration of an engine process; comes over its standard input."""

    args: EngineArgs
    engine: str
    """Import path "module:callable"."""
    folder: str
    """Folder of the link's socket."""
    sys_path: list[str]
    log_level: int
    progress: bool
    log_format: LogFormat = "text"


class Add(msgspec.Struct, tag=True):
    """Run these sequences."""

    requests: list[EngineRequest]


class Abort(msgspec.Struct, tag=True):
    """Drop these sequences."""

    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Call a verb of the engine; answered by one `Reply`."""

    call_id: int
    verb: str
    """A key of `VERBS`."""
    arguments: dict[str, Any] = {}
    """Arguments by name; plain data when the call has arrived, see `decode_arguments`."""


class Stop(msgspec.Struct, tag=True):
    """Shut the engine down and exit."""


class Ready(msgspec.Struct, tag=True):
    """The engine has started."""

    info: EngineInfo


class Deltas(msgspec.Struct, tag=True):
    """The deltas of one step."""

    deltas: list[TokenDelta]


class Reply(msgspec.Struct, tag=True):
    """The result of a `Call`, or its error."""

    call_id: int
    value: msgspec.Raw
    error: ErrorInfo | None = None


class Dying(msgspec.Struct, tag=True):
    """The last message of an engine that could not start or cannot continue."""

    error: ErrorInfo


class Undecodable(NamedTuple):
    """A message that the engine process cannot decode."""

    error: ErrorInfo
    request_ids: list[str]
    """The sequences that it would have added."""
    call_id: int | None


class Verb(NamedTuple):
    """The types of a call."""

    arguments: type[msgspec.Struct]
    result: Any


_RESULTS = {Info: AdapterInfo, Infos: list[AdapterInfo], Nothing: None}


def _adapter_verb(name: str) -> Verb:
    """The types that `core.adapter_verbs` declares for a verb."""
    function = getattr(AdapterVerbs, name)
    hints = get_type_hints(function)
    result = _RESULTS[hints.pop("return")]
    defaults = {p.name: p.default for p in signature(function).parameters.values() if p.default is not p.empty}
    fields = [(field, kind, defaults[field]) if field in defaults else (field, kind) for field, kind in hints.items()]
    return Verb(msgspec.defstruct(name, fields), result)


class _StartProfile(msgspec.Struct):
    """Arguments of `start_profile`."""

    folder: str
    prefix: str


class _Pause(msgspec.Struct):
    """Arguments of `pause`."""

    mode: str
    clear_cache: bool


class _UpdateWeights(msgspec.Struct):
    """Arguments of `update_weights`."""

    sources: list[WeightSource]
    draft: bool


class _NoArguments(msgspec.Struct):
    """Arguments of a verb without any."""


VERBS: dict[str, Verb] = {
    **{f"adapters.{name}": _adapter_verb(name) for name in ADAPTER_VERBS},
    "stats": Verb(_NoArguments, EngineStats),
    "start_profile": Verb(_StartProfile, None),
    "stop_profile": Verb(_NoArguments, str),
    "pause": Verb(_Pause, None),
    "update_weights": Verb(_UpdateWeights, bool),
    "resume": Verb(_NoArguments, None),
    "has_work": Verb(_NoArguments, bool),
    "check_integrity": Verb(_NoArguments, None),
    "reset_prefix_cache": Verb(_NoArguments, bool),
    "kv_event_sources": Verb(_NoArguments, list[KVEventSource]),
    "release_memory": Verb(_NoArguments, None),
}
"""The methods of the engine that may be called."""


def decode_arguments(call: Call) -> dict[str, Any]:
    """The arguments of a call that has arrived, in their types.

    Raises:
        InvalidRequestError: one is missing or has the wrong type. OutriderError: there is no such verb.
    """
    if call.verb not in VERBS:
        raise OutriderError(f"the engine has no call {call.verb!r}; it has {', '.join(VERBS)}")
    try:
        arguments = msgspec.convert(call.arguments, VERBS[call.verb].arguments)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the engine cannot read the call {call.verb!r}: {error}") from error
    return msgspec.structs.asdict(arguments)


Message: TypeAlias = Add | Abort | Call | Stop | Ready | Deltas | Reply | Dying


def _encode_other(value: object) -> object:
    """Numbers of numpy, which users put into sampling parameters."""
    item = getattr(value, "item", None)
    if item is None:
        raise NotImplementedError(f"cannot send a {type(value).__name__} to the engine process")
    return item()


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

encode = _encoder.encode
decode = _decoder.decode


def undecodable(content: bytes, error: Exception) -> Undecodable:
    """The receivers of a message that cannot be decoded, as far as it can be read."""
    try:
        fields = msgspec.msgpack.decode(content, strict=False)
    except (msgspec.MsgspecError, UnicodeError):
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    requests, call_id = fields.get("requests"), fields.get("call_id")
    ids = [item.get("request_id") for item in requests or () if isinstance(item, dict)]
    info = InvalidRequestError(f"the engine cannot read the request: {error}").info()
    return Undecodable(info, [i for i in ids if isinstance(i, str)], call_id if isinstance(call_id, int) else None)


def encode_value(value: object) -> msgspec.Raw:
    """The result of a call, for `Reply.value`."""
    return msgspec.Raw(_encoder.encode(value))


def decode_value(verb: str, value: msgspec.Raw) -> Any:
    """The result of a call of `verb`."""
    return msgspec.msgpack.decode(value, type=VERBS[verb].result)


def encode_config(config: ProcessConfig) -> bytes:
    """Message for the standard input of an engine process."""
    return pack(_encoder.encode(config))


def decode_config(content: bytes) -> ProcessConfig:
    """The configuration of a message's content."""
    return msgspec.msgpack.decode(content, type=ProcessConfig)


def _open(context: zmq.Context[Any], linger_ms: int) -> Any:
    socket = context.socket(zmq.DEALER)
    socket.linger = linger_ms
    # Never block: messages are small, and the client folds deltas into its state as they come.
    socket.sndhwm = socket.rcvhwm = 0
    return socket


class ClientLink:
    """The API process's end. Owns the folder of the socket; belongs to the event loop it is used in.

    The loop watches the socket's descriptor. `zmq.asyncio` takes twice the time for each message, of which a step sends
    one: 130 instead of 62 us of CPU time on a Xeon.
    """

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="outrider-")  # mode 0700
        if len(self.folder) > 80:  # a Unix socket's path has at most 107 characters
            shutil.rmtree(self.folder)
            self.folder = tempfile.mkdtemp(prefix="outrider-", dir="/tmp")
        # The process's own context, which is never terminated: ending one waits for its sockets, and when the garbage
        # collector frees a link that was not closed, it would wait forever.
        self._socket: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that calls `_receive`
        self._on_message: Callable[[Message], None] = lambda message: None
        try:
            self._socket = _open(zmq.Context.instance(), linger_ms=0)
            self._socket.bind(f"ipc://{self.folder}/link")
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Send a message; never waits.

        Raises:
            EngineDeadError: no engine is connected.
            InvalidRequestError: the message holds a value that cannot be sent, such as an integer above 64 bits.
        """
        try:
            content = encode(message)
        except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
            raise InvalidRequestError(f"the request cannot be sent to the engine: {error}") from error
        try:
            self._socket.send(content, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise EngineDeadError("the engine process is gone") from error
        if self._loop is not None:  # sending may consume the descriptor's signal of a message that has arrived
            self._loop.call_soon(self._receive)

    def listen(self, on_message: Callable[[Message], None]) -> None:
        """Call `on_message` in this event loop for each message from now on, those that have arrived included."""
        self._on_message, self._loop = on_message, asyncio.get_running_loop()
        self._loop.add_reader(self._socket.get(zmq.FD), self._receive)
        self._loop.call_soon(self._receive)

    def _receive(self) -> None:
        """Receive all that is there: the descriptor is readable again only after that."""
        while self._loop is not None:
            try:
                content = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(decode(content))
            except BaseException:
                self._loop.call_soon(self._receive)  # the others
                raise

    def close(self) -> None:
        """Close the socket and remove its folder; unsent messages are dropped."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket.get(zmq.FD))
        if self._socket is not None:
            self._socket.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class EngineLink:
    """The engine process's end; synchronous."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._socket = _open(self._context, linger_ms=1000)
        self._socket.connect(f"ipc://{folder}/link")

    def send(self, message: Message) -> None:
        """Send a message; never waits."""
        self._socket.send(encode(message))

    def receive(self, timeout_ms: int) -> list[Message | Undecodable]:
        """All messages that are there; waits for the first one at most `timeout_ms`."""
        messages: list[Message | Undecodable] = []
        if self._socket.poll(timeout_ms):
            while True:
                try:
                    content = self._socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                try:
                    messages.append(decode(content))
                except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError, ValueError) as error:
                    messages.append(undecodable(content, error))
        return messages

    def close(self) -> None:
        """Close, after at most a second for what is still to be sent."""
        self._socket.close()
        self._context.term()
