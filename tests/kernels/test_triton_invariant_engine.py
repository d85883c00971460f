"""An engine with `batch_invariant` on the path of a GPU: the same texts and log-probabilities, bit for bit, alone and
in a batch, with drafts and without, with two adapters and without one, launch by launch and in graphs. On a CPU
Triton's kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from outrider import LoRARequest, SamplingParams
from outrider.kernels import act_and_mul, noise, penalties, rms_norm, sampling, verification
from outrider.kernels.linear import device_invariant
from outrider.kernels.linear import invariant as linear
from outrider.kernels.paged_attention import invariant as units
from outrider.kernels.paged_attention import schedule
from outrider.kernels.sampling import triton as filter_kernel
from outrider.lora.device import arena, batching, vectors
from outrider.models import attention, decoder
from outrider.models.attention.triton import TritonAttention, TritonInvariantAttention
from outrider.models.pass_graphs import PassGraphs
from outrider.models.pass_grid import PassLimits
from outrider.platform.core.config import EngineArgs
from outrider.platform.core.messages import EngineRequest
from outrider.platform.engine import setup
from outrider.platform.engine.engine_core import EngineCore
from outrider.platform.engine.sampling import sampler

from .call_tape import graph_backend, without_native_kernels
from .test_graphs_engine import write_adapter, write_model

pytestmark = pytest.mark.usefixtures("row_products")

PASSES = {
    *("invariant_kernel", "invariant_attention_kernel", "write_kernel", "_rms_norm_kernel", "_act_and_mul_kernel"),
    *("shrink_kernel", "expand_kernel"),
}
"""All kernels of the target's passes. Each of the last two has a constant SINGLE, which is 0 if it is invariant."""
SAMPLING = {"_filter_kernel", "_stats_kernel", "_stats_reduce_kernel", "_verify_kernel", "_logprobs_kernel"}
"""Kernels that compute a row of logits by itself. The sums of the second and third have an order that depends on the
number of rows; they are read for requests without a seed alone."""
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "_softmax", "_log_softmax", "mean", "sum"}
"""Operations of torch that add up numbers, in an order that is a library's."""
PROMPTS = [[5, 6, 7, 8] * 10, [9, 3] * 4, [40, 41, 40, 41, 40]]
TOKENS = 7

Outcome = tuple[list[int], list[Any], int]
"""Tokens of a request, their log-probabilities, and the number of drafts that were verified."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("invariant")
    return {
        "target": write_model(root / "target", 1),
        "narrow": write_adapter(root / "narrow", 3, 1, ["q_proj", "down_proj"]),
        "wide": write_adapter(root / "wide", 17, 1, ["q_proj", "v_proj"], head=True),
    }


@pytest.fixture(autouse=True)
def gpu_path(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices of a CUDA device."""
    if device == "cuda":
        return
    for module in (arena, batching, vectors):
        monkeypatch.setattr(module, "is_grouped", lambda dtype, device: True)
    for module in (act_and_mul, linear, noise, penalties, rms_norm, sampler, sampling, verification):
        monkeypatch.setattr(module, "use_triton", lambda x: True)
    use_attention(TritonInvariantAttention, monkeypatch)
    monkeypatch.setattr(decoder, "adds_residuals", lambda device: True)
    # Few keys have several units and splits.
    monkeypatch.setattr(units, "UNIT_KEYS", 32)
    for module in (units, schedule):
        monkeypatch.setattr(module, "INVARIANT_SPLITS", 2)
    # The interpreter is done sooner with small blocks.
    monkeypatch.setattr(filter_kernel, "DEFAULT", replace(filter_kernel.DEFAULT, block=128))
    without_native_kernels(monkeypatch)


def use_attention(backend: type[TritonAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    def best_backend(spec: attention.AttentionSpec, *, batch_invariant: bool) -> type[TritonAttention]:
        assert batch_invariant
        return backend

    monkeypatch.setattr(attention, "best_backend", best_backend)


class _Operations(TorchDispatchMode):
    """Names of torch's operations."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@contextmanager
def launches(found: dict[str, list[dict[str, Any]]], operations: set[str]) -> Iterator[None]:
    """Collect the constants of each kernel's launches, and the names of torch's operations outside of kernels."""
    from triton.runtime.interpreter import GridExecutor

    call = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        found.setdefault(executor.fn.__name__, []).append(kwargs)
        with torch.utils._python_dispatch._disable_current_modes():
            return call(executor, *args, **kwargs)

    GridExecutor.__call__ = launch
    try:
        with _Operations(operations):
            yield
    finally:
        GridExecutor.__call__ = call


class Texts:
    """Texts of one engine."""

    def __init__(self, files: dict[str, Path], device: str, *, drafts: bool = False, cache: str = "auto") -> None:
        self._engine = EngineCore(
            EngineArgs(
                model=str(files["target"]), device=device, dtype="bfloat16" if device == "cuda" else "float32",
                load_format="dummy", max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=40, seed=0,
                enable_lora=True, max_loras=2, max_lora_rank=20, batch_invariant=True, enable_prefix_caching=False,
                speculative_config={"method": "ngram", "num_speculative_tokens": 2} if drafts else None,
                kv_cache_dtype=cache,
            )
        )  # fmt: skip
        self._loras = [None, *(LoRARequest(name, path=str(files[name])) for name in ("narrow", "wide"))]
        for lora in self._loras[1:]:
            assert lora is not None
            self._engine.adapters.load(lora, pinned=True)

    def __call__(self, indices: Sequence[int], num_tokens: int = TOKENS) -> list[Outcome]:
        """Outcomes of these prompts together; the first one is sampled with a seed, the others are greedy."""
        found: dict[str, Outcome] = {}
        for index in indices:
            sampled = {"temperature": 0.8, "top_p": 0.9, "seed": 7} if index == 0 else {"temperature": 0.0}
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=20, **sampled)
            request = EngineRequest(str(index), PROMPTS[index], params, lora=self._loras[index])
            self._engine.add_request(request)
            found[str(index)] = [], [], 0
        while self._engine.has_work():
            for delta in self._engine.step():
                assert delta.error is None
                tokens, logprobs, drafts = found[delta.request_id]
                logprobs += delta.logprobs or []
                found[delta.request_id] = tokens + delta.token_ids, logprobs, drafts + delta.num_draft_tokens
        return list(found.values())

    def close(self) -> None:
        self._engine.check_integrity()
        self._engine.shutdown()


@pytest.fixture
def make_texts(files: dict[str, Path], device: str) -> Iterator[Callable[..., Texts]]:
    made: list[Texts] = []

    def make(**options: Any) -> Texts:
        made.append(Texts(files, device, **options))
        return made[-1]

    yield make
    for texts in made:
        texts.close()


def said(outcomes: list[Outcome]) -> list[tuple[list[int], list[Any]]]:
    return [(tokens, logprobs) for tokens, logprobs, _ in outcomes]


_alone: list[list[tuple[list[int], list[Any]]]] = []


@pytest.fixture
def alone(make_texts: Callable[..., Texts], gpu_path: None, row_products: None) -> list[tuple[list[int], list[Any]]]:
    """Outcome of each prompt alone, without drafts; made once."""
    if not _alone:
        texts = make_texts()
        _alone.append([said(texts([index]))[0] for index in range(len(PROMPTS))])
    return _alone[0]


def test_batch_with_drafts_is_invariant(make_texts: Callable[..., Texts], alone: list[Any], device: str) -> None:
    assert len({tuple(tokens) for tokens, _ in alone}) == len(PROMPTS)
    found: dict[str, list[dict[str, Any]]] = {}
    operations: set[str] = set()
    texts = make_texts(drafts=True)
    if device == "cuda":
        outcomes = texts(range(len(PROMPTS)))
    else:
        with launches(found, operations):
            outcomes = texts(range(len(PROMPTS)))
        assert set(found) == PASSES | SAMPLING
        assert {launch["SINGLE"] for name in ("shrink_kernel", "expand_kernel") for launch in found[name]} == {0}
        assert "embedding" in operations
        assert operations & PRODUCTS == set()
    assert sum(drafts for _, _, drafts in outcomes) > 4
    assert said(outcomes) == alone
    assert said(texts([2])) == alone[2:]


def test_a_batch_in_graphs_equals_alone(
    make_texts: Callable[..., Texts], alone: list[Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = PassLimits(4, 64, max_tokens=16, max_drafts=2, graphs_per_shape=2)
    graphs = PassGraphs(graph_backend(device, lazily=True), limits)
    monkeypatch.setattr(setup, "make_graphs", lambda config: graphs)
    found = said(make_texts(drafts=True)(range(len(PROMPTS)), 5))
    assert found == [(tokens[:5], logprobs[:5]) for tokens, logprobs in alone]
    assert graphs.num_replayed >= 3


def test_an_fp8_cache_is_invariant_too(make_texts: Callable[..., Texts], alone: list[Any]) -> None:
    """Every query reads its keys from the cache, those of its own step too."""
    texts = make_texts(cache="fp8")
    expected = [said(texts([index], 4))[0] for index in range(len(PROMPTS))]
    assert expected != [(tokens[:4], logprobs[:4]) for tokens, logprobs in alone], "the cache is rounded"
    assert said(texts(range(len(PROMPTS)), 4)) == expected
    assert said(make_texts(drafts=True, cache="fp8")(range(len(PROMPTS)), 4)) == expected


@pytest.mark.parametrize("bug", ["attention", "adapters", "products"])
def test_batch_dependent_summation_order_is_detected(
    bug: str, make_texts: Callable[..., Texts], alone: list[Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":
        pytest.skip("the differences are those of the interpreter")
    if bug == "attention":
        use_attention(TritonAttention, monkeypatch)
    elif bug == "adapters":
        groups = batching.RowGroups
        monkeypatch.setattr(batching, "RowGroups", lambda *args, invariant: groups(*args))
    else:
        multiply = device_invariant.TritonInvariantLinear._multiply

        def turned(linear: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            if len(x) != len(PROMPTS):
                return multiply(linear, x, *rest)
            other = device_invariant.TritonInvariantLinear(linear._weight.flip(1), None)
            return multiply(other, x.flip(1), *rest)

        monkeypatch.setattr(device_invariant.TritonInvariantLinear, "_multiply", turned)
    found = said(make_texts()(range(len(PROMPTS)), 3))
    assert found != [(tokens[:3], logprobs[:3]) for tokens, logprobs in alone]
