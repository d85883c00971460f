"""A deterministic engine for the clients' tests: a sequence repeats its prompt, one step a few tokens.

Some prompts do things: see the constants. Test modules import this file by its name, and so does the engine process,
which gets the test's `sys.path`.
"""

import os
import signal
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outrider.platform.core.config import EngineArgs
from outrider.platform.core.errors import (
    AdapterError,
    ErrorInfo,
    InvalidRequestError,
    InvalidUserInputError,
    NotFoundError,
    OverloadedError,
    UnsupportedModelError,
)
from outrider.platform.core.lora_request import LoRARequest
from outrider.platform.core.messages import (
    AdapterInfo,
    EngineInfo,
    EngineRequest,
    EngineStats,
    PromptTable,
    SpeculationCounts,
    SpeculationEntry,
    TokenDelta,
    TokenLogprobs,
)
from outrider.platform.core.weight_source import WeightSource

VOCAB_SIZE = 400
MAX_MODEL_LEN = 128

# The first prompt token decides.
RAISE_IN_STEP = 390
KILL_PROCESS = 391
FAIL_REQUEST = 392
RAISE_IN_ADD = 393
NEVER_END = 394


@dataclass
class Sequence:
    request: EngineRequest
    produced: int = 0
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)

    def next_token(self) -> int:
        prompt = self.request.prompt_token_ids
        token = prompt[self.produced % len(prompt)]
        self.produced += 1
        return token


class FakeAdapters:
    """Registers any adapter; some paths and names do things."""

    def __init__(self) -> None:
        self.infos: dict[str, AdapterInfo] = {}
        self.num_registrations = 0
        self._readers = ThreadPoolExecutor(2)

    def start(self, verb: str, arguments: dict[str, Any]) -> Future[Any] | None:
        if verb != "load":
            return None
        self._check_name(arguments["request"], arguments["load_inplace"])
        return self._readers.submit(self.load, **arguments)

    def _check_name(self, request: LoRARequest, load_inplace: bool) -> None:
        if request.name in self.infos and not load_inplace:
            raise InvalidUserInputError(f"{request.name} is loaded already", param="lora_name")

    @staticmethod
    def _read(path: str) -> str:
        if path == "broken":
            raise AdapterError("the adapter is broken", param="lora_path")
        if path == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if path.startswith("once:"):  # cannot be loaded a second time
            if not Path(path[5:]).exists():
                raise AdapterError("the adapter is gone", param="lora_path")
            Path(path[5:]).unlink()
        while path.startswith("until:") and not Path(path[6:]).exists():
            time.sleep(0.01)
        return path

    def load(
        self, request: LoRARequest, *, load_inplace: bool = False, pinned: bool = False, running: str = "finish"
    ) -> AdapterInfo:
        self._check_name(request, load_inplace)
        self._read(request.path)
        content = os.path.join(request.path, "adapter_model.safetensors")
        digest = open(content).read() if os.path.exists(content) else "digest"  # noqa: SIM115
        info = AdapterInfo(request.name, request.path, digest, 8, 8, "device", pinned)
        self.infos[request.name] = info
        return info

    def register(self, requests: list[LoRARequest]) -> None:
        self.num_registrations += 1
        for request in requests:
            self._check_name(request, False)
            if request.path.startswith("once:"):
                self._read(request.path)
        for request in requests:
            self.infos[request.name] = AdapterInfo(
                request.name, request.path, "", 0, 0, "disk", draft=request.digest or ""
            )

    def unload(self, name: str, mode: str = "drain") -> None:
        if name == "kills-when-unloaded":
            os.kill(os.getpid(), signal.SIGKILL)
        self._get(name)
        if mode not in ("drain", "abort"):
            raise InvalidRequestError("mode is drain or abort", param="mode")
        del self.infos[name]

    def _get(self, name: str) -> AdapterInfo:
        if name not in self.infos:
            raise NotFoundError(f"{name} is not loaded", param="lora_name")
        return self.infos[name]

    def pin(self, name: str, *, read: Any = None) -> AdapterInfo:
        info = self.infos[name] = replace(self._get(name), pinned=True)
        return info

    def unpin(self, name: str) -> AdapterInfo:
        info = self.infos[name] = replace(self._get(name), pinned=False)
        return info

    def find(self, name: str) -> AdapterInfo | None:
        return self.infos.get(name)

    def list(self) -> Any:
        return [*self.infos.values()]


class FakeEngine:
    """Echoes; `tokens_per_step` tokens a step, `delay` seconds a step."""

    def __init__(
        self, args: EngineArgs, *, progress: bool = False, tokens_per_step: int = 1, delay: float = 0.0
    ) -> None:
        if args.model == "unsupported":
            raise UnsupportedModelError("the architecture Foo is not supported", param="model")
        if args.model == "crash":
            os._exit(7)
        if args.model == "bug":
            raise KeyError("bug")
        self.args = args
        self.tokens_per_step = tokens_per_step
        self.delay = delay
        self.sequences: dict[str, Sequence] = {}
        self.aborted: list[str] = []
        self.added: list[EngineRequest] = []
        self.adapters = FakeAdapters()
        self.num_steps = 0
        self.closed = 0
        self.pause_mode: str | None = None
        self.before_pause: list[str] = []
        self.ended: list[TokenDelta] = []
        self.info = EngineInfo(
            model=str(args.model), architecture="Fake", dtype="float32", device="cpu", vocab_size=VOCAB_SIZE,
            max_model_len=args.max_model_len or MAX_MODEL_LEN, max_logprobs=5, num_kv_blocks=1, block_size=16,
            num_parameters=0, enable_lora=args.enable_lora, max_loras=8, max_lora_rank=64, speculation="off",
            load_seconds=0.0,
        )  # fmt: skip

    def add_request(self, request: EngineRequest) -> None:
        if isinstance(request.lora, LoRARequest) and request.lora.path == "broken":
            raise AdapterError("the adapter is broken", param="lora_request")
        if request.prompt_token_ids[0] == RAISE_IN_ADD:
            raise RuntimeError("bug in add_request")
        queued = self.args.max_num_queued_reqs
        if queued is not None and self.pause_mode is not None and len(self.sequences) >= queued:
            raise OverloadedError("the queue is full")
        self.added.append(request)
        self.sequences[request.request_id] = Sequence(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.sequences.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def has_work(self) -> bool:
        return bool(self._computed() or self.ended)

    def _computed(self) -> list[Sequence]:
        """Sequences that the next step advances."""
        if self.pause_mode is None:
            return list(self.sequences.values())
        before = self.before_pause if self.pause_mode == "wait" else []
        return [self.sequences[i] for i in before if i in self.sequences]

    def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        if mode not in ("abort", "wait", "keep"):
            raise InvalidRequestError("mode must be one of abort, wait, keep", param="mode")
        if self.pause_mode is None:
            self.before_pause = list(self.sequences)
        self.pause_mode = mode
        if mode == "abort":
            gone = [i for i in self.before_pause if self.sequences.pop(i, None)]
            self.ended += [TokenDelta(i, finish_reason="abort") for i in gone]

    def resume(self) -> None:
        self.pause_mode = None

    def update_weights(self, sources: list[WeightSource], *, draft: bool = False) -> bool:
        return True

    def learn(self) -> None:
        """It has no drafter."""

    def step(self) -> list[TokenDelta]:
        ended, self.ended = self.ended, []
        self.num_steps += 1
        time.sleep(self.delay)
        deltas = [self._advance(sequence) for sequence in self._computed()]
        for delta in deltas:
            if delta.finish_reason is not None or delta.error is not None:
                del self.sequences[delta.request_id]
        return ended + deltas

    def _advance(self, sequence: Sequence) -> TokenDelta:
        request = sequence.request
        params, first = request.params, request.prompt_token_ids[0]
        if first == RAISE_IN_STEP:
            raise RuntimeError("bug in step")
        if first == KILL_PROCESS:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == FAIL_REQUEST and request.request_id.endswith(("#1", "req", "0")):
            return TokenDelta(request.request_id, error=ErrorInfo("InvalidAdapter", "the adapter is broken", "lora"))
        delta = TokenDelta(request.request_id, num_cached_tokens=3)
        if params.prompt_logprobs is not None and sequence.produced == 0:
            delta.prompt_logprobs = PromptTable()
            delta.prompt_logprobs.extend([self._logprobs(t) for t in request.prompt_token_ids[1:]])
        assert params.max_tokens is not None
        for _ in range(self.tokens_per_step):
            token = sequence.next_token()
            delta.token_ids.append(token)
            stops = set(params.stop_token_ids or ())
            ends = set() if params.ignore_eos else set(request.eos_token_ids)
            if sequence.produced > params.min_tokens and token in stops | ends:
                delta.finish_reason = "stop"
                delta.stop_reason = token if token in stops else None
            elif sequence.produced >= params.max_tokens and first != NEVER_END:
                delta.finish_reason = "length"
            if delta.finish_reason is not None:
                break
        if params.logprobs is not None:
            delta.logprobs = [self._logprobs(token) for token in delta.token_ids]
        sequence.speculation.count(2, 1)
        delta.num_accepted = len(delta.token_ids) - 1
        if delta.finish_reason is not None:
            delta.speculation = sequence.speculation
        return delta

    @staticmethod
    def _logprobs(token: int) -> TokenLogprobs:
        return TokenLogprobs([token, 5, token], [-0.5, -0.25, -0.5], 2)

    def check_integrity(self) -> None:
        assert not self.sequences, "sequences are left"

    def release_memory(self) -> None:
        self.check_integrity()

    def start_profile(self, folder: str, prefix: str) -> None:
        self.profile = os.path.join(folder, prefix)

    def stop_profile(self) -> str:
        return f"{self.profile}.json"

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.sequences), num_steps=self.num_steps, running_adapters=self.aborted,
            num_preemptions=self.adapters.num_registrations,
            speculation=[SpeculationEntry("", "", SpeculationCounts(1, 2, 1, [1, 0]))], adapters=self.adapters.list(),
        )  # fmt: skip

    def shutdown(self) -> None:
        self.closed += 1


def slow(args: EngineArgs, *, progress: bool = False) -> FakeEngine:
    """One token every 20 ms."""
    return FakeEngine(args, delay=0.02)


def fast(args: EngineArgs, *, progress: bool = False) -> FakeEngine:
    """Seven tokens a step."""
    return FakeEngine(args, tokens_per_step=7)


def starts_once(args: EngineArgs, *, progress: bool = False) -> FakeEngine:
    """Starts only while the file named by `served_model_name` exists, and removes it."""
    assert args.served_model_name is not None
    try:
        Path(args.served_model_name).unlink()
    except FileNotFoundError:
        raise UnsupportedModelError("the model is gone", param="model") from None
    return FakeEngine(args)
