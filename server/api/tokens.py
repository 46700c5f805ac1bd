"""/tokenize and /detokenize, and the prompts of requests that are not to be generated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from aiohttp import web

from server.api.answers import new_id
from server.api.chat import ChatBody
from server.api.chat_messages import MESSAGES, TOOL_CHOICE, TOOLS
from server.api.chat_plan import Conversation, LastMessageFields, encode_conversation
from server.api.completions import CompletionBody, encode_prompts
from server.api.fields.bodies import required, served
from server.api.fields.generation import ModelField
from server.api.fields.kinds import Boolean, Text, TokenIds
from server.api.incoming import beside, read_body
from server.service import SERVICE, json_bytes, json_response

if TYPE_CHECKING:
    from server.service import Service


class TokenizeBody(LastMessageFields, ModelField):
    """The body of /tokenize."""

    prompt = served(Text(), "a text")
    messages = served(MESSAGES, "instead, a conversation")
    tools = served(TOOLS, "functions that the model may call in it")
    tool_choice = served(TOOL_CHOICE, "whether and which tools are called; default auto")
    add_special_tokens = served(
        Boolean(), "the tokenizer adds to a text what begins one", default=True
    )
    return_token_strs = served(Boolean(), "tell the tokens' texts too", default=False)

    one_of = ("prompt", "messages")

    def ids(self, service: Service) -> list[int]:
        """The token ids that it asks for."""
        if self.messages is None:
            return service.tokenizer.encode(
                self.prompt or "",
                add_special_tokens=self.add_special_tokens,
                most=service.limits.counted,
            )
        conversation = Conversation(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            render=self.render(self.messages),
        )
        return encode_conversation(conversation, service)

    def answer(self, service: Service) -> bytes:
        """The ids, their number and, where asked for, their texts, as JSON."""
        ids = self.ids(service)
        found = {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": service.limits.context_length,
        }
        if self.return_token_strs:
            text = service.tokenizer.token_bytes
            found["token_strs"] = [text(i).decode("utf-8", "replace") for i in ids]
        return orjson.dumps(found)


class DetokenizeBody(ModelField):
    """The body of /detokenize."""

    tokens = required(TokenIds(), "what to turn into text")
    skip_special_tokens = served(Boolean(), "leave special tokens out", default=False)


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: a prompt's or a conversation's token ids."""
    service = request.app[SERVICE]
    body = await read_body(request, TokenizeBody)
    return json_bytes(await beside(request, lambda: body.answer(service)))


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids."""
    body = await read_body(request, DetokenizeBody)
    tokenizer, skip = request.app[SERVICE].tokenizer, body.skip_special_tokens
    text = await beside(request, lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
    return json_response({"prompt": text})


async def render_chat(request: web.Request) -> web.Response:
    """POST /v1/chat/completions/render: the token ids of what such a request would be answered to,
    for routers that know which tokens are cached where."""
    service = request.app[SERVICE]
    body = await read_body(request, ChatBody)
    ids = await beside(request, lambda: encode_conversation(body.conversation(), service))
    return json_response(_rendered(service, ids, "chatcmpl"))


async def render_completion(request: web.Request) -> web.Response:
    """POST /v1/completions/render: the same for each prompt."""
    service = request.app[SERVICE]
    body = await read_body(request, CompletionBody)
    prompts = await encode_prompts(request, body.prompt, add_special_tokens=body.add_special_tokens)
    return json_response([_rendered(service, ids, "cmpl") for ids in prompts])


def _rendered(service: Service, ids: list[int], prefix: str) -> dict[str, Any]:
    return {"request_id": new_id(prefix), "model": service.limits.model, "token_ids": ids}


ROUTES = [
    web.post("/tokenize", tokenize),
    web.post("/detokenize", detokenize),
    web.post("/v1/chat/completions/render", render_chat),
    web.post("/v1/completions/render", render_completion),
]
