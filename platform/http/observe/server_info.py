"""`/server_info`: how this server was configured, in the form of vLLM's `VllmConfig`, for trainers that ask before they
begin; and `/get_world_size`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ...core.messages import EngineInfo
from ..serving_state import require_admin, serving_of

router = APIRouter()


@router.get("/server_info", response_model=None)
async def server_info(request: Request) -> Response:
    """Facts about the engine under vLLM's names, and no others; JSON whatever `config_format` is."""
    require_admin(request)
    serving = serving_of(request)
    serving.check_ready()
    return JSONResponse({"vllm_config": vllm_config(serving.llm.info, serving.models.base_name)})


@router.get("/get_world_size", response_model=None)
async def get_world_size(request: Request, include_dp: bool = True) -> Response:
    """Number of ranks of the engine, with vLLM's fields. Replicas are servers of their own, so `include_dp` changes
    nothing."""
    require_admin(request)
    serving = serving_of(request)
    serving.check_ready()
    return JSONResponse({"world_size": serving.llm.info.tensor_parallel_size})


def vllm_config(info: EngineInfo, served_name: str) -> dict[str, Any]:
    """The sections of vLLM's configuration that this engine has. `weight_transfer_config` is null: weights come from
    files, not over NCCL."""
    return {
        "model_config": {
            "model": info.model,
            "served_model_name": served_name,
            "dtype": f"torch.{info.dtype}",
            "max_model_len": info.max_model_len,
            "max_logprobs": info.max_logprobs,
            "quantization": info.quantization or None,
        },
        "cache_config": {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_kv_blocks,
            "cache_dtype": info.kv_cache_dtype,
        },
        "parallel_config": {"tensor_parallel_size": info.tensor_parallel_size, "data_parallel_size": 1},
        "scheduler_config": {"max_num_seqs": info.max_num_seqs, "max_model_len": info.max_model_len},
        "lora_config": (
            {"max_loras": info.max_loras, "max_lora_rank": info.max_lora_rank} if info.enable_lora else None
        ),
        "weight_transfer_config": None,
    }
