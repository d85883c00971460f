"""Speculative decoding as users configure it: the fields of a `speculative_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from itertools import pairwise
from typing import Any

from .compat.unsupported_options import check_unsupported_options
from .compat.vllm_options import SPECULATIVE, plain_value
from .errors import InvalidRequestError
from .learn_config import LearnConfig, parse_learn
from .option import declared_options, option
from .text import did_you_mean

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "dflash", "dspark", "uno", "oracle")
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp", "dflash", "dspark", "uno")
"""Methods that load weights from `model`."""
BLOCK_METHODS = ("dflash", "dspark", "uno")
"""Methods that make all drafts of a step in one pass over a block."""
IN_TARGET_METHODS = ("mtp",)
"""Methods that load weights from the target's checkpoint if no `model` is given."""
RECORDED_METHODS = ("oracle",)
"""Methods that read recorded answers from the file `model`."""
_LOOKUP_MAX = 5
_DEFAULT_DRAFTS = {"ngram": 3, "suffix": 8, **dict.fromkeys(BLOCK_METHODS, 15), "uno": 8}
_ADAPTIVE_LOOKUP_DRAFTS = 16
"""Most drafts a step of adaptive prompt lookup. The policy chooses as many as are worth their time: on SmolLM2-135M
repetitive text at batch 1 gained 4.99 over no drafts with at most 16 and 2.69 with at most 3; a step with 6 drafts took
33.3 ms, without drafts 32.0."""
_AUTOMATIC = {"parallel_drafting": "eagle3", "use_heterogeneous_vocab": "draft_model"}
"""vLLM's switches -> the method whose files decide about them; there they have no effect."""
GROUP_DRAFTS = ("off", "request", "prompt")
REJECTION_METHODS = ("standard", "invariant", "synthetic")
MAX_DRAFTS = 32
"""Most drafts of a row in one step."""
_WITH_MODEL = (*MODEL_METHODS, *RECORDED_METHODS)
_FALLBACK = ("ngram", *MODEL_METHODS)
"""Methods that use prompt lookup; those with a model only if they are adaptive, as their fallback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    method: str = option(MISSING, "drafter; off is no speculation (default: from the name of model)", choices=METHODS)
    num_speculative_tokens: int = option(
        MISSING,
        "drafts a step; with adaptive, at most (default: speculative_tokens of a drafter in the speculators format, "
        f"else {_ADAPTIVE_LOOKUP_DRAFTS} for adaptive ngram, "
        + "".join(f"{drafts} for {method}, " for method, drafts in _DEFAULT_DRAFTS.items())
        + "4 for the others)",
        within=(1, MAX_DRAFTS),
    )
    model: str | None = option(
        None, "HF directory or hub id of the draft weights; of oracle, file of recorded answers", methods=_WITH_MODEL
    )
    revision: str | None = option(None, "branch, tag or commit of the draft model's hub id", methods=MODEL_METHODS)
    quantization: str | None = option(
        None,
        'as the engine\'s option, for the weights of model; "none": as they are stored (default: on a CPU as the '
        "target's, else none)",
        methods=tuple(method for method in MODEL_METHODS if method != "uno"),
    )
    uno_mask_token_id: int | None = option(
        None,
        "noise is drawn from the tokens 1 to this one, which is left out, as in training (default: all of the target)",
        within=(2, 2**31 - 1),
        methods=("uno",),
    )
    adaptive: bool = option(
        False,
        "choose the number of drafts by predicted goodput, for each request and step; it may be 0 "
        "(default: true if num_speculative_tokens is not given)",
    )
    prompt_lookup_max: int = option(
        _LOOKUP_MAX, "longest n-gram that is looked up, in tokens", within=(1, 64), methods=_FALLBACK
    )
    prompt_lookup_min: int = option(
        1, "shortest n-gram that is looked up, in tokens", within=(1, 64), methods=_FALLBACK
    )
    prompt_lookup_corpus: str | None = option(
        None,
        "file or folder of texts that prompt lookup searches too; folders in it are tenants' own",
        methods=_FALLBACK,
    )
    group_drafts: str = option(
        "request",
        "answers to one prompt draft for each other: those of one request with n above 1 (request), those of all "
        "requests of a tenant with the same prompt and adapter, finished ones too (prompt), or none (off)",
        choices=GROUP_DRAFTS,
        methods=_FALLBACK,
    )
    group_max_tokens: int = option(
        1 << 17,
        "tokens of answers that group_drafts remembers, over all tenants and prompts",
        within=(1, 1 << 24),
        methods=_FALLBACK,
    )
    suffix_decoding_max_tree_depth: int = option(
        24, "longest context that is matched, in tokens", within=(2, 256), methods=("suffix",)
    )
    suffix_decoding_max_cached_requests: int = option(
        10_000,
        "past outputs remembered, over all tenants and adapters; 0: each request uses only its own text",
        within=(0, 1_000_000),
        methods=("suffix",),
    )
    suffix_decoding_max_spec_factor: float = option(
        1.0, "largest number of drafts for each matched token of context", within=(0.0, 32.0), methods=("suffix",)
    )
    suffix_decoding_min_token_prob: float = option(
        0.1, "drafts with a lower estimated probability are not proposed", within=(0.0, 1.0), methods=("suffix",)
    )
    rejection_sample_method: str = option(
        "standard",
        "standard: drafter-invariant for greedy and seeded requests, rejection sampling for the rest; invariant: "
        "drafter-invariant for all; synthetic: drafts are accepted at synthetic_acceptance_rates regardless of their "
        "tokens, for benchmarks: the text is meaningless",
        choices=REJECTION_METHODS,
    )
    synthetic_acceptance_rates: tuple[float, ...] | None = option(
        None, "share of the drafts at each position that are accepted"
    )
    learn: LearnConfig | None = option(
        None, "object that names the tenants whose draft weights learn from their traffic", methods=("eagle3",)
    )
    # Not options of a `speculative_config`:
    download_dir: str | None = None
    """The hub's cache, from the engine's options."""
    drafts_given: bool = True
    """True when the user gave the number, by `num_speculative_tokens` or by the number of rates."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Methods of the drafters: the configured one, then prompt lookup as fallback of an adaptive neural one."""
        return (self.method, "ngram") if self.adaptive and self.method in MODEL_METHODS else (self.method,)


SPECULATIVE_OPTIONS = declared_options(SpeculativeConfig)
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min", "prompt_lookup_corpus", "group_drafts", "group_max_tokens")
_WITHOUT_MODEL = ("ngram", "[ngram]", "suffix")
"""Methods that vLLM accepts as `model` too."""


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"speculative_config: {message}", param="speculative_config")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parse_speculative(config: Mapping[str, Any] | None, download_dir: str | None = None) -> SpeculativeConfig | None:
    """Check a `speculative_config` as users write it; None or method "off" is no speculation. A field that is None
    counts as not given.

    Args:
        download_dir: see `SpeculativeConfig`.

    Raises:
        InvalidRequestError: something is wrong with it; the message names the field and the limit.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise _wrong(f"it must be an object with a method, got {config!r}")
    check_unsupported_options(config, SPECULATIVE, "speculative_config")
    given = {name: value for name, value in config.items() if value is not None and name not in SPECULATIVE}
    switches = {name: given.pop(name) for name in _AUTOMATIC if name in given}
    if given.get("model") in _WITHOUT_MODEL and given.get("method", given["model"]) in _WITHOUT_MODEL:
        given.setdefault("method", given.pop("model"))
    if given.get("method") == "uno" and "model" not in given and "uno_lora_path" in given:  # vLLM's name
        given["model"] = given.pop("uno_lora_path")
    unknown = [name for name in given if name not in SPECULATIVE_OPTIONS]
    if unknown:
        hint = did_you_mean(str(unknown[0]), SPECULATIVE_OPTIONS)
        raise _wrong(f"unknown field {unknown[0]!r}{hint}; known are {', '.join(sorted(SPECULATIVE_OPTIONS))}")
    method = given.get("method", _guess_method(given["model"]) if "model" in given else None)
    method = _usual_name(method)
    _check_switches(switches, method)
    if method in ("off", "none"):
        return None
    given["method"] = method
    _check_values(given)
    needs_model = method in _WITH_MODEL and (method not in IN_TARGET_METHODS or "model" in given)
    if needs_model and (not isinstance(given.get("model"), str) or not given["model"]):
        raise _wrong(f"{method} needs a model, a string; got {given.get('model')!r}")
    if "quantization" in given:
        given["quantization"] = plain_value("quantization", given["quantization"])
    rates = _check_rates(given)
    drafts = len(rates) if rates else _DEFAULT_DRAFTS.get(method, 4)
    drafts_given = "num_speculative_tokens" in given or rates is not None
    if method == "ngram" and not drafts_given and given.get("adaptive", True):
        drafts = _ADAPTIVE_LOOKUP_DRAFTS
    defaults: dict[str, Any] = {"num_speculative_tokens": drafts, "adaptive": not drafts_given}
    if "prompt_lookup_max" not in given:
        defaults["prompt_lookup_max"] = max(_LOOKUP_MAX, given.get("prompt_lookup_min", 1))
    learn = parse_learn(given.get("learn"))
    values = {**defaults, **given, "synthetic_acceptance_rates": rates, "learn": learn}
    result = SpeculativeConfig(**values, drafts_given=drafts_given, download_dir=download_dir)
    _check_fit(result, given)
    if result.prompt_lookup_min > result.prompt_lookup_max:
        raise _wrong(
            f"prompt_lookup_min {result.prompt_lookup_min} exceeds prompt_lookup_max {result.prompt_lookup_max}"
        )
    if rates is not None and len(rates) != result.num_speculative_tokens:
        raise _wrong(
            f"synthetic_acceptance_rates has {len(rates)} rates for num_speculative_tokens "
            f"{result.num_speculative_tokens}"
        )
    return result


def _check_switches(switches: Mapping[str, Any], method: Any) -> None:
    """Refuse one of `_AUTOMATIC` that is on for another method."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise _wrong(f"{name} must be true or false, got {value!r}")
        if value and method != _AUTOMATIC[name]:
            raise _wrong(f"{name} is for method {_AUTOMATIC[name]}, whose files decide about it; got {method!r}")


def _usual_name(method: Any) -> Any:
    """The method that vLLM calls `method`: a family's heads for multi-token prediction, such as "deepseek_mtp", are
    "mtp"."""
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    return "ngram" if method == "[ngram]" else method


def _guess_method(model: object) -> str:
    """The method of a draft whose config has none, by the name of the model, as in vLLM."""
    name = str(model).rstrip("/").rpartition("/")[2].lower()
    same = ((name, name) for name in ("eagle3", "dflash", "dspark", "medusa"))
    for part, method in (("peagle", "eagle3"), ("p-eagle", "eagle3"), *same, ("eagle-", "eagle")):
        if part in name:
            return method
    return "draft_model"


def _check_fit(config: SpeculativeConfig, given: Mapping[str, Any]) -> None:
    """Refuse fields that do not apply to the method."""
    if config.model is None and config.revision is not None and config.method in IN_TARGET_METHODS:
        raise _wrong(f"revision means nothing to method {config.method} without a model")
    for name in given:
        methods = SPECULATIVE_OPTIONS[name].methods
        fallback = name in _LOOKUP and config.method in MODEL_METHODS
        if methods is not None and (config.method not in methods or (fallback and not config.adaptive)):
            hint = " unless it is adaptive" if fallback else ""
            raise _wrong(f"{name} means nothing to method {config.method}{hint}")


def _check_values(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        try:
            SPECULATIVE_OPTIONS[name].check(value)
        except InvalidRequestError as error:
            raise _wrong(error.message) from None


def _check_rates(given: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The synthetic acceptance rates: given exactly when the method is synthetic."""
    rates, synthetic = given.get("synthetic_acceptance_rates"), given.get("rejection_sample_method") == "synthetic"
    if rates is None:
        if synthetic:
            raise _wrong("rejection_sample_method synthetic needs synthetic_acceptance_rates")
        return None
    if not synthetic:
        raise _wrong("synthetic_acceptance_rates needs rejection_sample_method synthetic")
    if (
        not isinstance(rates, (list, tuple))
        or not 1 <= len(rates) <= 32
        or not all(_is_number(rate) and 0.0 <= rate <= 1.0 for rate in rates)
        or any(later > earlier for earlier, later in pairwise(rates))
    ):
        raise _wrong(f"synthetic_acceptance_rates must be 1 to 32 numbers in [0, 1] that never rise, got {rates!r}")
    return tuple(float(rate) for rate in rates)
