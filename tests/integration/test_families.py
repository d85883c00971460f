"""Engines of every family: greedy text is that of transformers and of PEFT, with drafts, chunks, cached prefixes and
preemption. A family joins with a row in `tiny_families`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outrider import LoRARequest, SamplingParams
from outrider.models.quantization.rounding import round_int8

from ..family_records import is_recording, record
from ..tiny_families import FAMILIES, SIZES, UNKNOWN, Family, build

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
EXACT = (
    *("lora_", "wpe", "embed_positions", ".gate.", "router.", "shared_expert_gate", "kv_b_proj", "norm", "_bias"),
    *("conv.conv", "conv1d", "feed_forward.gate.", "embed_tokens_per_layer", "altup."),
)
"""Parts of names of weights that stay as they are: positions, routers, biases of experts, convolutions, inputs of
layers, mixtures of streams."""
FEW_BLOCKS = {"block_size": 16, "num_gpu_blocks_override": 14, "enable_prefix_caching": False}
"""Options of an engine that preempts some of the requests."""
SCHEDULED = (
    *("llama", "llama4", "mistral", "gemma2", "gemma3n", "gemma4", "phi4-mini", "gpt2", "opt", "falcon", "qwen2-moe"),
    *("deepseek2", "deepseek3.2", "gpt-oss", "lfm2", "qwen3.5", "kimi-linear", "mamba2", "falcon-h1", "nemotron-h"),
)
"""Families that are also served in small chunks and with few blocks: one for each kind of attention, of positions, of
caches and of states. A run that is recorded has all."""
TOLERANCE = 2e-3
"""Largest difference of a log probability: the sums of an adapter's products are rounded in another order than PEFT's,
and weights of these models are large."""


class Served:
    """A tiny model with an adapter on every projection, and requests on both."""

    def __init__(self, root, family: Family) -> None:
        from peft import LoraConfig, get_peft_model

        self.folder, adapter = str(root / "base"), str(root / "adapter")
        self._base = build(family)
        self.architecture = family.architecture or type(self._base).__name__
        self._base.save_pretrained(self.folder)
        if family.architecture is not None:
            file = root / "base" / "config.json"
            names = {"architectures": [family.architecture], "model_type": "unknown"}
            file.write_text(json.dumps(json.loads(file.read_text()) | names))
        self.saves_embeddings = "embed_tokens" in family.targets
        targets = {"target_modules": family.targets, "target_parameters": family.parameters or None}
        lora = LoraConfig(r=4, lora_alpha=3, init_lora_weights=False, **targets)
        self._tuned = get_peft_model(self._base, lora).eval()
        self._tuned.save_pretrained(adapter)
        self._logits: dict[tuple, torch.Tensor] = {}
        tokens = torch.randint(3, SIZES["vocab_size"], (60,)).tolist()
        prompts = [tokens, tokens[:40] + [5, 6, 7] * 5, [9, 8, 7] * 6, tokens[-1:]]  # no tie of routed experts
        self.jobs = [(p, GREEDY, which) for p in prompts for which in (None, LoRARequest("a", path=adapter))]

    @torch.inference_mode()
    def check(self, outcomes, jobs=None) -> list[float]:
        """transformers must choose each token after those before it, with the same probability; returns the largest
        difference of a log probability, of the base model and of the adapter."""
        pairs = list(zip(jobs or self.jobs, outcomes, strict=True))
        with self._tuned.disable_adapter():
            base = max(self._error(job, outcome) for job, outcome in pairs if job[2] is None)
        return [base, max((self._error(job, outcome) for job, outcome in pairs if job[2]), default=0.0)]

    def _error(self, job, outcome) -> float:
        prompt, _, lora = job
        tokens = prompt + outcome.token_ids[:-1]
        key = (lora is None, *tokens)
        if key not in self._logits:  # engines with other options write the same text
            self._logits[key] = self._tuned(torch.tensor([tokens])).logits[0]
        logits = self._logits[key][len(prompt) - 1 :]
        assert outcome.token_ids == logits.argmax(-1).tolist()
        theirs = torch.log_softmax(logits, -1).max(-1).values
        ours = torch.tensor([found.logprobs[0] for found in outcome.logprobs])
        torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)
        return float((ours - theirs).abs().max())

    @contextmanager
    def rounded(self) -> Iterator[None]:
        """Round the base model's weights as `quantization="int8"` does: each output of a matrix by itself."""
        kept = {name: parameter.detach().clone() for name, parameter in self._base.named_parameters()}
        logits, self._logits = self._logits, {}
        try:
            with torch.no_grad():
                for name, parameter in self._base.named_parameters():
                    if parameter.dim() >= 2 and not any(part in name for part in EXACT):
                        parameter.copy_(_rounded(parameter, self._inputs_first(name)))
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self._base.named_parameters():
                    parameter.copy_(kept[name])
            self._logits = logits

    def _inputs_first(self, name: str) -> bool:
        """True for a parameter [in, out], or [experts, in, out]."""
        module = name.rpartition(".")[0]
        owners = {
            type(self._base.get_submodule(path)).__name__ for path in (module, module.removesuffix(".base_layer"))
        }
        return bool(owners & {"Conv1D", "GptOssExperts", "Llama4TextExperts"})


def _rounded(weight: torch.Tensor, inputs_first: bool) -> torch.Tensor:
    if weight.dim() == 3:
        return torch.stack([_rounded(expert, inputs_first) for expert in weight])
    rows = weight.T if inputs_first else weight
    found = round_int8(rows).dequantized()
    return found.T if inputs_first else found


@pytest.fixture(scope="module", params=[*FAMILIES, *UNKNOWN])
def served(request, tmp_path_factory) -> Served:
    return Served(tmp_path_factory.mktemp(request.param), (FAMILIES | UNKNOWN)[request.param])


def start_engine(make_engine, served: Served, **options):
    values = {"model": served.folder, "max_model_len": 96, "enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    return make_engine(**(values | options))


def test_drafts_chunks_and_prefixes(make_engine, run, served, request):
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    engine = start_engine(make_engine, served, speculative_config=speculation, max_num_batched_tokens=64)
    first = run(engine, served.jobs)
    errors = served.check(first)
    again = run(engine, served.jobs)
    served.check(again)
    assert max(outcome.num_cached_tokens for outcome in again) >= 32
    assert sum(sum(outcome.accepted) for outcome in first) > 0
    record(served.architecture, "native", ["base", "LoRA", "speculation", "prefix cache"], errors)
    if request.node.callspec.params["served"] in SCHEDULED or is_recording():
        check_chunks(make_engine, run, served)
        check_swap(make_engine, run, served)
        record(served.architecture, "native", ["chunks", "preemption"])


def check_chunks(make_engine, run, served: Served) -> None:
    """A step computes 16 tokens, so that prompts take several steps, together with others' decodes; requests that are
    preempted are computed again."""
    engine = start_engine(make_engine, served, max_num_batched_tokens=16, max_num_seqs=4, **FEW_BLOCKS)
    served.check(run(engine, served.jobs))
    assert max(len(prompt) for prompt, *_ in served.jobs) > 48
    assert engine.stats().num_preemptions > 0


def check_swap(make_engine, run, served: Served) -> None:
    """Blocks of preempted requests are swapped."""
    engine = start_engine(make_engine, served, **FEW_BLOCKS, swap_space=0.01, preemption_mode="swap")
    served.check(run(engine, served.jobs))
    assert engine.stats().num_preemptions > 0
    assert (engine.stats().kv_host_hits > 0) == bool(engine.model.kv_layers)


def test_quantised_weights(make_engine, run, served):
    """Text of weights that were rounded to int8 while they were loaded is that of transformers with the same rounded
    weights, for the base model and for the adapter. Drafts do not change it."""
    # If the adapter's file has a copy of the table, that copy is not rounded.
    jobs = served.jobs[::2] if served.saves_embeddings else served.jobs
    speculation = {"method": "ngram", "num_speculative_tokens": 4}
    drafted = run(start_engine(make_engine, served, quantization="int8", speculative_config=speculation), jobs)
    with served.rounded():
        served.check(drafted, jobs)
    record(served.architecture, "native", ["quantised"])


@pytest.mark.parametrize("method", ["eagle", "eagle3", "medusa"])
def test_heads_share_scaled_embeddings_and_capped_logits(make_engine, run, method, tmp_path):
    """Heads of random weights change no text."""
    served = Served(tmp_path, FAMILIES["gemma2"])
    config = {"hidden_size": 48, "vocab_size": 131, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    if method == "medusa":
        config = {"hidden_size": 48, "vocab_size": 131, "medusa_num_heads": 2, "medusa_num_layers": 1}
    config |= {"num_attention_heads": 4, "intermediate_size": 64, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    served.jobs = served.jobs[::2]
    options = {"enable_lora": False, "load_format": "dummy", "max_num_seqs": 4}
    plain = run(start_engine(make_engine, served, **options), served.jobs)
    speculation = {"method": method, "model": str(tmp_path), "num_speculative_tokens": 2}
    drafted = run(start_engine(make_engine, served, speculative_config=speculation, **options), served.jobs)
    assert [outcome.token_ids for outcome in drafted] == [outcome.token_ids for outcome in plain]
