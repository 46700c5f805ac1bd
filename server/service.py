"""What handlers share: one record, reached through the app under a typed key."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

if TYPE_CHECKING:
    from server.config import ServerConfig
    from server.formats.model_format import ModelFormat
    from server.generation.engine import Engine
    from server.generation.generator import Generator
    from server.generation.metrics import Metrics
    from server.generation.params import ApiLimits
    from server.http.connections import Connections
    from server.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Service:
    """The running server as its handlers see it.

    Args:
        eos_token_ids: ids by which the model ends.
        draining: set once; from then on no new request is taken.
    """

    config: ServerConfig
    engine: Engine
    tokenizer: Tokenizer
    generator: Generator
    metrics: Metrics
    limits: ApiLimits
    model_format: ModelFormat
    connections: Connections
    eos_token_ids: frozenset[int]
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False


SERVICE = web.AppKey("service", Service)
REQUEST_ID = web.RequestKey("request_id", str)  # the client's, or the server's


def json_response(data: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(data), status=status, content_type="application/json", charset="utf-8"
    )
