"""What routers and gateways ask of an engine: which model it is, and how busy.

`/get_load` and `/model_info` answer as SGLang's do, since its router reads them; the load in an
answer's headers has ORCA's form, which Envoy and the gateways built on it read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from server.service import SERVICE, json_response

if TYPE_CHECKING:
    from server.generation.engine import Load

LOAD_FORMAT_HEADER = "endpoint-load-metrics-format"
LOAD_HEADER = "endpoint-load-metrics"


async def get_load(request: web.Request) -> web.Response:
    """GET /get_load: a list, since an engine may have several ranks; this one has one."""
    service = request.app[SERVICE]
    load = service.engine.load()
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": load.running + load.waiting,
                "num_running_reqs": load.running,
                "num_waiting_reqs": load.waiting,
                "num_tokens": load.tokens,
                "max_total_num_tokens": service.engine.scheduler.config.usable_tokens,
                "token_usage": load.kv_usage,
            }
        ]
    )


async def model_info(request: web.Request) -> web.Response:
    """GET /model_info, and under SGLang's older name: the model, its weights, what it can do."""
    service = request.app[SERVICE]
    chat = service.tokenizer.chat_template is not None
    return json_response(
        {
            "model_path": service.source.path,
            "tokenizer_path": service.source.path,
            "served_model_name": service.limits.model,
            "weight_version": service.config.weight_version,
            "is_generation": True,
            "model_type": service.source.model_type,
            "architectures": service.source.architectures,
            "context_length": service.limits.context_length,
            "capabilities": {
                "completion": True,
                "chat": chat,
                "tools": chat,
                "reasoning": service.model_format.reasoning_family is not None,
                "structured_output": True,
                "logprobs": True,
                "embedding": False,
                "vision": False,
            },
        }
    )


def load_header(load: Load, wanted: str) -> str | None:
    """The load as the value of a header; None where the format is not one of ORCA's for text.

    Args: wanted: JSON or TEXT, in any case.
    """
    figures: dict[str, float] = {
        "kv_cache_usage_perc": round(load.kv_usage, 4),
        "num_requests_waiting": load.waiting,
        "num_requests_running": load.running,
        "num_tokens": load.tokens,
    }
    kind = wanted.strip().upper()
    if kind == "JSON":
        return "JSON " + orjson.dumps({"named_metrics": figures}).decode()
    if kind == "TEXT":
        return "TEXT " + ", ".join(f"named_metrics.{name}={figures[name]}" for name in figures)
    return None


ROUTES = [
    web.get("/get_load", get_load),
    web.get("/model_info", model_info),
    web.get("/get_model_info", model_info),
]
