"""A head that was trained here drafts in the engine: more is accepted than from an untrained one, and the text stays
the same."""

import pytest

from outrider import LLM, LoRARequest, SamplingParams
from outrider.spec_decode.training.run import train_draft

from .counting import counting_samples, save_counting_target

K = 3


def run_engine(target, prompts, speculative_config=None, lora=None):
    """(texts as token ids, accepted drafts a round) of a greedy float32 engine."""
    options = {"speculative_config": speculative_config, "dtype": "float32", "max_model_len": 128, "enable_lora": True}
    with LLM(target, max_num_seqs=4, num_gpu_blocks_override=64, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, lora, use_tqdm=False)
        counts = [entry.counts for entry in llm.stats().speculation]
    rounds = sum(c.num_verifications for c in counts)
    accepted = sum(c.num_accepted_tokens for c in counts)
    return [list(o.outputs[0].token_ids) for o in outputs], accepted / max(1, rounds)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train the EAGLE-3 head of both tests once: (its folder, the measurements of training)."""
    folder, measured = tmp_path_factory.mktemp("head"), []

    def train(options, samples):
        if not measured:
            chosen = options("eagle3", steps=60, output=str(folder), lr=5e-3, k=K)
            measured.append(train_draft(chosen, samples, samples[:8]))
        return str(folder), measured[0]

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "rise"), [("eagle3", 0.5), ("eagle", 0.5), ("medusa", 2.0), ("dflash", 0.3), ("dspark", 0.5)]
)
def test_training_raises_acceptance_in_the_engine(method, rise, options, samples, folders, trained, tmp_path):
    target, training = folders.target, {"lr": 5e-3, "unroll": K}
    if method == "medusa":  # its heads begin as the target's own, which is right wherever a text repeats a token
        target, samples = str(tmp_path / "target"), counting_samples()
        save_counting_target(tmp_path / "target")
        training = {"lr": 1e-2, "medusa_heads": K}
    if method in ("dflash", "dspark"):
        training = {"lr": 1e-2, "block_size": K + (method == "dflash"), "draft_layers": 1}
    prompts = [s.token_ids[: s.num_prompt_tokens] for s in samples[:8]]
    plain, _ = run_engine(target, prompts)
    accepted, measured = [], []
    for changes in ({"steps": 1, "lr": 1e-9}, {"steps": 60}):
        folder = str(tmp_path / str(changes["steps"]))
        if method == "eagle3" and changes["steps"] == 60:
            folder, found = trained(options, samples)
        else:
            chosen = options(method, model=target, output=folder, k=K, **training | changes)
            found = train_draft(chosen, samples, samples[:8])
        measured.append(found)
        config = {"method": method, "model": folder, "num_speculative_tokens": K}
        text, rate_in_engine = run_engine(target, prompts, config)
        assert text == plain
        accepted.append(rate_in_engine)
    assert accepted[1] > accepted[0] + rise
    # the same figure as training reports, but for bfloat16 files and the drafts past the end that the engine counts
    assert accepted == pytest.approx([found.acceptance_length - 1 for found in measured], abs=0.25)
    assert measured[1].loss < measured[0].loss - 0.03


@pytest.mark.slow
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_draft_weights_raise_acceptance_of_their_adapter(method, options, samples, folders, trained, tmp_path):
    if method == "eagle3":
        head, _ = trained(options, samples)
    else:
        head = str(tmp_path / "head")
        sizes = {"block_size": K + (method == "dflash"), "draft_layers": 1}
        train_draft(options(method, output=head, steps=60, lr=1e-2, k=K, **sizes), samples, samples[:8])
    prompts = [s.token_ids[: s.num_prompt_tokens] for s in samples[:8]]
    adapter = LoRARequest("a", path=folders.adapter)
    plain, _ = run_engine(folders.target, prompts, None, adapter)
    texts = [
        s._replace(token_ids=p + t, num_prompt_tokens=len(p)) for s, p, t in zip(samples, prompts, plain, strict=False)
    ]
    more = {"draft": head, "adapter": folders.adapter, "rank": 8, "lr": 2e-2, "steps": 80}
    more |= {"unroll": 3 if method == "eagle3" else None}
    train_draft(options("draft-lora", output=str(tmp_path / "lora"), k=K, **more), texts, texts)
    config = {"method": method, "model": head, "num_speculative_tokens": K}
    without, before = run_engine(folders.target, prompts, config, adapter)
    own = LoRARequest("a", path=folders.adapter, draft_path=str(tmp_path / "lora"))
    with_own, after = run_engine(folders.target, prompts, config, own)
    assert without == with_own == plain
    assert after > before + 0.3
