"""Siblings, stops and bad words under every drafter and through `LLM`: the same sequences and finish reasons."""

from __future__ import annotations

import pytest

from outrider import LLM, SamplingParams
from outrider.platform.client import llm_engine as llm_module
from outrider.platform.core.config import EngineArgs

from .conftest import VOCAB

METHODS = ["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa"]
OFF = {"method": "off"}
# Of so few tokens that n-grams match.
FREE = SamplingParams(n=2, seed=3, temperature=0.7, max_tokens=32, ignore_eos=True, allowed_token_ids=[*range(30, 42)])
MIN_TOKENS = 6


@pytest.fixture(scope="module")
def generate(models, prompts):
    """generate(speculative_config, params of each prompt) -> (its outputs, counts of drafts)."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{token}": token for token in range(VOCAB)}
    core = Tokenizer(WordLevel(words, unk_token="w2"))
    core.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)

    def generate(speculative, params):
        args = EngineArgs(
            model=str(models.target), dtype="float32", max_model_len=128, seed=1, speculative_config=speculative
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm_module, "load_text_side", lambda args, info: (tokenizer, [1]))
            with LLM.from_engine_args(args) as llm:
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert not llm.llm_engine.engine_core.has_work()
                llm.llm_engine.engine_core.check_integrity()
                return outputs, [entry.counts for entry in llm.stats().speculation]

    return generate


def sequences(outputs):
    return [[(s.text, s.token_ids, s.finish_reason, s.stop_reason) for s in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def reference(generate):
    """The parameters of each prompt, and its sequences without speculation.

    Forbidden are early tokens of the first sequence. Of the stop strings one is from the middle of its text
    then, from inside one token to inside another; one comes before the text may end.
    """
    params = []
    free, _ = generate(OFF, FREE)
    for output in free:
        words = output.outputs[0].text.split()
        params.append(FREE.clone(bad_words=[words[3], " ".join(words[8:10])], min_tokens=MIN_TOKENS))
    texts = [output.outputs[0].text for output in generate(OFF, params)[0]]
    for index, text in enumerate(texts):
        words, middle = text.split(), len(text) // 2
        params[index] = params[index].clone(stop=[" ".join(words[1:3]), text[middle - 3 : middle + 3]])
    said = sequences(generate(OFF, params)[0])
    for one, text in zip(said, texts, strict=True):
        first, _ = one
        assert text.startswith(first[0])
        assert len(first[1]) > MIN_TOKENS, "the early stop string is too early"
    return params, said


def test_stop_strings_bad_words_and_siblings(reference):
    """The reference of the comparison below has stops and several texts."""
    params, said = reference
    assert sum(first[2:] == ("stop", p.stop[1]) for (first, _), p in zip(said, params, strict=True)) >= 4
    assert {reason for both in said for *_, reason, _ in both} == {"stop", "length"}
    assert all(one[1] != other[1] for one, other in said)


@pytest.mark.parametrize("method", METHODS)
def test_the_sequences_are_those_without_speculation(models, generate, reference, method):
    params, said = reference
    outputs, counts = generate(models.speculative(method, 4), params)
    assert sequences(outputs) == said
    assert all(output.metrics.num_draft_tokens > 0 for output in outputs)
    assert sum(c.num_accepted_tokens for c in counts) > 0
    assert any(any(s.drafted) for output in outputs for s in output.outputs if s.finish_reason == "stop")
