"""Grow a small trained model to a large one that computes the same function at full cost.

    python benchmarks/inflate.py SRC DST --hidden-size 1024 --layers 28 --intermediate-size 4864 \\
        [--adapters DIR ...] [--draft DIR] [--eagle3 DIR] [--eagle DIR] [--medusa DIR]

So latency can be measured at a real size with the real acceptance of a model that fits into a repository: texts and
accepted drafts stay those of the small model. `growth.py` says how. SRC is a Llama-like HF directory; DST gets
`base/`, `adapters/NAME/` with their draft weights, `draft/`, `eagle3/`, `eagle/` and `medusa/`.

Heads grow with the target (they read its hidden states and may share its embeddings). The draft model grows by the
target's factors, or to the sizes of --draft-hidden-size and so on. Texts are the same up to rounding: in bfloat16,
choose a hidden size of SRC's times 4 or 16, so that the scale of the norms is a power of two and no weight is rounded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from growth import Growth, GrowthError, Shape
from huggingface_hub import save_torch_state_dict
from safetensors.torch import save_file
from torch import Tensor

from outrider.models.config import DTYPES
from outrider.platform.cli.bench.machine import INFLATION_FILE
from outrider.platform.core.errors import OutriderError
from outrider.spec_decode.drafters.checkpoint import StoredTensor, read_tensors
from outrider.spec_decode.drafters.medusa.heads import canonical_names

SHARD_SIZE = "2GB"
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
ADAPTER_FILE = "adapter_model.safetensors"
_SIZES = ("hidden_size", "layers", "intermediate_size", "heads", "kv_heads")
_AUX = "eagle_aux_hidden_state_layer_ids"


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Read a JSON file of a model's folder.

    Raises:
        GrowthError: it cannot be read, or is no object.
    """
    try:
        config = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GrowthError(f"cannot read {folder / name}: {error}") from error
    if not isinstance(config, dict):
        raise GrowthError(f"{folder / name} is not a JSON object")
    return config


def write_config(folder: Path, config: dict[str, Any], name: str = "config.json") -> None:
    """Write a JSON file of a model's folder."""
    (folder / name).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
    """Write safetensors files of at most `SHARD_SIZE`; returns the number of elements."""
    weights = {name: tensor.contiguous() for name, tensor in tensors}
    save_torch_state_dict(weights, folder, max_shard_size=SHARD_SIZE)
    return sum(tensor.numel() for tensor in weights.values())


def stored_tensors(source: Path) -> dict[str, StoredTensor]:
    """Tensors of a model or a head; Medusa's by their names in the original format."""
    tensors = read_tensors(source, MEDUSA_FILES)
    return tensors if any("self_attn" in name for name in tensors) else canonical_names(tensors)


def kind_of(source: Path) -> str:
    """Kind of the tensors in a folder: "model", or the method of a head."""
    names = stored_tensors(source)
    if not any("self_attn" in name for name in names):
        return "medusa"
    if not any(name.removeprefix("model.") == "fc.weight" for name in names):
        return "model"
    return "eagle3" if any(name.endswith("hidden_norm.weight") for name in names) else "eagle"


def grown_tensors(source: Path, growth: Growth, dtype: torch.dtype | None, *, tied: bool = False) -> Iterator[Any]:
    """(name, tensor) of everything in `source`, grown; floats in `dtype`, None for as they are."""
    for name, stored in stored_tensors(source).items():
        if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
            continue
        tensor = stored.read()
        if dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield from growth.tensors(name, tensor)


def grown_config(config: dict[str, Any], growth: Growth) -> dict[str, Any]:
    """Write a decoder's config.json for the new shape.

    Raises:
        GrowthError: it has windows, which differ by layer.
    """
    if config.get("use_sliding_window"):
        raise GrowthError("models with sliding windows by layer are not grown")
    new = config | growth.new.fields()
    new["rms_norm_eps"] = config.get("rms_norm_eps", 1e-6) * growth.old.hidden / growth.new.hidden
    if "layer_types" in new:
        new["layer_types"] = ["full_attention"] * growth.new.layers
    return new


def copy_rest(source: Path, target: Path) -> None:
    """Copy the tokenizer, the chat template and other files next to the weights."""
    for file in source.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name not in ("config.json", "adapter_config.json"):
            shutil.copy(file, target / file.name)


def inflate_model(source: Path, target: Path, growth: Growth, dtype: str | None = None) -> int:
    """Grow a causal LM; returns its number of parameters."""
    target.mkdir(parents=True)
    config = grown_config(read_config(source), growth)
    if dtype is not None:
        config["dtype"] = dtype
        config.pop("torch_dtype", None)
    tied = bool(config.get("tie_word_embeddings", False))
    count = write_tensors(target, grown_tensors(source, growth, DTYPES[dtype] if dtype else None, tied=tied))
    write_config(target, config)
    copy_rest(source, target)
    facts = {
        "source": "/".join(source.resolve().parts[-2:]),
        "old": growth.old.fields(),
        "new": growth.new.fields(),
        "parameters": count,
    }
    write_config(target, facts, INFLATION_FILE)
    return count


def inflate_head(source: Path, target: Path, base: Growth, dtype: str | None = None) -> Growth:
    """Grow an EAGLE, EAGLE-3 or Medusa head of the model that `base` grows; returns the head's own growth.

    Raises:
        GrowthError: its hidden size is not its target's.
    """
    target.mkdir(parents=True)
    config = read_config(source)
    tensors = stored_tensors(source)
    layer = config.get("transformer_layer_config", config)
    growth = base
    if any("self_attn" in name for name in tensors):
        old = Shape.from_config({"num_hidden_layers": 1} | layer)
        if old.hidden != base.old.hidden or layer.get("target_hidden_size", old.hidden) != base.old.hidden:
            raise GrowthError(f"the head's hidden size {old.hidden} is not its target's {base.old.hidden}")
        growth = Growth(old, old.scaled(base.old, base.new), keep_layers=True)
        layer |= grown_config(layer, growth)
    elif "hidden_size" in config:
        config["hidden_size"] = base.new.hidden
    if config.get("target_hidden_size") is not None:
        config["target_hidden_size"] = base.new.hidden
    if any(name.endswith("hidden_norm.weight") for name in tensors):
        _remap_aux_layers(config, base)
    write_config(target, config)
    grown = dict(grown_tensors(source, growth, DTYPES[dtype] if dtype else None))
    write_tensors(target, grown.items())
    if any((source / name).is_file() for name in MEDUSA_FILES):
        (target / "model.safetensors").rename(target / MEDUSA_FILES[0])
    copy_rest(source, target)
    return growth


def _remap_aux_layers(config: dict[str, Any], base: Growth) -> None:
    """Layers whose inputs EAGLE-3 reads, at their new indices."""
    holder = config if _AUX in config else config.get("eagle_config") or {}
    count = base.old.layers
    layers = holder.get(_AUX) or [2, count // 2, count - 3]
    (holder if _AUX in holder else config)[_AUX] = [base.layer_with_input_of(layer) for layer in layers]


def inflate_adapter(source: Path, target: Path, growth: Growth) -> None:
    """Grow a PEFT adapter. The new layers get weights of the same rank, which change nothing and cost as much.

    Raises:
        GrowthError: ranks or scales that differ by layer.
    """
    config = read_config(source, "adapter_config.json")
    for field in ("rank_pattern", "alpha_pattern"):
        if any(char.isdigit() for pattern in config.get(field) or {} for char in pattern):
            raise GrowthError(f"{source.name}: a {field} that names layers is not grown")
    target.mkdir(parents=True)
    config["layers_to_transform"] = None
    write_config(target, config, "adapter_config.json")
    tensors = dict(pair for name, stored in _adapter_tensors(source).items() for pair in growth.tensors(name, stored))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / ADAPTER_FILE, {"format": "pt"})
    copy_rest(source, target)


def _adapter_tensors(source: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        if (source / ADAPTER_FILE).is_file():
            return load_file(source / ADAPTER_FILE)
        return torch.load(source / "adapter_model.bin", map_location="cpu", weights_only=True)
    except Exception as error:  # the library raises all kinds of errors for a broken file
        raise GrowthError(f"cannot read the adapter's weights in {source}: {error}") from error


def inflate_draft_weights(source: Path, target: Path, drafters: dict[str, Growth]) -> list[str]:
    """Grow an adapter's `draft/` folder for the grown drafters; returns the drafters with weights."""
    found = []
    for folder in (source / "draft", *sorted(path for path in (source / "draft").glob("*") if path.is_dir())):
        if not (folder / "adapter_config.json").is_file():
            continue
        method = folder.name if folder != source / "draft" else _method_of(folder, drafters)
        if method in drafters:
            inflate_adapter(folder, target / folder.relative_to(source), drafters[method])
            found.append(method)
    return found


def _method_of(folder: Path, drafters: dict[str, Growth]) -> str | None:
    """Drafter of the weights in a plain `draft/`; None when it was not grown.

    The modules of a draft model are "model.layers...". EAGLE's attention reads one state and its `fc` two; EAGLE-3's
    attention reads two and its `fc` three.

    Raises:
        GrowthError: they fit both heads.
    """
    shapes = {name.removeprefix("base_model.model."): tensor.shape for name, tensor in _adapter_tensors(folder).items()}
    if any(name.startswith("model.layers.") for name in shapes):
        return "draft_model"
    found = [method for method in ("eagle", "eagle3") if method in drafters and _fits(shapes, method, drafters[method])]
    if len(found) > 1:
        raise GrowthError(f"{folder} could be for each of {', '.join(found)}: name one, as draft/{found[0]}")
    return found[0] if found else None


def _fits(shapes: dict[str, torch.Size], method: str, growth: Growth) -> bool:
    """True when the inputs of a head's LoRAs have the sizes of this head."""
    read = {"fc": 3, "q_proj": 2, "k_proj": 2, "v_proj": 2} if method == "eagle3" else {"fc": 2}
    for name, shape in shapes.items():
        module, part = name.removesuffix(".weight").rsplit(".", 1)
        last = module.rsplit(".", 1)[-1]
        reads_states = part == "lora_A" and last in ("fc", "q_proj", "k_proj", "v_proj")
        if reads_states and shape[1] != read.get(last, 1) * growth.old.hidden:
            return False
    return True


def check_inputs(options: argparse.Namespace) -> None:
    """Check all that the command line names, before gigabytes are written.

    Raises:
        GrowthError, OutriderError: something is missing or of another kind.
    """
    for option, wanted in (("draft", "model"), ("eagle3", "eagle3"), ("eagle", "eagle"), ("medusa", "medusa")):
        folder = getattr(options, option)
        if folder:
            read_config(Path(folder))
            if (kind := kind_of(Path(folder))) != wanted:
                raise GrowthError(f"--{option} {folder}: its tensors are those of kind {kind}, not {wanted}")
    for folder in map(Path, options.adapters):
        read_config(folder, "adapter_config.json")


def inflate_set(options: argparse.Namespace, target: Path) -> list[str]:
    """Grow all that the command line names into the empty folder `target`; returns a line for each part."""
    source = Path(options.source)
    check_inputs(options)
    config = read_config(source)
    old = Shape.from_config(config)
    base = Growth(old, _wanted(old, options, ""), qk_norm=_has_qk_norm(config))
    lines = [f"base: {inflate_model(source, target / 'base', base, options.dtype) / 1e6:.1f}M parameters"]
    if options.dtype != "float32" and base.norm_scale != 2.0 ** round(torch.tensor(base.norm_scale).log2().item()):
        lines.append(
            f"the norms' scale {base.norm_scale:.4f} is no power of two: in bfloat16 their weights are rounded"
        )
    drafters: dict[str, Growth] = {}
    if options.draft:
        config = read_config(Path(options.draft))
        small = Shape.from_config(config)
        wanted = _wanted(small.scaled(base.old, base.new), options, "draft_")
        drafters["draft_model"] = growth = Growth(small, wanted, qk_norm=_has_qk_norm(config))
        count = inflate_model(Path(options.draft), target / "draft", growth, options.dtype)
        lines.append(f"draft: {count / 1e6:.1f}M parameters")
    for method in ("eagle3", "eagle", "medusa"):
        folder = getattr(options, method)
        if folder:
            drafters[method] = inflate_head(Path(folder), target / method, base, options.dtype)
            lines.append(f"{method}: grown with its target")
    for folder in map(Path, options.adapters):
        inflate_adapter(folder, target / "adapters" / folder.name, base)
        drafts = inflate_draft_weights(folder, target / "adapters" / folder.name, drafters)
        lines.append(f"adapter {folder.name}: draft weights for {', '.join(drafts) or 'no drafter'}")
    return lines


def _has_qk_norm(config: dict[str, Any]) -> bool:
    return config.get("model_type") == "qwen3"


def _wanted(shape: Shape, options: argparse.Namespace, prefix: str) -> Shape:
    """`shape` with the sizes that the options name."""
    given = {name.removesuffix("_size"): getattr(options, prefix + name) for name in _SIZES}
    return replace(shape, **{name: value for name, value in given.items() if value is not None})


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", help="a folder that does not exist, or is empty")
    for prefix in ("", "draft_"):
        for name in _SIZES:
            parser.add_argument("--" + (prefix + name).replace("_", "-"), type=int, metavar="N")
    parser.add_argument("--adapters", nargs="+", default=[], metavar="DIR")
    for name in ("draft", "eagle3", "eagle", "medusa"):
        parser.add_argument(f"--{name}", metavar="DIR")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="of base and drafters (default: as stored)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Grow, and print what was written; a failure leaves nothing behind."""
    options = parse(arguments)
    target = Path(options.target)
    try:
        is_new = not os.path.lexists(target)
        if not is_new and not target.is_dir():
            raise GrowthError(f"{target} is not a folder")
        if not is_new and any(target.iterdir()):
            raise GrowthError(f"{target} is not empty")
        target.mkdir(parents=True, exist_ok=True)
        try:
            with tempfile.TemporaryDirectory(dir=target) as work:
                lines = inflate_set(options, Path(work))
                for part in Path(work).iterdir():
                    part.rename(target / part.name)
        except BaseException:
            if is_new:
                target.rmdir()
            raise
    except (GrowthError, OutriderError, OSError) as error:
        raise SystemExit(f"inflate: {error}") from None
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
