"""UNO in engines: the drafts are those of a reference, whatever the schedule, the adapters and their draft weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.platform.core.errors import InvalidRequestError
from outrider.spec_decode.drafters.uno import noise_token

from ..tiny_families import FAMILIES, build
from ..uno_reference import UnoReference
from .conftest import TARGETS, VOCAB
from .drafted import GREEDY, SCHEDULES, SEEDED, check_batch, check_schedule, counts, serve

K = 4


def merged(models, folder: str | Path):
    """The base model with a LoRA merged into it."""
    from peft import PeftModel

    return PeftModel.from_pretrained(models.reference(), folder).merge_and_unload()


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """A draft LoRA of the base model with random weights, which changes what is drafted."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    lora = LoraConfig(r=6, lora_alpha=12, target_modules=TARGETS, init_lora_weights=False)
    path = tmp_path_factory.mktemp("uno") / "lora"
    get_peft_model(models.reference(), lora).save_pretrained(path)
    return path


def speculative(folder: Path, **more) -> dict:
    return {"method": "uno", "model": str(folder), "num_speculative_tokens": K} | more


def noise(stop: int):
    return lambda position: noise_token(position, stop)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_drafts_are_those_of_the_reference(models, folder, make_engine, plain_tokens, prompts, schedule):
    reference = UnoReference(models.reference(), merged(models, folder), noise(VOCAB))
    jobs = [(prompt, params) for prompt in prompts for params in (GREEDY, SEEDED)]
    engine = make_engine(speculative_config=speculative(folder), **SCHEDULES[schedule])
    checked = check_schedule(engine, schedule, reference, plain_tokens, jobs)
    assert max(checked, default=0) == K or schedule == "overlapped"
    drafted, accepted = counts(engine)
    assert 0 < accepted < drafted


def test_each_adapter_drafts_with_its_own_weights_or_the_bases(models, folder, make_engine, plain_tokens, prompts):
    """In one batch: the base model, adapters with draft weights, and one without. The last token of each is read under
    its adapter, the noise under draft weights alone."""
    drafter = merged(models, folder)
    reference = {None: UnoReference(models.reference(), drafter, noise(VOCAB))}
    for name in ("a", "b", "c"):
        own = Path(models.adapters[name]) / "draft" / "uno"
        reads_noise = merged(models, own) if own.exists() else drafter
        reference[name] = UnoReference(merged(models, models.adapters[name]), reads_noise, noise(VOCAB))
    engine = make_engine(speculative_config=speculative(folder), enable_lora=True, max_loras=3, max_lora_rank=8)
    checked = check_batch(engine, reference, plain_tokens, prompts, models.lora, models.lora)
    assert {(name, K) for name in reference} <= set(checked)
    assert engine.stats().prefix_cache_hits > 0
    with_base = UnoReference(reference["a"].model, drafter, noise(VOCAB))
    found = [one.logits(prompts[1], K).argmax(-1).tolist() for one in (reference["a"], with_base)]
    assert found[0][0] == found[1][0]
    assert found[0] != found[1], "draft weights of an adapter change what is drafted"


def test_adapters_are_evicted_with_their_draft_weights(models, folder, make_engine, plain_tokens, prompts):
    """The rows are enough for one adapter of rank 8 and its draft weights: the adapters take turns."""
    engine = make_engine(speculative_config=speculative(folder), enable_lora=True, max_loras=1, max_lora_rank=8)
    jobs = [(prompt, GREEDY, models.lora(name)) for prompt, name in zip(prompts, "abcabc", strict=True)]
    assert serve(engine, jobs) == plain_tokens(jobs)
    rows = {info.name: info.rows for info in engine.adapters.list()}
    assert rows == {"a": 4 + 4, "b": 8 + 2, "c": 3}
    assert counts(engine)[1] > 0


def test_a_lora_that_reads_noise_like_text_is_often_right(models, make_engine, prompts, tmp_path):
    """Trained as `train-draft` does it, for an adapter's draft weights: more drafts are right than the first of each
    step, which always is."""
    from outrider.spec_decode.training.data import Sample
    from outrider.spec_decode.training.options import TrainOptions
    from outrider.spec_decode.training.run import train_draft

    lora = models.lora("a")
    plain = make_engine(enable_lora=True, max_lora_rank=8)
    texts = [p + t for p, t in zip(prompts, serve(plain, [(p, GREEDY, lora) for p in prompts]), strict=True)]
    samples = [Sample(text, len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]
    options = TrainOptions(
        **{"method": "uno", "model": str(models.target), "adapter": lora.path, "data": "", "rank": 8},
        **{"output": str(tmp_path / "out"), "steps": 150, "lr": 1e-2, "warmup": 5, "dtype": "float32", "block_size": K},
        **{"batch_tokens": 256, "eval_every": 1000, "progress": False},
    )
    Path(options.output).mkdir()
    measured = train_draft(options, samples, samples)
    adapter = shutil.copytree(lora.path, tmp_path / "adapter", ignore=shutil.ignore_patterns("draft"))
    shutil.copytree(options.output, adapter / "draft" / "uno")
    lora = LoRARequest("tuned", path=str(adapter))
    engine = make_engine(speculative_config=models.speculative("uno", K), enable_lora=True, max_lora_rank=8)
    outputs = serve(engine, [(p, GREEDY, lora) for p in prompts])
    assert [p + t for p, t in zip(prompts, outputs, strict=True)] == texts
    (entry,) = (entry.counts for entry in engine.stats().speculation)
    length = 1 + entry.num_accepted_tokens / entry.num_verifications
    assert length > 2.5
    assert measured.acceptance_length > 2.5


def test_noise_is_drawn_below_the_given_token(models, folder, make_engine, plain_tokens, prompts):
    reference = UnoReference(models.reference(), merged(models, folder), noise(20))
    engine = make_engine(speculative_config=speculative(folder, uno_mask_token_id=20))
    jobs = [(prompt, GREEDY) for prompt in prompts]

    def check(request) -> None:
        reference.check_greedy(request.tokens, request.drafts.token_ids)

    assert serve(engine, jobs, check) == plain_tokens([(*job, None) for job in jobs])
    assert {noise_token(position, 20) for position in range(2000)} == set(range(1, 20))


def test_adaptive_uno_falls_back_to_prompt_lookup(models, folder, make_engine, plain_tokens, prompts):
    engine = make_engine(speculative_config=speculative(folder, adaptive=True))
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    jobs = [(prompt, params) for prompt in prompts]
    assert serve(engine, jobs) == plain_tokens([(*job, None) for job in jobs])


def changed(folder: Path, to: Path, **fields) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "adapter_config.json").read_text())
    (to / "adapter_config.json").write_text(json.dumps(config | fields))
    return to


@pytest.mark.parametrize("lora", [False, True])
def test_folders_that_do_not_fit_are_refused(models, folder, make_engine, tmp_path, lora):
    other = changed(folder, tmp_path / "rank", r=5)
    whole = changed(folder, tmp_path / "whole")
    (whole / "adapter_config.json").unlink()
    nested = tmp_path / "nested" / "adapter"  # as in the authors' repositories
    shutil.copytree(folder, nested)
    for config, words in (
        (speculative(other), "lora_A is [6, 96], expected [5, 96]"),
        (speculative(whole), "no adapter_config.json"),
        (speculative(models.draft), "no adapter_config.json"),
        (speculative(folder, uno_mask_token_id=VOCAB + 1), f"uno_mask_token_id is {VOCAB + 1}"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            make_engine(speculative_config=config, enable_lora=lora)
        assert caught.value.param == "speculative_config"
        assert words in caught.value.message
    make_engine(speculative_config=speculative(nested.parent), enable_lora=lora)


def test_several_processes_and_recurrent_states_are_refused(models, folder, make_engine, tmp_path):
    with pytest.raises(InvalidRequestError, match="uno is not supported with tensor_parallel_size above 1"):
        make_engine(speculative_config=speculative(folder), tensor_parallel_size=2)
    build(FAMILIES["lfm2"]).save_pretrained(tmp_path)
    with pytest.raises(InvalidRequestError, match="layers of recurrent state, which noise would change"):
        make_engine(model=str(tmp_path), speculative_config=speculative(folder))
