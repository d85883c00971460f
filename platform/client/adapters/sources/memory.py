"""Adapters in memory: files that arrive over HTTP, or are made of tensors. Nothing is written to a disk.

    upload(owner)  ->  Upload.write, ...  ->  Upload.finish: a LoRARequest  ->  hold(name), while a name has the adapter

A file is a sealed memfd of this process, which cannot be changed. The engine process, and its reader process, open it
through /proc by the `files` of the request, each time that they read the adapter: after a restart of the engine too.
Descriptors are reused for other files, so an adapter's files have a random name of its own, and `AdapterFolder` opens
no file that has another one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self
from weakref import WeakKeyDictionary

from .....lora.step_yield import CpuYielder
from ....core.adapter_files import CONFIG_FILE, IN_MEMORY, WEIGHT_FILES
from ....core.adapter_names import split_engine_name
from ....core.errors import AdapterError, InvalidUserInputError, invalid
from ....core.lora_request import LoRARequest, TensorLoRARequest
from ....core.sampling_params import quote_for_error
from ....core.threads import run_later
from .resolver import DEFAULT_MAX_ADAPTER_BYTES, unavailable

DEFAULT_MAX_UPLOAD_BYTES = 4 << 30
MAX_CONFIG_BYTES = 1 << 20
"""Largest adapter_config.json, as in `lora.files`."""
MAX_ADAPTERS = 100
"""Adapters in memory, those that arrive too. Each takes two file descriptors of the process, which has connections."""
TENANTS_SHARE = 4
"""A tenant has at most this fraction of the bytes and adapters in memory, so that no tenant keeps others out."""

_KEPT = 2
"""Contents of one name that are kept for requests that bring tensors: the newest, and the one before for requests that
wait."""
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_PIECE = 1 << 18
"""Bytes that are digested and written between two pauses: some 0.3 ms."""
_yield_to_steps = CpuYielder()
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(slots=True, eq=False)
class _Content:
    """Files of one adapter."""

    request: LoRARequest
    """With another name."""
    descriptors: tuple[int, ...]
    num_bytes: int
    names: set[str] = field(default_factory=set)
    """Names that have it, as in `AdapterMemory.hold`."""
    num_uploads: int = 1
    """Uploads that are not closed."""


class AdapterMemory:
    """See the module's docstring. Any thread may call."""

    def __init__(
        self, max_bytes: int = DEFAULT_MAX_UPLOAD_BYTES, max_adapter_bytes: int = DEFAULT_MAX_ADAPTER_BYTES
    ) -> None:
        """Hold `max_bytes` of files, those that arrive too, and `max_adapter_bytes` of one adapter."""
        self.max_bytes, self.max_adapter_bytes = max_bytes, max_adapter_bytes
        self._lock = threading.RLock()
        self._contents: dict[tuple[str, str], _Content] = {}  # by owner and path
        self._used: Counter[str] = Counter()  # bytes by owner
        self._num_adapters: Counter[str] = Counter()  # also those that arrive
        self._kept: dict[str, set[str]] = {}  # name -> paths of the last `restrict`
        self._of_tensors: WeakKeyDictionary[TensorLoRARequest, LoRARequest] = WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, those that arrive too."""
        with self._lock:
            return self._used.total()

    # --- contents ---

    def upload(self, owner: str = "") -> Upload:
        """An adapter that arrives, to be used as a context; `owner` is its tenant, "" for adapters that all share."""
        return Upload(self, owner)

    def take(self, owner: str, num_bytes: int, num_adapters: int = 0) -> None:
        """Count bytes that arrive, or an adapter that begins to.

        Raises:
            InvalidUserInputError: there is no room for them.
        """
        divisor = TENANTS_SHARE if owner else 1
        with self._lock:
            for used, more, limit, unit in (
                (self._used, num_bytes, self.max_bytes, "bytes (--lora-upload-bytes)"),
                (self._num_adapters, num_adapters, MAX_ADAPTERS, "adapters"),
            ):
                for whose, have, most in (("this tenant", used[owner], limit // divisor), ("all", used.total(), limit)):
                    if have + more > most:
                        raise InvalidUserInputError(
                            "there is no room for an adapter from memory: at most "
                            f"{most} {unit} for {whose if owner else 'all'}; unload one first",
                            param="file",
                        )
            self._used[owner] += num_bytes
            self._num_adapters[owner] += num_adapters

    def give_back(self, owner: str, num_bytes: int) -> None:
        """Count an adapter and its bytes no longer."""
        with self._lock:
            for used, less in ((self._used, num_bytes), (self._num_adapters, 1)):
                used[owner] -= less
                if not used[owner]:
                    del used[owner]

    def move(self, owner: str, to: str, num_bytes: int) -> None:
        """Count an adapter and its bytes for another owner; InvalidUserInputError if it has no room for them."""
        with self._lock:
            self.give_back(owner, num_bytes)
            try:
                self.take(to, num_bytes, 1)
            except InvalidUserInputError:
                self.take(owner, num_bytes, 1)  # as before
                raise

    def add(self, owner: str, path: str, descriptors: tuple[int, int], token: str, num_bytes: int) -> LoRARequest:
        """Take files over, of which `num_bytes` are counted. Files with the same content replace them: their path is
        the same."""
        with self._lock:
            content = self._contents.get((owner, path))
            if content is not None:
                content.num_uploads += 1
                close_later(descriptors)
                self.give_back(owner, num_bytes)
                return content.request
            places = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]
            files = zip((CONFIG_FILE, WEIGHT_FILES[0]), places, strict=True)
            request = LoRARequest(path, path=path, roots=(f"/memfd:{token} (deleted)",), files=files)
            self._contents[owner, path] = _Content(request, descriptors, num_bytes)
            return request

    def release_upload(self, owner: str, path: str) -> None:
        """Keep a content only for the names that have it."""
        with self._lock:
            content = self._contents[owner, path]
            content.num_uploads -= 1
            self._drop_unused(owner, path)

    def _drop_unused(self, owner: str, path: str) -> None:
        content = self._contents[owner, path]
        if not content.names and not content.num_uploads:
            del self._contents[owner, path]
            close_later(content.descriptors)
            self.give_back(owner, content.num_bytes)

    # --- names ---

    def hold(self, request: LoRARequest) -> None:
        """Keep a content for the request's name until `restrict`. No effect if it is gone."""
        owner, _ = split_engine_name(request.name)
        with self._lock:
            content = self._contents.get((owner, request.path))
            if content is not None:
                content.names.add(request.name)

    def paths_of(self, name: str) -> list[str]:
        """Paths of the contents that a name has."""
        owner, _ = split_engine_name(name)
        with self._lock:
            return [path for (of, path), content in self._contents.items() if of == owner and name in content.names]

    def restrict(self, name: str, needed: Collection[str | None] = ()) -> None:
        """Keep only the `needed` paths for a name."""
        owner, _ = split_engine_name(name)
        with self._lock:
            self._kept.pop(name, None)
            if kept := {path for path in needed if path is not None and path.startswith(IN_MEMORY)}:
                self._kept[name] = kept
            for path in self.paths_of(name):
                if path not in needed:
                    self._contents[owner, path].names.remove(name)
                    self._drop_unused(owner, path)

    def find(self, name: str, path: str) -> LoRARequest | None:
        """The request of a name for one of its paths; None if it is not in memory."""
        owner, _ = split_engine_name(name)
        with self._lock:
            content = self._contents.get((owner, path))
            return None if content is None else replace(content.request, lora_name=name)

    # --- tensors ---

    def known(self, request: TensorLoRARequest) -> LoRARequest | None:
        """The files that were made of a request's tensors, if they are still there."""
        made = self._of_tensors.get(request)
        return None if made is None or self.find(made.name, made.path) is None else made

    def take_tensors(self, request: TensorLoRARequest) -> LoRARequest:
        """Copy the tensors of a request to files, which its name holds. May take a second.

        Raises:
            AdapterError: tensors or a configuration that cannot be written. InvalidUserInputError: there is no room.
        """
        from .tensors import config_bytes, tensor_pieces

        owner, _ = split_engine_name(request.name)
        with self.upload(owner) as upload:
            for piece in tensor_pieces(request.lora_tensors, upload.expect):
                upload.write(piece)
            made = replace(upload.finish(config_bytes(request.peft_config)), lora_name=request.name)
            made = replace(made, lora_int_id=request.lora_int_id)
            with self._lock:
                self.hold(made)
                old = [path for path in self.paths_of(request.name) if path != made.path]
                kept = self._kept.get(request.name, ())
                for path in [path for path in old if path not in kept][: 1 - _KEPT]:
                    self._contents[owner, path].names.remove(request.name)
                    self._drop_unused(owner, path)
                self._of_tensors[request] = made
        return made


class Upload:
    """An adapter that arrives. One thread at a time."""

    def __init__(self, memory: AdapterMemory, owner: str) -> None:
        self._memory, self._owner = memory, owner
        self._lock = threading.Lock()  # guards the descriptor
        self._token = f"outrider-{secrets.token_hex(16)}"
        self._weights: int | None = None
        self._digest = hashlib.sha256()
        self._path: str | None = None
        self._expected_bytes = 0
        self.num_bytes = 0
        """Bytes of the weights so far."""

    def __enter__(self) -> Self:
        self._memory.take(self._owner, 0, 1)
        try:
            self._weights = self._create()
        except BaseException:
            self._memory.give_back(self._owner, 0)
            raise
        return self

    def _create(self) -> int:
        with _memory_errors():
            return os.memfd_create(self._token, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)

    def expect(self, num_bytes: int) -> None:
        """Choose pauses for this many bytes. Otherwise they are those of a small adapter until 64 MiB have arrived."""
        self._expected_bytes = num_bytes

    def write(self, piece: bytes | bytearray | memoryview) -> None:
        """Append a piece of the safetensors file.

        Raises:
            AdapterError: it is too large. InvalidUserInputError: there is no room for it.
        """
        rest = memoryview(piece)
        with self._lock:
            self._take(rest.nbytes)
        _yield_to_steps.begin(max(self.num_bytes, self._expected_bytes))
        for first in range(0, rest.nbytes, _PIECE):
            self._append(rest[first : first + _PIECE])
            _yield_to_steps()

    def _append(self, piece: memoryview) -> None:
        with self._lock:
            if self._weights is None:
                raise AdapterError("file: the upload has ended", param="file")
            self._digest.update(piece)
            with _memory_errors():
                _write_all(self._weights, piece)

    def _take(self, num_bytes: int) -> None:
        most = self._memory.max_adapter_bytes
        if self.num_bytes + num_bytes > most:
            raise AdapterError(f"file: it is larger than {most} bytes, the limit of --max-lora-bytes", param="file")
        self._memory.take(self._owner, num_bytes)
        self.num_bytes += num_bytes

    def finish(self, config: bytes, sha256: str | None = None, owner: str | None = None) -> LoRARequest:
        """The adapter with this adapter_config.json; its name is its path. It lasts until the context ends, or longer
        if a name holds it.

        Args:
            sha256: Of the weights, in hexadecimal, if it is known.
            owner: The tenant that has the adapter, if it is another one than expected.

        Raises:
            AdapterError: the weights have another digest, or all is too large.
            InvalidUserInputError: the owner has no room for it.
        """
        with self._lock:
            return self._finish(config, sha256, self._owner if owner is None else owner)

    def _finish(self, config: bytes, sha256: str | None, owner: str) -> LoRARequest:
        assert self._weights is not None
        found = self._digest.hexdigest()
        if sha256 is not None and found != check_sha256(sha256):
            raise AdapterError(f"sha256: the file that arrived has {found}; send it again", param="sha256")
        if len(config) > MAX_CONFIG_BYTES:
            raise AdapterError(f"config has {len(config)} bytes; at most {MAX_CONFIG_BYTES} are read", param="config")
        self._take(len(config))
        self._memory.move(self._owner, owner, self.num_bytes)
        self._owner = owner
        of_config = self._create()
        try:
            with _memory_errors():
                _write_all(of_config, memoryview(config))
            for descriptor in (of_config, self._weights):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(of_config)
            raise
        digest = hashlib.sha256(self._digest.digest() + hashlib.sha256(config).digest()).hexdigest()
        path, descriptors = f"{IN_MEMORY}{digest}", (of_config, self._weights)
        request = self._memory.add(self._owner, path, descriptors, self._token, self.num_bytes)
        self._path, self._weights = path, None
        return request

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give up what no name holds. A second call does nothing."""
        with self._lock:
            if self._weights is not None:
                close_later([self._weights])
                self._weights = None
                self._memory.give_back(self._owner, self.num_bytes)
            if self._path is not None:
                path, self._path = self._path, None
                self._memory.release_upload(self._owner, path)


def close_later(descriptors: Sequence[int]) -> None:
    """Close files in a thread: the system takes some 20 ms to free a large one."""

    left = list(descriptors)

    def close() -> None:
        while left:
            os.close(left.pop())

    run_later(close)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # no memory, or no descriptors
        raise unavailable(f"there is no room for the adapter's files: {error.strerror}") from error


def _write_all(descriptor: int, rest: memoryview) -> None:
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def check_sha256(text: str) -> str:
    """A digest in lower case.

    Raises:
        InvalidRequestError: it is none.
    """
    text = text.lower()
    if not _SHA256.fullmatch(text):
        raise invalid("sha256", f"must be 64 hexadecimal digits; got {quote_for_error(text)}")
    return text
