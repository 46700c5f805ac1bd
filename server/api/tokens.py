"""/tokenize and /detokenize."""

from __future__ import annotations

from aiohttp import web

from server.api.body_fields import BodyFields, check_token_ids
from server.api.chat import render_options
from server.api.sampling_fields import check_model
from server.formats.chat_messages import parse_messages
from server.formats.tools import parse_tools
from server.service import SERVICE, json_response, read_json


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: a prompt's or a conversation's token ids."""
    service = request.app[SERVICE]
    fields = BodyFields(await read_json(request))
    check_model(fields, service.limits)
    if fields.get("messages") is not None:
        messages = parse_messages(fields.get("messages"))
        options = render_options(fields, messages)
        messages, more = service.model_format.conversation(messages, parse_tools(fields.values))
        ids = await service.tokenizer.encode_chat(messages, **options, **more)
    else:
        prompt = fields.string("prompt")
        if prompt is None:
            raise fields.error("prompt", "a string")
        special = fields.boolean("add_special_tokens", True)
        ids = await service.tokenizer.encode_async(prompt, add_special_tokens=special)
    found = {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": service.limits.context_length,
    }
    if fields.boolean("return_token_strs"):
        found["token_strs"] = [
            service.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids
        ]
    return json_response(found)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids."""
    service = request.app[SERVICE]
    fields = BodyFields(await read_json(request))
    check_model(fields, service.limits)
    tokens = fields.get("tokens")
    if not isinstance(tokens, list):
        raise fields.error("tokens", "a list of token ids")
    check_token_ids(tokens, service.limits.vocab_size, "tokens")
    skip = fields.boolean("skip_special_tokens", False)
    return json_response({"prompt": service.tokenizer.decode(tokens, skip_special_tokens=skip)})


ROUTES = [web.post("/tokenize", tokenize), web.post("/detokenize", detokenize)]
