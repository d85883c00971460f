"""`batch_invariant=True` in bfloat16: the same bytes and log-probabilities whatever else a step computes."""

from __future__ import annotations

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.models.demo import DEMO_ADAPTER_NAMES, demo_adapters, demo_draft_path

TOKENS = 24


def jobs(prompts, seed: int | None = None, adapters=()):
    """A job for each prompt; the adapters in turn, the base model too."""
    owners = [None, *adapters]
    made = []
    for i, prompt in enumerate(prompts):
        sampling = {"temperature": 0.0} if seed is None else {"temperature": 0.9, "top_p": 0.95, "seed": seed + i}
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=3, **sampling)
        made.append((prompt, params, owners[i % len(owners)]))
    return made


def said(outcomes):
    assert all(outcome.error is None for outcome in outcomes)
    return [(outcome.token_ids, outcome.logprobs) for outcome in outcomes]


@pytest.fixture(scope="module")
def tiny_texts(models, run, prompts):
    """Each job alone, whole prompts, no speculation, no prefix cache."""
    from outrider.platform.core.config import EngineArgs
    from outrider.platform.engine.engine_core import EngineCore

    engine = EngineCore(EngineArgs(**options(models, enable_prefix_caching=False)))
    loras = [models.lora(name) for name in "abc"]
    texts = {}
    for seed in (None, 7):
        texts[seed] = [said(run(engine, [job]))[0] for job in jobs(prompts, seed, loras)]
    engine.shutdown()
    return texts


def options(models, **changed):
    values = {"model": str(models.target), "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 8, "seed": 1}
    return values | {"batch_invariant": True, "enable_lora": True, "max_loras": 3, "max_lora_rank": 8} | changed


@pytest.mark.parametrize(
    ("method", "k", "caching"),
    [
        *((None, 0, caching) for caching in (True, False)),
        *((method, k, True) for method in ("ngram", "draft_model") for k in (1, 5)),
        *((method, 4, True) for method in ("suffix", "eagle", "eagle3", "medusa")),
        *((method, 4, False) for method in ("draft_model", "eagle3")),
    ],
)
def test_mixed_adapters_speculation_and_caching_give_the_bytes_of_each_alone(
    models, make_engine, run, prompts, tiny_texts, method, k, caching
):
    """First computed, then from the prefix cache, if there is one."""
    changed = {"speculative_config": models.speculative(method, k), "enable_prefix_caching": caching}
    engine = make_engine(**options(models, **changed))
    for seed, texts in tiny_texts.items():
        wanted = jobs(prompts, seed, [models.lora(name) for name in "abc"])
        assert said(run(engine, wanted)) == texts
        again = run(engine, wanted[::-1])[::-1]
        assert said(again) == texts
        assert (method is None) == all(outcome.speculation is None for outcome in again)
        assert any(outcome.num_cached_tokens for outcome in again) == caching


@pytest.mark.parametrize("budget", [8, 13])
def test_chunked_prompts_give_the_same_bytes(models, make_engine, run, prompts, tiny_texts, budget):
    engine = make_engine(**options(models, max_num_batched_tokens=budget, max_num_seqs=4))
    assert said(run(engine, jobs(prompts, None, [models.lora(name) for name in "abc"]))) == tiny_texts[None]


@pytest.fixture(scope="module")
def vocabulary_adapter(models, tmp_path_factory):
    """An adapter on the embeddings and the head too."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(5)
    modules = ["q_proj", "down_proj", "embed_tokens", "lm_head"]
    lora = LoraConfig(r=5, lora_alpha=10, target_modules=modules, init_lora_weights=False)
    base = LlamaForCausalLM.from_pretrained(models.target)
    get_peft_model(base, lora).save_pretrained(folder, save_embedding_layers=False)
    return LoRARequest("vocabulary", path=str(folder))


def test_adapters_on_embeddings_and_head(models, make_engine, run, prompts, vocabulary_adapter):
    adapters = [models.lora("a"), vocabulary_adapter, models.lora("b")]
    wanted = jobs(prompts, 3, adapters)
    engine = make_engine(**options(models, enable_prefix_caching=False))
    alone = [said(run(engine, [job]))[0] for job in wanted]
    base = said(run(engine, [(prompts[2], wanted[2][1], None)]))[0]
    assert alone[2] != base  # the adapter does something
    config = models.speculative("draft_model", 3)
    for changed in ({}, {"speculative_config": config}, {"max_num_batched_tokens": 11}):
        assert said(run(make_engine(**options(models, **changed)), wanted)) == alone


QUESTIONS = [
    "What is the capital of Portugal?",
    "Anna from Lisbon ordered 3 green lamps for 42 euros.",
    "Show the names of all customers from Lisbon.",
    "My name is Anna and my lamp arrived broken.",
    "Tell me about the planet Mars. " * 6,
    "Tom from Oslo ordered 2 blue chairs for 80 euros.",
    "How many orders were placed by each customer?",
    "Where is my order 4711?",
]


class Demo:
    """The embedded model with its adapters in bfloat16."""

    def __init__(self, *, batch_invariant: bool = True, **options) -> None:
        values = {"dtype": "bfloat16", "enable_lora": True, "max_num_seqs": 8, "max_model_len": 512}
        self._llm = LLM(batch_invariant=batch_invariant, **(values | options))

    def ask(self, seed: int | None, numbers: list[int]):
        """Token ids and log-probabilities of the questions of these numbers, together in one batch."""
        sampling = {"temperature": 0.0} if seed is None else {"temperature": 0.8, "seed": seed}
        params = SamplingParams(max_tokens=32, ignore_eos=True, logprobs=2, **sampling)
        owners = [None, *DEMO_ADAPTER_NAMES]
        loras = [LoRARequest(o, path=str(demo_adapters()[o])) if o else None for o in owners]
        outputs = self._llm.chat(
            [[{"role": "user", "content": QUESTIONS[i]}] for i in numbers],
            params,
            lora_request=[loras[i % len(owners)] for i in numbers],
            use_tqdm=False,
        )
        return [
            (o.outputs[0].token_ids, [{t: p.logprob for t, p in step.items()} for step in o.outputs[0].logprobs])
            for o in outputs
        ]

    def close(self) -> None:
        self._llm.shutdown()


@pytest.fixture
def make_demo():
    made = []

    def make(**options) -> Demo:
        made.append(Demo(**options))
        return made[-1]

    yield make
    for demo in made:
        demo.close()


@pytest.fixture(scope="module")
def demo_alone():
    """Answers to each question alone, by the seed."""
    demo = Demo(enable_prefix_caching=False)
    texts = {seed: [demo.ask(seed, [i])[0] for i in range(len(QUESTIONS))] for seed in (None, 5)}
    demo.close()
    return texts


DEMO_OPTIONS = {
    "off": {},
    "chunked": {"max_num_batched_tokens": 16},
    "uncached": {"enable_prefix_caching": False},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "drafts": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 5}},
}


@pytest.mark.parametrize("name", DEMO_OPTIONS)
def test_demo_text_does_not_depend_on_the_batch(make_demo, demo_alone, name):
    changed = {key: dict(value) if isinstance(value, dict) else value for key, value in DEMO_OPTIONS[name].items()}
    if name == "drafts":
        changed["speculative_config"]["model"] = str(demo_draft_path())
    demo = make_demo(**changed)
    for seed, alone in demo_alone.items():
        assert demo.ask(seed, list(range(8))) == alone
        assert demo.ask(seed, [6, 1, 4]) == [alone[i] for i in (6, 1, 4)]


def test_log_probabilities_depend_on_the_batch_without_invariance(make_demo, monkeypatch):
    """With PyTorch's attention: the C++ kernel is invariant, and at this model's size the linears may happen to be."""
    monkeypatch.setattr("outrider.models.attention.native.is_native", lambda *_: False)
    demo = make_demo(batch_invariant=False, enable_prefix_caching=False)
    alone = [demo.ask(None, [i])[0] for i in range(8)]
    assert demo.ask(None, list(range(8))) != alone
