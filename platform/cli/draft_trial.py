"""Trial of a trained drafter: whether serving it pays on this machine, measured with one request at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core.errors import OutriderError
from .adapter_rank import largest_rank

if TYPE_CHECKING:
    from ...spec_decode.training.data import Sample
    from ...spec_decode.training.options import TrainOptions
    from ..client.llm import LLM
    from ..core.lora_request import LoRARequest

_PROMPTS = 4
_TOKENS = 48
"""Prompts, and tokens of each answer: some seconds for a model of 135M on two cores."""
_WORTH = 1.03
"""Least speed-up that is called worth serving."""


class Decoding(NamedTuple):
    """Answers of one request after the other."""

    seconds: float
    """From the first tokens to the last."""
    tokens: int
    """After the first ones."""
    steps: int


class Trial(NamedTuple):
    """A number of drafts, compared with no drafts."""

    num_drafts: int
    break_even: float
    """Time of a step with drafts over that of a step without: the acceptance length from which drafts pay."""
    acceptance_length: float

    @property
    def speedup(self) -> float:
        """Tokens a second over those without drafts."""
        return self.acceptance_length / self.break_even


def describe_trial(options: TrainOptions, held_out: Sequence[Sample]) -> Iterator[str]:
    """Measure the drafter in the output folder on prompts of held-out samples; yields lines about it."""
    trials = run_trials(options, [s.token_ids[: max(1, s.num_prompt_tokens)] for s in held_out[:_PROMPTS]])
    yield "measured on this machine with one request at a time:"
    for trial in trials:
        yield (
            f"  {trial.num_drafts} drafts: acceptance length {trial.acceptance_length:.2f}, break-even "
            f"{trial.break_even:.2f}: {trial.speedup:.2f} times the speed without drafts"
        )
    best = max(trials, key=lambda trial: trial.speedup)
    if best.speedup >= _WORTH:
        yield f"worth serving, best with num_speculative_tokens {best.num_drafts}"
    else:
        yield (
            f"not worth serving here: a step with {best.num_drafts} drafts takes {best.break_even:.2f} times as long "
            "as one without. Train on more tokens (more prompts and --epochs), or serve with --speculative-config "
            '\'{"method": "ngram"}\', which costs no pass of a drafter'
        )


def run_trials(options: TrainOptions, prompts: Sequence[list[int]]) -> list[Trial]:
    """Trials with 1, 2, 4 ... drafts, up to `options.k` or as many as the drafter makes.

    Raises:
        OutriderError: draft weights cannot be served, since no adapter is given that they are for.
    """
    from ..client.llm import LLM
    from ..core.lora_request import LoRARequest

    engine: dict[str, Any] = {"dtype": options.dtype, "device": options.device, "max_num_seqs": 1, "seed": 0}
    engine |= {"enable_prefix_caching": False}
    is_weights = options.method == "draft-lora"
    if is_weights and options.adapter is None:
        raise OutriderError("draft weights are served with an adapter; --adapter names none")
    lora = None
    if options.adapter is not None:
        draft_path = options.output if options.method in ("draft-lora", "uno") else None
        lora = LoRARequest("target", path=options.adapter, draft_path=draft_path)
        ranks = [largest_rank(Path(folder)) for folder in (options.adapter, draft_path) if folder]
        engine |= {"enable_lora": True, "max_lora_rank": max(ranks)}
    with LLM(options.model, **engine) as llm:
        plain = _decode(llm, prompts, lora, None)
    method, most = _served(options)
    config = {"model": (options.draft if is_weights else options.output), "num_speculative_tokens": most}
    config |= {"method": method, "adaptive": False}
    numbers = sorted({most, *(n for n in (1, 2, 4, 8, 16) if n < most)})
    with LLM(options.model, **engine, speculative_config=config) as llm:
        return [_compare(plain, _decode(llm, prompts, lora, number), number) for number in numbers]


def _served(options: TrainOptions) -> tuple[str, int]:
    """The method of speculation that serves the drafter, and the most drafts of a step."""
    method, block = options.method, options.block_size
    if options.draft is not None:
        from ...spec_decode.training.build import StoredBlocks, read_head

        head = read_head(options)
        method = "draft_model" if head is None else head.method
        block = head.config.block_size if isinstance(head, StoredBlocks) else block
    own = {"medusa": options.medusa_heads, "dflash": block - 1, "dspark": block, "uno": block}
    return method, min(options.k, own.get(method, options.k))


def _decode(llm: LLM, prompts: Sequence[list[int]], lora: LoRARequest | None, num_drafts: int | None) -> Decoding:
    """Greedy answers to the prompts, each alone, after one that warms up."""
    from ..core.sampling_params import SamplingParams

    seconds, tokens, steps = 0.0, 0, 0
    for number, prompt in enumerate([prompts[0], *prompts]):
        room = llm.engine_info.max_model_len - len(prompt)
        params = SamplingParams(
            temperature=0, max_tokens=min(_TOKENS, room), ignore_eos=True, detokenize=False, speculative=num_drafts
        )
        output = llm.generate([{"prompt_token_ids": prompt}], params, lora, use_tqdm=False)[0]
        metrics, count = output.metrics, len(output.outputs[0].token_ids) - 1
        if number == 0 or metrics is None or metrics.first_token_time is None or metrics.finished_time is None:
            continue
        seconds += metrics.finished_time - metrics.first_token_time
        tokens += count
        steps += sum(metrics.steps_by_k) - 1 if metrics.steps_by_k else count
    return Decoding(seconds, tokens, steps)


def _compare(plain: Decoding, drafted: Decoding, num_drafts: int) -> Trial:
    """Raises OutriderError if no answer has a second token."""
    if not plain.steps or not drafted.steps:
        raise OutriderError("the prompts leave no room for an answer of two tokens")
    without = plain.seconds / plain.steps
    return Trial(num_drafts, drafted.seconds / drafted.steps / without, drafted.tokens / drafted.steps)
