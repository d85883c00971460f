"""Facts about a built engine: the bytes of its weights, and the information for clients."""

from __future__ import annotations

import torch

from ...kernels.native import tiles
from ...models.checkpoint.loader import quantization_name
from ...models.implementation import choose_implementation
from ...models.model import LanguageModel
from ..core.config import EngineArgs, EngineConfig
from ..core.messages import EngineInfo
from ..core.threads import LARGE_WEIGHTS


def weight_bytes(model: LanguageModel, dtype: torch.dtype) -> int:
    """Bytes of this rank's weights as they are held. A plain table that is tied to the head counts once: a step reads
    one."""
    linears, embedding = model.linears(), model.embedding
    wholes = [linear if linear.part is None else linear.part for linear in linears]
    # Elements of the whole model, as `num_parameters`: each rank holds all but linear layers and the vocabulary's.
    packed = sum(whole.in_features * sum(rows for _, rows in whole.slices) for whole in wholes)
    table = embedding.vocab_size * embedding.hidden_size * (1 if embedding.tied else 2)
    others = max(0, model.num_parameters - packed - table) * dtype.itemsize
    if embedding.part is not None:
        table = table // embedding.vocab_size * embedding.part.size
    return (
        sum(linear.packed.num_bytes for linear in linears if not linear.is_elsewhere)
        + min(embedding.num_bytes, table * dtype.itemsize)
        + others
    )


def has_long_steps(config: EngineConfig, model: LanguageModel) -> bool:
    """True when a step uses every core for so long that another process may interrupt it: on a CPU."""
    return config.device == "cpu" and weight_bytes(model, getattr(torch, config.dtype)) >= LARGE_WEIGHTS


def describe(
    args: EngineArgs, config: EngineConfig, model: LanguageModel, load_seconds: float, other_bytes: int
) -> EngineInfo:
    """Information for clients about an engine that took `load_seconds` to load. `other_bytes`: bytes of the other
    ranks' weights."""
    speculation = "off"
    if config.speculative is not None:
        most = "at most " if config.speculative.adaptive else ""
        speculation = f"{config.speculative.method}, {most}{config.speculative.num_speculative_tokens} drafts a step"
        if config.speculative.synthetic_acceptance_rates is not None:
            speculation += ", synthetic acceptance: the text is meaningless"
    return EngineInfo(
        model=config.model,
        architecture=model.config.architecture,
        dtype=config.dtype,
        device=config.device,
        vocab_size=model.config.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        max_logprobs=config.max_logprobs,
        num_kv_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        num_parameters=model.num_parameters,
        enable_lora=config.lora is not None,
        max_loras=config.lora.max_loras if config.lora is not None else 0,
        max_lora_rank=config.lora.max_lora_rank if config.lora is not None else 0,
        speculation=speculation,
        load_seconds=load_seconds,
        kv_cache_dtype=config.cache.dtype,
        model_impl=choose_implementation(model.config),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_queued_reqs=config.scheduler.max_num_queued_reqs,
        quantization=quantization_name(config.model, model.config, config.quantization),
        weight_bytes=weight_bytes(model, getattr(torch, config.dtype)) + other_bytes,
        num_labels=0 if model.score is None else model.score.config.num_labels,
        has_tokenizer=not args.skip_tokenizer_init,
        tiles=_describe_tiles(model),
        tensor_parallel_size=config.num_ranks,
    )


def _describe_tiles(model: LanguageModel) -> str:
    """Description of the use of AMX tiles, and of the products of linear layers; "": there are no tiles."""
    text = tiles.describe()
    packed = [linear.packed for linear in model.linears() if not linear.is_elsewhere]
    if model.embedding.head is not None:
        packed.append(model.embedding.head)
    own = sum(product.fuses_adapters for product in packed)
    counts = [(own, "Outrider's"), (len(packed) - own, "oneDNN's")]
    served = " and ".join(f"{whose} in {count}" for count, whose in counts if count)
    layers = "linear layer" if len(packed) == 1 else "linear layers"
    return f"{text}; products: {served} {layers}" if text and packed else text
