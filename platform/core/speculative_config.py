"""Speculative decoding as users configure it: the fields of a `speculative_config`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .compat.unsupported_options import check_unsupported_options
from .compat.vllm_options import SPECULATIVE, plain_value
from .errors import InvalidRequestError
from .learn_config import LearnConfig, parse_learn
from .text import did_you_mean

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp", "oracle")
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods that load weights from `model`."""
IN_TARGET_METHODS = ("mtp",)
"""Methods that load weights from the target's checkpoint if no `model` is given."""
RECORDED_METHODS = ("oracle",)
"""Methods that read recorded answers from the file `model`."""
_LOOKUP_MAX = 5
REJECTION_METHODS = ("standard", "invariant", "synthetic")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding."""

    method: str
    num_speculative_tokens: int
    """Drafts a step; with `adaptive`, at most."""
    model: str | None = None
    revision: str | None = None
    """Branch, tag or commit of the draft model's hub id."""
    quantization: str | None = None
    """As the engine's option, for the weights of `model`; None: on a CPU as the target's; "none": as they are
    stored."""
    download_dir: str | None = None
    """The hub's cache, from the engine's options; never written in a `speculative_config`."""
    adaptive: bool = False
    """Choose the number of drafts by predicted goodput, for each request and step; it may be 0. The default is true if
    `num_speculative_tokens` is not given, else false: the number is then fixed."""
    prompt_lookup_max: int = _LOOKUP_MAX
    prompt_lookup_min: int = 1
    prompt_lookup_corpus: str | None = None
    """File or folder of texts that prompt lookup searches too; folders in it are tenants' own."""
    suffix_decoding_max_tree_depth: int = 24
    """Longest context that is matched, in tokens."""
    suffix_decoding_max_cached_requests: int = 10000
    """Past outputs remembered, over all tenants and adapters; 0: each request uses only its own text."""
    suffix_decoding_max_spec_factor: float = 1.0
    """Largest number of drafts for each matched token of context."""
    suffix_decoding_min_token_prob: float = 0.1
    """Drafts with a lower estimated probability are not proposed."""
    rejection_sample_method: str = "standard"
    """"standard": drafter-invariant for greedy and seeded requests, rejection sampling for the rest;
    "invariant": drafter-invariant for all; "synthetic": drafts are accepted at `synthetic_acceptance_rates` regardless
    of their tokens, for benchmarks: the text is meaningless."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """Share of the drafts at each position that are accepted."""
    learn: LearnConfig | None = None
    """Tenants whose drafts learn from their traffic; None: nobody's."""
    drafts_given: bool = True
    """True when the user gave the number, by `num_speculative_tokens` or by the number of rates. Not a user's field."""

    @property
    def drafters(self) -> tuple[str, ...]:
        """Methods of the drafters: the configured one, then prompt lookup as fallback of an adaptive neural one."""
        return (self.method, "ngram") if self.adaptive and self.method in MODEL_METHODS else (self.method,)


_DERIVED = ("drafts_given", "download_dir")
_FIELDS = tuple(name for name in SpeculativeConfig.__dataclass_fields__ if name not in _DERIVED)
# method -> the fields of a `speculative_config` that do not apply to it.
_LOOKUP = ("prompt_lookup_max", "prompt_lookup_min", "prompt_lookup_corpus")
_SUFFIX = tuple(name for name in _FIELDS if name.startswith("suffix_decoding_"))
_NOT_FOR_METHOD: dict[str, tuple[str, ...]] = {
    "ngram": ("model", "revision", "quantization", *_SUFFIX),
    "suffix": ("model", "revision", "quantization", *_LOOKUP),
    **dict.fromkeys(MODEL_METHODS, (*_LOOKUP, *_SUFFIX)),
    **dict.fromkeys(RECORDED_METHODS, ("revision", "quantization", *_LOOKUP, *_SUFFIX)),
}
MAX_DRAFTS = 32
"""Most drafts of a row in one step."""
_RANGES: dict[str, tuple[float, float]] = {
    "num_speculative_tokens": (1, MAX_DRAFTS),
    "prompt_lookup_max": (1, 64),
    "prompt_lookup_min": (1, 64),
    "suffix_decoding_max_tree_depth": (2, 256),
    "suffix_decoding_max_cached_requests": (0, 1_000_000),
    "suffix_decoding_max_spec_factor": (0.0, 32.0),
    "suffix_decoding_min_token_prob": (0.0, 1.0),
}
"""Least and largest values; fields with integers here take integers alone."""
LEARNING_METHODS = ("eagle3",)
"""Methods whose draft weights `learn` trains."""
_WITHOUT_MODEL = ("ngram", "[ngram]", "suffix")
"""Methods that vLLM accepts as `model` too."""
_DEFAULT_DRAFTS = {"ngram": 3, "suffix": 8}
_ADAPTIVE_LOOKUP_DRAFTS = 16
"""Most drafts a step of adaptive prompt lookup. The policy chooses as many as are worth their time: on SmolLM2-135M
repetitive text at batch 1 gained 4.99 over no drafts with at most 16 and 2.69 with at most 3; a step with 6 drafts took
33.3 ms, without drafts 32.0."""


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
    if given.get("model") in _WITHOUT_MODEL and given.get("method", given["model"]) in _WITHOUT_MODEL:
        given.setdefault("method", given.pop("model"))
    unknown = [name for name in given if name not in _FIELDS]
    if unknown:
        hint = did_you_mean(str(unknown[0]), _FIELDS)
        raise _wrong(f"unknown field {unknown[0]!r}{hint}; known are {', '.join(sorted(_FIELDS))}")
    method = given.get("method", _method_of(given["model"]) if "model" in given else None)
    method = _usual_name(method)
    if method in ("off", "none"):
        return None
    if method not in METHODS:
        raise _wrong(f"method must be one of {', '.join(METHODS)}; got {method!r}")
    needs_model = method in (*MODEL_METHODS, *RECORDED_METHODS)
    needs_model = needs_model and (method not in IN_TARGET_METHODS or "model" in given)
    if needs_model and (not isinstance(given.get("model"), str) or not given["model"]):
        raise _wrong(f"{method} needs a model, a string; got {given.get('model')!r}")
    for name in ("revision", "quantization", "prompt_lookup_corpus"):
        if not isinstance(given.get(name, ""), str):
            raise _wrong(f"{name} must be a string, got {given[name]!r}")
    if "quantization" in given:
        given["quantization"] = plain_value("quantization", given["quantization"])
    _check_values(given)
    given["learn"] = parse_learn(given.get("learn"))
    rates = _check_rates(given)
    drafts = len(rates) if rates else _DEFAULT_DRAFTS.get(method, 4)
    drafts_given = "num_speculative_tokens" in given or rates is not None
    if method == "ngram" and not drafts_given and given.get("adaptive", True):
        drafts = _ADAPTIVE_LOOKUP_DRAFTS
    defaults: dict[str, Any] = {"num_speculative_tokens": drafts, "adaptive": not drafts_given}
    if "prompt_lookup_max" not in given:
        defaults["prompt_lookup_max"] = max(_LOOKUP_MAX, given.get("prompt_lookup_min", 1))
    values = {**defaults, **given, "method": method, "synthetic_acceptance_rates": rates}
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


def _usual_name(method: Any) -> Any:
    """The method that vLLM calls `method`: a family's heads for multi-token prediction, such as "deepseek_mtp", are
    "mtp"."""
    if isinstance(method, str) and method.endswith("_mtp"):
        return "mtp"
    return "ngram" if method == "[ngram]" else method


def _method_of(model: object) -> str:
    """The method of a draft whose config has none, by the name of the model, as in vLLM."""
    name = str(model).rstrip("/").rpartition("/")[2].lower()
    for part, method in (("eagle3", "eagle3"), ("eagle-", "eagle"), ("medusa", "medusa")):
        if part in name:
            return method
    return "draft_model"


def _check_fit(config: SpeculativeConfig, given: Mapping[str, Any]) -> None:
    """Refuse fields that do not apply to the method."""
    if config.learn is not None and config.method not in LEARNING_METHODS:
        raise _wrong(f"learn is for {', '.join(LEARNING_METHODS)}; got method {config.method!r}")
    if config.model is None and config.revision is not None and config.method in IN_TARGET_METHODS:
        raise _wrong(f"revision means nothing to method {config.method} without a model")
    for name in _NOT_FOR_METHOD[config.method]:
        fallback = name in _LOOKUP and config.method in MODEL_METHODS  # adaptive, it falls back on prompt lookup
        if name in given and not (fallback and config.adaptive):
            hint = " unless it is adaptive" if fallback else ""
            raise _wrong(f"{name} means nothing to method {config.method}{hint}")


def _check_values(given: Mapping[str, Any]) -> None:
    for name, (low, high) in _RANGES.items():
        value, integer = given.get(name, low), isinstance(low, int)
        if not _is_number(value) or (integer and not isinstance(value, int)) or not low <= value <= high:
            raise _wrong(f"{name} must be {'an integer' if integer else 'a number'} in [{low}, {high}], got {value!r}")
    if not isinstance(given.get("adaptive", False), bool):
        raise _wrong(f"adaptive must be true or false, got {given['adaptive']!r}")
    rule = given.get("rejection_sample_method", "standard")
    if rule not in REJECTION_METHODS:
        raise _wrong(f"rejection_sample_method must be one of {', '.join(REJECTION_METHODS)}; got {rule!r}")


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
