"""Files of adapters in memory: what they hold, who holds them, and their bounds."""

import hashlib
import os
import time

import pytest

from outrider.platform.client.adapters.sources import AdapterSources, SourceOptions
from outrider.platform.client.adapters.sources import memory as adapter_memory
from outrider.platform.client.adapters.sources.memory import (
    MAX_ADAPTERS,
    MAX_CONFIG_BYTES,
    TENANTS_SHARE,
    AdapterMemory,
)
from outrider.platform.client.adapters.sources.shared_memory import SHARED_MEMORY, read_shared_memory
from outrider.platform.core.adapter_files import CONFIG_FILE, DRAFT_FOLDER, TEXT_FILES, WEIGHT_FILES
from outrider.platform.core.adapter_names import engine_name
from outrider.platform.core.errors import AdapterError, InvalidRequestError, InvalidUserInputError
from outrider.platform.core.lora_request import LoRARequest

WEIGHTS = b"weights" * 10
CONFIG = b'{"r": 8}'


def named(request: LoRARequest, name: str) -> LoRARequest:
    return LoRARequest(name, path=request.path, roots=request.roots, files=request.files)


def put(memory: AdapterMemory, name: str, weights: bytes = WEIGHTS, owner: str = "") -> LoRARequest:
    """An adapter that a name holds."""
    with memory.upload(owner) as upload:
        for start in range(0, len(weights), 7):
            upload.write(weights[start : start + 7])
        request = named(upload.finish(CONFIG), engine_name(owner, name))
        memory.hold(request)
    return request


def content(request: LoRARequest) -> tuple[bytes | None, bytes | None]:
    return request.folder.read(CONFIG_FILE, 1000), request.folder.read(WEIGHT_FILES[0], 1000)


def wait_closed(request: LoRARequest) -> None:
    """Wait until the thread that closes files has done so."""
    while any(os.path.exists(path) for _, path in request.files):
        time.sleep(0.001)


def test_a_large_file_is_copied_in_pieces_between_which_steps_run(monkeypatch):
    pauses = []
    monkeypatch.setattr(adapter_memory.CpuYielder, "__call__", lambda _: pauses.append(1))
    weights = os.urandom(2 << 20)
    with AdapterMemory(4 << 20, 4 << 20).upload() as upload:
        upload.write(weights)
        request = upload.finish(CONFIG, hashlib.sha256(weights).hexdigest())
        assert request.folder.read(WEIGHT_FILES[0], 4 << 20) == weights
    assert len(pauses) >= 8


def test_pauses_are_longer_once_an_adapter_is_large(monkeypatch):
    began = []
    monkeypatch.setattr(adapter_memory.CpuYielder, "begin", lambda _, num_bytes: began.append(num_bytes))
    with AdapterMemory(10, 10).upload() as upload:
        for piece in (b"ab", b"cde"):
            upload.write(piece)
    assert began == [2, 5]


def test_pauses_are_long_from_the_start_if_the_size_is_known(monkeypatch):
    began = []
    monkeypatch.setattr(adapter_memory.CpuYielder, "begin", lambda _, num_bytes: began.append(num_bytes))
    with AdapterMemory(10, 10).upload() as upload:
        upload.expect(4)
        for piece in (b"ab", b"cde"):
            upload.write(piece)
    assert began == [4, 5]


@pytest.fixture
def memory() -> AdapterMemory:
    return AdapterMemory(10_000, 4_000)


def test_the_files_are_those_that_arrived(memory):
    request = put(memory, "a")
    assert content(request) == (CONFIG, WEIGHTS)
    assert memory.num_bytes == len(CONFIG) + len(WEIGHTS)
    folder = request.folder
    assert not any(folder.has(name) for name in (*TEXT_FILES, *WEIGHT_FILES[1:]))
    assert folder.below(DRAFT_FOLDER) is None


def test_files_in_memory_cannot_be_changed(memory):
    for _, path in put(memory, "a").files:
        for flags in (os.O_WRONLY, os.O_RDWR | os.O_TRUNC):
            with pytest.raises(PermissionError):
                os.write(os.open(path, flags), b"other")


def test_a_content_that_no_name_holds_is_gone(memory):
    request = put(memory, "a")
    memory.restrict("a", [request.path])
    assert memory.paths_of("a") == [request.path]
    memory.restrict("a")
    assert (memory.paths_of("a"), memory.num_bytes, memory.find("a", request.path)) == ([], 0, None)
    wait_closed(request)
    with pytest.raises(AdapterError, match=r"adapter_config.json .*no longer in memory"):
        content(request)


def test_a_descriptor_that_was_reused_is_no_file_of_the_adapter(memory, tmp_path):
    request = put(memory, "a")
    memory.restrict("a")
    wait_closed(request)
    (tmp_path / "secret").write_text("secret")
    others, wanted = [], {int(path.rpartition("/")[2]) for _, path in request.files}
    while not wanted <= set(others):
        others.append(os.open(tmp_path / "secret", os.O_RDONLY))
    try:
        with pytest.raises(AdapterError, match="no longer in memory"):
            content(request)
    finally:
        for other in others:
            os.close(other)
    other = put(memory, "b", b"another")
    with pytest.raises(AdapterError, match="no longer in memory"):
        content(LoRARequest("a", path=request.path, roots=request.roots, files=other.files))


def test_the_same_content_is_kept_once(memory):
    first, second = put(memory, "a"), put(memory, "b")
    assert (first.path, first.files) == (second.path, second.files)
    assert memory.num_bytes == len(CONFIG) + len(WEIGHTS)
    memory.restrict("a")
    assert content(second) == (CONFIG, WEIGHTS)
    assert put(memory, "c", b"other").path != first.path


def test_a_tenants_content_is_its_own(memory):
    shared, own = put(memory, "a"), put(memory, "a", owner="acme")
    assert shared.files != own.files
    memory.restrict("a")
    assert content(own) == (CONFIG, WEIGHTS)
    assert memory.paths_of(engine_name("acme", "a")) == [own.path]


def test_an_upload_that_fails_leaves_nothing(memory):
    with memory.upload() as upload:
        upload.write(WEIGHTS)
        with pytest.raises(AdapterError) as caught:
            upload.finish(CONFIG, hashlib.sha256(b"other").hexdigest())
    assert caught.value.param == "sha256"
    assert hashlib.sha256(WEIGHTS).hexdigest() in caught.value.message
    assert memory.num_bytes == 0
    with pytest.raises(AdapterError, match="has ended"):
        upload.write(b"more")


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "0" * 65])
def test_a_digest_is_64_digits(memory, text):
    with pytest.raises(InvalidRequestError) as caught, memory.upload() as upload:
        upload.finish(CONFIG, text)
    assert caught.value.param == "sha256"


def test_the_right_digest_in_capitals(memory):
    with memory.upload() as upload:
        upload.write(WEIGHTS)
        request = upload.finish(CONFIG, hashlib.sha256(WEIGHTS).hexdigest().upper())
    assert len(request.files) == 2


def test_the_largest_adapter(memory):
    put(memory, "a", bytes(4_000 - len(CONFIG)))
    for size in (4_001 - len(CONFIG), 4_001):
        with pytest.raises(AdapterError, match="--max-lora-bytes"):
            put(memory, "b", bytes(size))
    assert memory.num_bytes == 4_000


def test_the_largest_configuration():
    memory = AdapterMemory()
    with memory.upload() as upload:
        upload.finish(b" " * MAX_CONFIG_BYTES)
    with pytest.raises(AdapterError) as caught, memory.upload() as upload:
        upload.finish(b" " * (MAX_CONFIG_BYTES + 1))
    assert caught.value.param == "config"


def test_all_adapters_are_bounded_together(memory):
    size = 4_000 - len(CONFIG)
    put(memory, "a", b"a" * size)
    put(memory, "b", b"b" * size)
    with pytest.raises(InvalidUserInputError, match=r"at most 10000 bytes .* for all"):
        put(memory, "c", b"c" * size)
    memory.restrict("a")
    put(memory, "c", b"c" * size)


def test_a_tenant_has_a_share(memory):
    most = 10_000 // TENANTS_SHARE - len(CONFIG)
    with pytest.raises(InvalidUserInputError, match="for this tenant"):
        put(memory, "a", bytes(most + 1), owner="acme")
    put(memory, "a", bytes(most), owner="acme")
    put(memory, "a", bytes(most), owner="other")
    with memory.upload() as upload:  # an admin's, for a tenant
        upload.write(b"x")
        with pytest.raises(InvalidUserInputError, match="for this tenant"):
            upload.finish(CONFIG, owner="acme")
    assert memory.num_bytes == 2 * (10_000 // TENANTS_SHARE)
    memory.restrict(engine_name("acme", "a"))
    with memory.upload() as upload:
        upload.finish(CONFIG, owner="acme")
        with pytest.raises(InvalidUserInputError, match="for this tenant"):
            memory.take("acme", 10_000 // TENANTS_SHARE)


def test_the_number_of_adapters_is_bounded():
    memory = AdapterMemory()
    for number in range(MAX_ADAPTERS // TENANTS_SHARE):
        put(memory, f"a{number}", b"%d" % number, owner="acme")
    with pytest.raises(InvalidUserInputError, match=f"{MAX_ADAPTERS // TENANTS_SHARE} adapters for this tenant"):
        put(memory, "more", b"more", owner="acme")
    with pytest.raises(InvalidUserInputError, match="for this tenant"), memory.upload("acme"):
        pass
    for number in range(MAX_ADAPTERS - MAX_ADAPTERS // TENANTS_SHARE):
        put(memory, f"b{number}", b"%d" % number)
    with pytest.raises(InvalidUserInputError, match=f"{MAX_ADAPTERS} adapters for all"):
        put(memory, "more", b"more")
    memory.restrict("b1")
    put(memory, "more", b"more")
    for name in ("more", *(f"b{number}" for number in range(MAX_ADAPTERS))):
        memory.restrict(name)
    put(memory, "more", b"more")


def test_sources_hold_what_is_loaded():
    sources = AdapterSources(SourceOptions(max_upload_bytes=1000, max_adapter_bytes=500))
    with sources.memory.upload() as upload:
        request = named(upload.finish(CONFIG), "a")
        assert sources.localize(request).result() == request
        assert sources.folders_of("a") == ()
        assert sources.localize(request, again=True).result() == request
    assert sources.folders_of("a") == (request.path,)
    sources.restrict("a")
    assert sources.memory.num_bytes == 0


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def shm():
    """Makes shared memory objects; returns their names."""
    made = []

    def make(value: bytes) -> str:
        made.append(f"outrider-test-{os.getpid()}-{len(made)}")
        with open(f"{SHARED_MEMORY}/{made[-1]}", "wb") as file:
            file.write(value)
        return made[-1]

    yield make
    for name in made:
        os.unlink(f"{SHARED_MEMORY}/{name}")


def read(name: str, most: int = 1 << 30, on_piece=lambda: None) -> bytes:
    pieces = []
    sizes = []

    def write(piece: memoryview) -> None:
        pieces.append(bytes(piece))
        on_piece()

    read_shared_memory(name, sizes.append, write, most)
    value = b"".join(pieces)
    assert sizes == [len(value)]
    return value


def test_shared_memory_is_read(shm):
    value = os.urandom((1 << 20) + 5)
    name = shm(value)
    assert read(name) == read(f"/{name}") == value
    assert read(name, most=len(value)) == value
    assert read(shm(b"")) == b""
    with pytest.raises(AdapterError, match="--max-lora-bytes"):
        read(name, most=len(value) - 1)


@pytest.mark.parametrize(
    "name", ["", "/", ".", "..", "../etc/passwd", "a/b", "//etc", ".hidden", "a\0b", "a\nb", "x" * 256]
)
def test_a_name_is_no_path(name):
    with pytest.raises(AdapterError) as caught:
        read(name)
    assert caught.value.param == "lora_shm"
    assert "without a path" in caught.value.message


def test_what_is_no_shared_memory(shm, tmp_path):
    for name, make in (("link", lambda path: os.symlink(f"{SHARED_MEMORY}/{shm(b'x')}", path)), ("pipe", os.mkfifo)):
        path = f"{SHARED_MEMORY}/outrider-test-{os.getpid()}-{name}"
        make(path)
        try:
            with pytest.raises(AdapterError) as caught:
                read(os.path.basename(path))
        finally:
            os.unlink(path)
        assert caught.value.param == "lora_shm"
    with pytest.raises(AdapterError, match="No such file"):
        read("outrider-test-nothing")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_size_that_changes_meanwhile(shm, change):
    size = 3 << 20
    name = shm(bytes(size))
    with pytest.raises(AdapterError, match="changed its size"):
        read(name, on_piece=lambda: os.truncate(f"{SHARED_MEMORY}/{name}", size + change * (1 << 20)))
