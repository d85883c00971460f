"""Calls that wait for files."""

from __future__ import annotations

from collections.abc import Callable

from ...platform.core.errors import InvalidUserInputError, OutriderError
from ...platform.core.messages import AdapterInfo
from ..adapter import Adapter
from .versions import AdapterVersion


class PendingLoad:
    """A call of `load` or `pin` whose files are read by the transfers that read for requests."""

    def __init__(
        self,
        register: Callable[[Adapter], AdapterVersion],
        wait: Callable[[float], None],
        describe: Callable[[AdapterVersion], AdapterInfo],
    ) -> None:
        """`register` is called with what was read, and `wait` waits at most that many seconds for a transfer."""
        self._register, self._wait, self._describe = register, wait, describe
        self._outcome: AdapterVersion | OutriderError | None = None

    def finish(self, adapter: Adapter | OutriderError) -> None:
        """Set the outcome: the read has ended."""
        try:
            self._outcome = adapter if isinstance(adapter, OutriderError) else self._register(adapter)
        except OutriderError as error:
            self._outcome = error

    def done(self) -> bool:
        """True when `result` does not wait."""
        self._wait(0)
        return self._outcome is not None

    def version(self) -> AdapterVersion:
        """Wait for the registered version; the errors of `load` are raised here."""
        while self._outcome is None:
            self._wait(1.0)
        if isinstance(self._outcome, OutriderError):
            raise self._outcome
        return self._outcome

    def result(self) -> AdapterInfo:
        """Wait for the registered version and describe it; its rows may still be written."""
        return self._describe(self.version())


def replaced_error(name: str) -> InvalidUserInputError:
    """The error of a call whose adapter was replaced while it waited."""
    return InvalidUserInputError(
        f"a request with another folder has replaced the adapter '{name}' meanwhile; try again", param="lora_name"
    )
