"""Corpora of prompt lookup: the longest match compared with a plain search, files, and tenants kept apart."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider import LLM, SamplingParams
from outrider.models.demo import demo_model_path
from outrider.platform.core.errors import InvalidRequestError, NotFoundError
from outrider.platform.core.request import Request
from outrider.platform.core.speculative_config import parse_speculative
from outrider.spec_decode.drafters import corpus as corpus_module
from outrider.spec_decode.drafters.base import DraftRow, TargetOutput
from outrider.spec_decode.drafters.corpus import Corpora, Corpus, load_corpora
from outrider.spec_decode.drafters.ngram import NgramDrafter

MODEL = str(demo_model_path())


def longest_match(texts, last):
    """Number of tokens at the end of `last` that occur before some token of a text."""
    for n in range(len(last), 0, -1):
        if any(text[i : i + n] == last[-n:] for text in texts for i in range(len(text) - n)):
            return n
    return 0


@pytest.mark.parametrize("vocab", [2, 5, 50])
def test_the_longest_match_is_found(vocab):
    rng = random.Random(vocab)
    for _ in range(40):
        texts = [[rng.randrange(vocab) for _ in range(rng.randint(1, 40))] for _ in range(rng.randint(1, 4))]
        corpus = Corpus(texts)
        for _ in range(10):
            last = [rng.randrange(vocab) for _ in range(rng.randint(1, 9))]
            start, length = corpus.find(last, 1)
            assert length == longest_match(texts, last)
            if not length:
                assert start == -1
                continue
            found = corpus.continuation(start, 3)
            assert 1 <= len(found) <= 3
            ways = [
                (text, i + length) for text in texts for i in range(len(text)) if text[i : i + length] == last[-length:]
            ]
            assert any(text[i : i + 3] == found for text, i in ways), "no text is left, none is run over"


def test_a_shorter_match_than_is_asked_for_is_none():
    corpus = Corpus([[1, 2, 3, 4]])
    assert corpus.find([9, 2, 3], 2) == (3, 2)
    assert corpus.find([9, 2, 3], 3) == (-1, 0)
    assert corpus.find([3, 4], 1) == (-1, 0), "nothing follows"


def drafts(drafter, tenant, tokens, count=4):
    request = Request("r", [1], 1, SamplingParams(), seed_key=1, tenant=tenant)
    row = DraftRow(request, tokens, len(tokens) - 1, len(tokens) - 1, count, [], True)
    return drafter.propose([row], TargetOutput())[0].drafts.token_ids


def test_a_tenants_corpus_is_its_own():
    corpora = Corpora(Corpus([[1, 2, 3, 4, 5]]), {"acme": Corpus([[7, 1, 2, 8, 8]])})
    drafter = NgramDrafter(1, 3, corpora=corpora)
    assert drafts(drafter, "other", [7, 1, 2]) == drafts(drafter, "", [7, 1, 2]) == [3, 4, 5]
    assert drafts(drafter, "acme", [7, 1, 2]) == [8, 8]
    assert drafts(drafter, "acme", [6, 2, 3]) == [4, 5], "what all share matches more"


def test_the_own_text_comes_first_unless_less_of_it_matches():
    drafter = NgramDrafter(1, 4, corpora=Corpora(Corpus([[9, 1, 2, 3, 4, 5]]), {}))
    assert drafts(drafter, "", [1, 2, 6, 7, 1, 2], 2) == [6, 7]
    assert drafts(drafter, "", [1, 2, 6, 7, 9, 1, 2], 2) == [3, 4]


def test_a_longer_match_has_more_drafts():
    drafter = NgramDrafter(1, 3, by_match=True, corpora=Corpora(Corpus([[*range(1, 30)]]), {}))
    assert drafts(drafter, "", [50, 5], 16) == [6, 7, 8]
    assert drafts(drafter, "", [50, 3, 4, 5], 16) == [6, 7, 8, 9, 10]
    assert drafts(drafter, "", [1, 2, 3, 4, 5, 6], 16) == [*range(7, 18)], "matches are longer than prompt_lookup_max"


# --- files ----------------------------------------------------------------------------------------------------------


def engine(path, **more):
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_corpus": str(path)} | more
    return LLM(MODEL, dtype="float32", speculative_config=config)


def test_texts_are_tokenized(tmp_path):
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog.")
    with engine(tmp_path / "a.txt") as llm:
        ids = llm.get_tokenizer().encode(" quick brown fox", add_special_tokens=False)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, allowed_token_ids=ids)
        output = llm.generate({"prompt_token_ids": [700]}, params, use_tqdm=False)[0]
    assert output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"\xff\xfe", "cannot be read as text"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}', "line 2 is not an object with text, token_ids or completion"),
        ("a.jsonl", b'{"token_ids": [99999999]}', "of token ids below"),
        ("a.jsonl", b'{"text": "a\\ud800"}', "line 1 has a lone surrogate in text"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not an object"),
        ("a.txt", b" \n", "holds no text"),
        ("a.txt", b"word " * 400, "have more than 100 tokens"),
        ("a.txt", b"word " * 4000, "have more than 9,000 bytes"),
    ],
)
def test_files_that_cannot_be_used_are_named(name, content, words, tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "MAX_TOKENS", 100)
    monkeypatch.setattr(corpus_module, "MAX_BYTES", 110_000 if name == "a.jsonl" else 9000)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=rf"speculative_config: prompt_lookup_corpus: .*{words}"):
        engine(tmp_path)


def test_tokens_that_the_model_lacks_are_refused(tmp_path, monkeypatch):
    """A tokenizer may have more tokens than the model; the engine could not embed such a draft."""
    (tmp_path / "a.txt").write_text("some words")
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [5, 1_000_000])
    monkeypatch.setattr("outrider.models.checkpoint.tokenizer.load_tokenizer", lambda path: tokenizer)
    target = SimpleNamespace(config=SimpleNamespace(vocab_size=2048))
    context = SimpleNamespace(target=target, model_path=MODEL)
    config = parse_speculative({"method": "ngram", "prompt_lookup_corpus": str(tmp_path)})
    with pytest.raises(InvalidRequestError, match="the tokenizer gives token 1000000, the model has 2048"):
        load_corpora(config, context)


def test_a_path_that_is_missing_or_of_another_method(tmp_path):
    with pytest.raises(NotFoundError, match="prompt_lookup_corpus: there is no"):
        engine(tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="prompt_lookup_corpus must be a string"):
        LLM(MODEL, speculative_config={"method": "ngram", "prompt_lookup_corpus": 5})
    with pytest.raises(InvalidRequestError, match="prompt_lookup_corpus means nothing to method suffix"):
        engine(tmp_path, method="suffix")


def test_hidden_files_and_folders_are_left_out(tmp_path):
    """A mounted ConfigMap has its files in a hidden folder, and links to them."""
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "a.txt").write_bytes(b"\xff")
    (tmp_path / ".DS_Store").write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match="holds no text"):
        engine(tmp_path)


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "acme").mkdir()
    listed = Path.iterdir

    def iterdir(folder):
        if folder.name == "acme":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(InvalidRequestError, match=r"prompt_lookup_corpus: .*cannot be read: .*acme"):
        engine(tmp_path)
