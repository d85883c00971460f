"""The six verbs for the adapters of an engine. They are declared here alone, and available as `.adapters`:

    LLM.adapters         client     fetches files, then calls the engine of its own process
    AsyncLLM.adapters    client     fetches files, then sends verb and arguments to the engine process; is awaited
    EngineCore.adapters  engine     reads files, and changes what is registered

HTTP calls `AsyncLLM.adapters`. `LLM` and `AsyncLLM` have the verbs under vLLM's names too, such as `pin_lora`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from .lora_request import LoRARequest
from .messages import AdapterInfo

Info = TypeVar("Info", covariant=True)
"""`AdapterInfo`, or a coroutine of one; the other two likewise."""
Infos = TypeVar("Infos", covariant=True)
Nothing = TypeVar("Nothing", covariant=True)


class AdapterVerbs(Protocol[Info, Infos, Nothing]):
    """Verbs for the adapters that requests may name."""

    def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, running: str = "finish"
    ) -> Info:
        """Read, check and register an adapter, so that requests may name it. Steps of the engine do not wait for files.

        Args:
            load_inplace: replace the adapter of that name.
            pinned: keep it on the device.
            running: "finish": requests that came before finish on the version that they have. "abort": they end now
                with an AdapterReplacedError, unless the new content is theirs.

        Raises:
            AdapterError: the adapter cannot be served; one that had the name stays.
            InvalidUserInputError: the name is taken, or there is no room for it in addition to the other pinned ones.
            AdapterSourceError: the store that it comes from failed.
            InvalidRequestError: `running` is something else.
        """

    def register(self, requests: Sequence[LoRARequest]) -> Nothing:
        """Make adapters known by name. Their files are read when requests arrive, and those requests get the errors.

        Raises:
            AdapterError: a folder does not exist. InvalidUserInputError: a name is taken. None is registered then.
        """

    def unload(self, name: str, mode: str = "drain") -> Nothing:
        """Take no new requests for an adapter, and free it with the last request that has it.

        Args:
            mode: "drain" lets these requests finish; "abort" ends them now with a NotFoundError.

        Raises:
            NotFoundError: no adapter has that name. InvalidRequestError: there is no such mode.
        """

    def pin(self, name: str) -> Info:
        """Keep a registered adapter on the device; it is loaded if it must be.

        Raises:
            NotFoundError: no adapter has that name. AdapterError: it cannot be served.
            InvalidUserInputError: there is no room for it in addition to the other pinned ones, or none now.
        """

    def unpin(self, name: str) -> Info:
        """Let a registered adapter be evicted again; NotFoundError when no adapter has that name."""

    def list(self) -> Infos:
        """The registered adapters, in the order of registration."""


RUNNING = ("finish", "abort")
"""Values of `running`."""
VERBS = ("load", "register", "unload", "pin", "unpin", "list")


class PendingCall(Protocol):
    """A call of a verb that waits for files."""

    def done(self) -> bool:
        """True when `result` does not wait."""

    def result(self) -> AdapterInfo:
        """Wait for the verb's result; its errors are raised here."""


class LocalAdapters(AdapterVerbs[AdapterInfo, list[AdapterInfo], None], Protocol):
    """Verbs for the adapters of an engine in this process."""

    def find(self, name: str) -> AdapterInfo | None:
        """The adapter registered under a name."""

    def start(self, verb: str, arguments: Mapping[str, Any]) -> PendingCall | None:
        """Start a call of a verb that reads files, concurrently with steps; None if the call needs no file.

        Raises:
            NotFoundError, InvalidUserInputError: as the verb does. AdapterError is raised by the result.
        """
