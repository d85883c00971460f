"""`LLM` and `AsyncLLM` have the same verbs and parameters, but for a declared list; so have their `.adapters`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from outrider.platform.client.adapters.llm_adapters import LLMAdapters
from outrider.platform.client.adapters.loaded_adapters import LoadedAdapters
from outrider.platform.client.async_llm import AsyncLLM
from outrider.platform.client.llm import LLM
from outrider.platform.core.adapter_verbs import VERBS, AdapterVerbs
from outrider.platform.engine.features import NoAdapters

ONLY_ASYNC = {
    "start": "the process starts in the background; LLM is ready when it has been made",
    "drain": "requests of others may be running; LLM has none between two calls",
    "abort": "as drain",
    "num_running": "as drain",
    "count_speculation": "as drain: for requests that still run",
    "state": "of a process that may die and is started again",
    "failure": "as state",
    "check_health": "as state",
    "num_restarts": "as state",
    "engine_pid": "as state",
    "from_spec": "policy for restarts, see state",
    "info": "short for engine_info, for the HTTP layer",
    "input_processor": "a part for the HTTP layer",
    "requests": "a part for the HTTP layer",
    "output_processor": "a part for the HTTP layer",
    "sampling_defaults": "a part for the HTTP layer",
    "sources": "a part for the HTTP layer",
    "tokenizer": "a part for the HTTP layer; get_tokenizer is for users",
    "share_prefixes": "an operator's call, over HTTP",
}
ONE_AT_A_TIME = {"request_id", "delta"}
"""`AsyncLLM` takes one prompt and yields its outputs, under an id that `abort` takes."""
MANY = {"use_tqdm", "on_output"}
"""`LLM` takes many prompts and reports on them."""
DIFFERENT = {
    "generate": ({"prompts", *MANY}, {"prompt", *ONE_AT_A_TIME}),
    "chat": (MANY, ONE_AT_A_TIME),
    "embed": ({"prompts", "use_tqdm"}, {"prompt", "request_id"}),
    "encode": ({"prompts", "use_tqdm"}, {"prompt", "request_id"}),
    "score": ({"use_tqdm"}, set()),
    "classify": ({"prompts", "use_tqdm"}, {"prompt", "request_id"}),
    "beam_search": ({"prompts", "use_tqdm", "concurrency_limit"}, {"prompt", "request_id", "on_step"}),
}
"""Parameters that one of the two alone has: (LLM's, AsyncLLM's)."""


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}


def test_the_same_names() -> None:
    assert public(AsyncLLM) - public(LLM) == ONLY_ASYNC.keys() & public(AsyncLLM)
    assert public(LLM) - public(AsyncLLM) == set()


@pytest.mark.parametrize("name", sorted(public(LLM) & public(AsyncLLM)))
def test_the_same_parameters(name: str) -> None:
    ours, theirs = getattr(LLM, name), getattr(AsyncLLM, name)
    assert callable(ours) == callable(theirs)
    if not callable(ours):
        return
    only_ours, only_theirs = DIFFERENT.get(name, (set(), set()))
    llm, other = parameters(ours), parameters(theirs)
    assert llm.keys() - other.keys() == only_ours
    assert other.keys() - llm.keys() == only_theirs
    assert llm.items() - other.items() == {(key, llm[key]) for key in only_ours}, "the defaults are the same"


def test_both_classes_have_the_same_constructor() -> None:
    assert parameters(LLM) == parameters(AsyncLLM)


@pytest.mark.parametrize("kind", [LLMAdapters, LoadedAdapters])
@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_for_adapters(kind: type, verb: str) -> None:
    declared = getattr(AdapterVerbs, verb)
    assert parameters(getattr(kind, verb)) == parameters(declared)
    assert inspect.getdoc(declared)
    assert hasattr(NoAdapters, verb)


def test_the_protocol_declares_these_verbs_alone() -> None:
    assert tuple(name for name in vars(AdapterVerbs) if not name.startswith("_")) == VERBS


def test_methods_of_vllm_are_explained_by_both() -> None:
    for kind in (LLM, AsyncLLM):
        with pytest.raises(AttributeError, match=rf"{kind.__name__}\.reward is not there: models generate text"):
            getattr(kind.__new__(kind), "reward")  # noqa: B009
