"""The adapter of a request, or the weighted sum of adapters."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeAlias, TypedDict, cast

from .adapter_files import IN_MEMORY, AdapterFolder
from .compat.unsupported_options import reject_unsupported_options
from .compat.vllm_python import LORA
from .errors import InvalidRequestError, invalid
from .sampling_params import quote_for_error

MAX_PARTS = 8
"""Adapters in one mix."""
MAX_WEIGHT = 100.0
"""Bound of an adapter's weight in both directions."""
_NUMBERS = itertools.count()
"""Numbers of the objects of `TensorLoRARequest`, which make their paths different."""

# A weight has a decimal point: "sql:2" and "llama3:8" are versions. A "+" separates adapters, so exponents have none; a
# weight within the limits needs none.
_SCALED = re.compile(r"(?P<name>.+):(?P<weight>-?(?:\d+\.\d*|\.\d+)(?:[eE]-?\d+)?)", re.ASCII | re.DOTALL)


@dataclass(slots=True, frozen=True, init=False)
class LoRARequest:
    """The name of an adapter and the location of its files.

    Both spellings work: `LoRARequest("sql", 1, "/adapters/sql")` as in vLLM, and `LoRARequest("sql",
    path="/adapters/sql")`. The integer is kept for the caller and has no meaning here: adapters are identified by the
    digest of their content.

    `draft_path` is the folder of its draft weights, a PEFT adapter for the engine's draft model or draft head; without
    one they are looked up in `draft/` of the adapter's folder. Engines that draft with neither ignore it.

    `digest` is that of the files (`adapter_files.files_digest`), if other files must be refused.

    `roots` are real paths of folders: no file of the adapter may lie outside them, whatever links say. (): any may.

    `files` are those of an adapter in memory (`AdapterFolder.files`); the client sets them. (): they are in the folder.

    `loaded`, which the client sets, means what was loaded under the name last, wherever its files are.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    draft_path: str | None = None
    digest: str | None = None
    roots: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    loaded: bool = field(default=False, compare=False)

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int = 0,
        lora_path: str | os.PathLike[str] | None = None,
        *,
        path: str | os.PathLike[str] | None = None,
        draft_path: str | os.PathLike[str] | None = None,
        digest: str | None = None,
        roots: Iterable[str] = (),
        files: Iterable[tuple[str, str]] = (),
        **of_vllm: Any,
    ) -> None:
        """Check and set the fields; InvalidRequestError names a wrong one. `of_vllm` are the keywords of
        `vllm_python.LORA`, and `loaded`."""
        loaded, path = of_vllm.pop("loaded", False), of_vllm.pop("lora_local_path", path)
        reject_unsupported_options(
            "LoRARequest()", of_vllm, LORA, ("lora_name", "lora_int_id", "lora_path", "path", "draft_path")
        )
        if not isinstance(lora_name, str) or not lora_name:
            raise invalid("lora_name", "must be a non-empty string")
        if not isinstance(lora_int_id, int):
            raise invalid("lora_int_id", f"must be an integer, not {lora_int_id!r}; give the folder as path=...")
        where = _folder("lora_path", lora_path if path is None else path, "the adapter's folder")
        drafts = None if draft_path is None else _folder("draft_path", draft_path, "the draft weights' folder")
        object.__setattr__(self, "lora_name", lora_name)
        object.__setattr__(self, "lora_int_id", lora_int_id)
        object.__setattr__(self, "lora_path", where)
        object.__setattr__(self, "draft_path", drafts)
        object.__setattr__(self, "digest", digest)
        object.__setattr__(self, "roots", tuple(roots))
        object.__setattr__(self, "files", tuple(files))
        object.__setattr__(self, "loaded", loaded)

    @property
    def name(self) -> str:
        """The adapter's name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path

    @property
    def folder(self) -> AdapterFolder:
        """The adapter's folder, through which its files are opened."""
        return AdapterFolder(self.lora_path, self.roots, files=self.files)

    @property
    def label(self) -> str:
        """Name under which its requests are counted."""
        return self.lora_name


@dataclass(slots=True, weakref_slot=True, frozen=True, init=False, eq=False)
class TensorLoRARequest(LoRARequest):
    """An adapter that is made of tensors, as in verl: `TensorLoRARequest("policy", peft_config=..., lora_tensors=...)`.

    `lora_tensors` are what `peft.get_peft_model_state_dict` returns, on any device, and `peft_config` the fields of
    adapter_config.json, or PEFT's configuration itself. They are copied when the adapter is loaded, or when a request
    first brings this object: later changes of the tensors need another object, or another load. The folder in
    `lora_path` is not read.
    """

    peft_config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    lora_tensors: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __init__(
        self,
        lora_name: str,
        lora_int_id: int = 0,
        lora_path: str | None = None,
        *,
        peft_config: Any,
        lora_tensors: Mapping[str, Any],
        **of_vllm: Any,
    ) -> None:
        """Check and set the fields; InvalidRequestError names a wrong one."""
        LoRARequest.__init__(self, lora_name, lora_int_id, f"{IN_MEMORY}{next(_NUMBERS)}", **of_vllm)
        to_dict = getattr(peft_config, "to_dict", None)
        config = peft_config if to_dict is None else to_dict()
        for name, value in (("peft_config", config), ("lora_tensors", lora_tensors)):
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise invalid(name, f"must be a dict with names as keys; got {quote_for_error(value)}")
        object.__setattr__(self, "peft_config", dict(config))
        object.__setattr__(self, "lora_tensors", dict(lora_tensors))


class LoadOptions(TypedDict, total=False):
    """Options of `AdapterVerbs.load`."""

    load_inplace: bool
    pinned: bool
    running: str


class TensorOptions(LoadOptions, total=False):
    """Options of `load_lora_adapter`: the fields of a `TensorLoRARequest`, if the adapter is made of tensors."""

    tensors: Mapping[str, Any] | None
    peft_config: Any


def tensor_request(lora: Any, options: TensorOptions) -> tuple[Any, LoadOptions]:
    """The adapter with the name, or of the request, `lora` that is made of the tensors in the options; `lora` itself
    if there are none. Returns it with the other options.

    Raises:
        InvalidRequestError: the tensors or the configuration are missing or wrong; `param` names the field.
    """
    rest = {name: value for name, value in options.items() if name not in ("tensors", "peft_config")}
    tensors, config = options.get("tensors"), options.get("peft_config")
    if tensors is not None or config is not None:
        for name, value in (("tensors", tensors), ("peft_config", config)):
            if value is None:
                raise invalid(name, "is missing: an adapter in memory needs tensors and peft_config")
        name, number = (lora.lora_name, lora.lora_int_id) if isinstance(lora, LoRARequest) else (lora, 0)
        lora = TensorLoRARequest(name, number, peft_config=config, lora_tensors=cast(Mapping[str, Any], tensors))
    return lora, cast(LoadOptions, rest)


class LoRAPart(NamedTuple):
    """One adapter of a mix."""

    request: LoRARequest
    weight: float


class LoRAMix(NamedTuple):
    """A weighted sum of adapters: the base model plus `weight` times what each part adds to it. Also one adapter with
    a scale.

    A tuple, which distinguishes it from a LoRARequest in messages between processes. Parts from users go through
    `mix_of`, which checks and sorts them.
    """

    parts: tuple[LoRAPart, ...]

    @property
    def name(self) -> str:
        """Name as HTTP clients write it: "a:0.7+b:0.3", and "+a:0.5" for one adapter."""
        text = "+".join(f"{part.request.name}:{_shown_weight(part.weight)}" for part in self.parts)
        return text if len(self.parts) > 1 else f"+{text}"

    @property
    def label(self) -> str:
        """Name under which its requests are counted: "a+b", without the weights, which each request may choose."""
        return "+".join(part.request.name for part in self.parts)


LoRA: TypeAlias = LoRARequest | LoRAMix
"""The adapter or the mix of a request."""


def mix_of(parts: Iterable[tuple[LoRARequest, Any]], *, param: str = "lora_request") -> LoRA | None:
    """The weighted sum of `parts`, in its simplest form, the same for the same sum.

    Weights of the same adapter are added up, and parts without weight left out. None without any part left: the base
    model. One part of weight 1 is the plain adapter.

    Raises:
        InvalidRequestError: for the field `param`: too many parts, a weight that is not a finite number or too large,
            or one name for two different adapters.
    """
    requests: dict[str, LoRARequest] = {}
    weights: dict[str, float] = {}
    for count, (request, weight) in enumerate(parts, start=1):
        if count > MAX_PARTS:
            raise InvalidRequestError(f"{param}: at most {MAX_PARTS} adapters can be mixed", param=param)
        name = request.name
        known = requests.setdefault(name, request)
        if (known.path, known.draft_path) != (request.path, request.draft_path):
            raise InvalidRequestError(
                f"{param}: {quote_for_error(name)} names two adapters, in different folders", param=param
            )
        weights[name] = _checked_weight(name, weights.get(name, 0.0) + _checked_weight(name, weight, param), param)
    mixed = tuple(LoRAPart(requests[name], weight) for name, weight in sorted(weights.items()) if weight)
    if not mixed:
        return None
    return mixed[0].request if len(mixed) == 1 and mixed[0].weight == 1 else LoRAMix(mixed)


def split_mix(text: str, is_name: Callable[[str], bool]) -> list[tuple[str, float]] | None:
    """The names and weights of a mix written as "a:0.7+b:0.3", "a+b" (a missing weight is 1) or "+a:0.5"; None
    when `text` is not written like a mix.

    Version tags look like weights, so a weight is read only in a sum, after a '+' or before one, and has a decimal
    point: "a:2", "v1:0.5" and "llama3:8b" are names. A text for which `is_name` is true, the name of a present or
    former adapter, is never split.

    Raises:
        InvalidRequestError: too many parts.
    """
    if "+" not in text:
        return None
    whole = _SCALED.fullmatch(text[1:]) if text[0] == "+" else None
    if whole is not None and ("+" not in text[1:] or is_name(whole["name"])) and not is_name(text[1:]):
        return [(whole["name"], float(whole["weight"]))]
    if text.count("+") >= MAX_PARTS:
        raise InvalidRequestError(f"at most {MAX_PARTS} adapters can be mixed")
    parts: list[tuple[str, float]] = []
    for piece in text.split("+"):
        scaled = None if is_name(piece) else _SCALED.fullmatch(piece)
        name, weight = (piece, 1.0) if scaled is None else (scaled["name"], float(scaled["weight"]))
        if not name:
            return None
        parts.append((name, weight))
    return parts


def _checked_weight(name: str, weight: object, param: str) -> float:
    # Not for NaN either. Python's integers may be too large for a float, but compare well.
    if not isinstance(weight, Real) or isinstance(weight, bool) or not abs(cast(float, weight)) <= MAX_WEIGHT:
        raise InvalidRequestError(
            f"{param}: the weight of adapter {quote_for_error(name)} must be a number from {-MAX_WEIGHT:g} "
            f"to {MAX_WEIGHT:g}, got {quote_for_error(weight)}",
            param=param,
        )
    return float(weight)


def _shown_weight(weight: float) -> str:
    mantissa, *exponent = repr(weight).split("e")
    return "e".join([mantissa if "." in mantissa else f"{mantissa}.0", *exponent])


def _folder(field: str, path: Any, what: str) -> str:
    """A path as text, with the home folder for "~". Objects other than strings and paths are refused."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise invalid(field, f"must name {what}: a string or a path object")
    return os.path.expanduser(text)
