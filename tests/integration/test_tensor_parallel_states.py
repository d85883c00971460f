"""Any order of requests, aborts, loads, unloads and pins over two ranks: each text is that of a single process.

The cache has room for two requests and the device for some of three adapters, so requests preempt each other and
adapters move. A name may be loaded with new content while requests of the old one run.
"""

from __future__ import annotations

import contextlib
import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import InvalidUserInputError
from outrider.platform.core.messages import EngineRequest

from ..thread_ranks import ranks_as_threads

NAMES = st.sampled_from("xyz")
CONTENTS = st.sampled_from("abc")
OPTIONS = {
    "tensor_parallel_size": 2, "max_model_len": 96, "num_gpu_blocks_override": 7, "max_num_seqs": 4,
    "max_num_batched_tokens": 48, "enable_lora": True, "max_loras": 1, "max_lora_rank": 8,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "device": "cpu",
}  # fmt: skip


def test_any_order_over_two_ranks(models, make_engine, prompts, plain_tokens, monkeypatch):
    ranks_as_threads(monkeypatch)
    engine = make_engine(**OPTIONS)
    numbers, num_aborted = itertools.count(), []

    class Machine(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.contents, self.jobs, self.tokens, self.running = {}, {}, {}, []

        @initialize()
        def start(self):
            """Two long requests, which preempt each other, and two whose adapters have no room together."""
            for name, content in (("x", "a"), ("y", "b")):
                self.load(name, content, pinned=False)
            for name in (None, None, "x", "y"):
                self._add(name, prompts[3], None)

        @rule(name=NAMES, content=CONTENTS, pinned=st.booleans())
        def load(self, name, content, pinned):
            request = LoRARequest(name, path=models.adapters[content])
            with contextlib.suppress(InvalidUserInputError):  # no room in addition to the pinned ones
                engine.adapters.load(request, load_inplace=True, pinned=pinned)
                self.contents[name] = content

        @precondition(lambda self: self.contents)
        @rule(data=st.data())
        def unpin(self, data):
            engine.adapters.unpin(data.draw(st.sampled_from(sorted(self.contents))))

        @precondition(lambda self: self.contents)
        @rule(data=st.data())
        def unload(self, data):
            name = data.draw(st.sampled_from(sorted(self.contents)))
            engine.adapters.unload(name)
            del self.contents[name]

        @rule(data=st.data(), prompt=st.sampled_from(prompts), seed=st.sampled_from([None, 3]))
        def add(self, data, prompt, seed):
            self._add(data.draw(st.sampled_from([*sorted(self.contents), None])), prompt, seed)

        def _add(self, name, prompt, seed):
            params = SamplingParams(temperature=0 if seed is None else 0.8, seed=seed, max_tokens=20, ignore_eos=True)
            key = str(next(numbers))
            lora = None if name is None else LoRARequest(name, path=models.adapters[self.contents[name]])
            engine.add_request(EngineRequest(key, list(prompt), params, [1], lora=lora))
            self.jobs[key] = prompt, params, models.lora(None if name is None else self.contents[name])
            self.tokens[key] = []
            self.running.append(key)

        @precondition(lambda self: self.running)
        @rule(data=st.data())
        def abort(self, data):
            key = data.draw(st.sampled_from(self.running))
            engine.abort([key])
            self.running.remove(key)
            num_aborted.append(key)

        @rule(count=st.integers(1, 6))
        def step(self, count):
            for _ in range(count):
                self._step()

        def _step(self):
            for delta in engine.step() if engine.has_work() else ():
                assert delta.error is None
                self.tokens[delta.request_id] += delta.token_ids
                if delta.finish_reason is not None:
                    self.running.remove(delta.request_id)

        @invariant()
        def books_agree(self):
            engine.check_integrity()

        def teardown(self):
            while self.running:
                self._step()
            for name in self.contents:
                engine.adapters.unload(name)
            expected = plain_tokens(list(self.jobs.values()))
            for (key, tokens), whole in zip(self.tokens.items(), expected, strict=True):
                assert tokens == whole[: len(tokens)]
                assert key in num_aborted or len(tokens) == 20

    options = settings(max_examples=6, stateful_step_count=25, derandomize=True, database=None, deadline=None)
    run_state_machine_as_test(Machine, settings=options)
    stats = engine.stats()
    assert stats.num_preemptions
    assert stats.lora_evictions["device"]
    assert num_aborted
