"""Adapter kinds, by the `peft_type` of adapter_config.json: one file a kind, which `KINDS` lists.

    adapter_config.json --check_fields--> kind --lora_fields--> fields of LoRA    --+
    adapter_model.*     --kind.tensors-------------------------> tensors of LoRA  --+--> read as a LoRA adapter

`tests/unit/lora/parity` tests every field against PEFT; `tools/render_options.py` renders the tables in
docs/guides/adapters.md from these rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....platform.core.adapter_files import CONFIG_FILE
from ....platform.core.sampling_params import quote_for_error
from ..errors import adapter_error
from .adalora import ADALORA
from .base import AdapterKind, FieldRule
from .lora import FIELDS, LORA
from .vera import VERA

KINDS = {kind.peft_type: kind for kind in (LORA, VERA, ADALORA)}


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}"


_FIRST, *_OTHERS = KINDS
_PEFT_TYPE = FieldRule(
    f"`{_FIRST}`; {_listed(f'`{name}`' for name in _OTHERS)} with fields of their own",
    f"only {_listed(KINDS)} are",
    lambda value: value not in [*KINDS],
)


def field_rules(kind: AdapterKind) -> dict[str, FieldRule]:
    """Return the rules of all fields of a kind."""
    return {"peft_type": _PEFT_TYPE, **{name: FIELDS[name] for name in kind.shared_fields}, **kind.own_fields}


def check_fields(config: dict[str, Any]) -> AdapterKind:
    """Return the kind of a configuration, all of whose values are served.

    Of unknown fields, as newer versions of PEFT write them, those that switch something on are refused: the value true,
    and objects.

    Raises:
        AdapterError: a value is not served; the message names the field.
    """
    given = config.get("peft_type")
    kind = KINDS[given] if isinstance(given, str) and given in KINDS else LORA  # `_PEFT_TYPE` refuses others
    rules = field_rules(kind)
    for name, rule in rules.items():
        if rule.refuses(config.get(name)):
            raise adapter_error(
                f"{CONFIG_FILE}: {name}={quote_for_error(config.get(name))} is not served ({rule.refused})"
            )
    for name, value in config.items():
        if name not in rules and (value is True or (isinstance(value, dict) and value)):
            raise adapter_error(
                f"{CONFIG_FILE}: {quote_for_error(name)}: {quote_for_error(value)} is not known, and may "
                "change what the adapter computes; if it concerns training alone, remove it"
            )
    return kind


def lora_fields(kind: AdapterKind, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a checked configuration as those of LoRA."""
    return {name: config[name] for name in kind.shared_fields if name in config} | kind.as_lora(config)


def fields_table(kind: AdapterKind) -> str:
    """Return the documentation's table of a kind's own fields; LoRA's has all."""
    rules = kind.own_fields or field_rules(kind)
    lines = ["| field | served | refused by name |", "|---|---|---|"]
    lines += [f"| `{name}` | {rule.served or '-'} | {rule.refusals or '-'} |" for name, rule in rules.items()]
    return "\n".join(lines) + "\n"
