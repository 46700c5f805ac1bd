"""JSON schemas of answers, as /openapi.json shows them."""

from __future__ import annotations

from server.api.fields.schema_words import (
    BOOLEAN,
    INTEGER,
    NUMBER,
    OBJECT,
    STRING,
    Schema,
    array,
    const,
    described,
    maybe,
    record,
    ref,
)

USAGE = record({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
TIMINGS = {
    "timings": record(
        {"tokenize_s": NUMBER, "queued_s": NUMBER, "total_s": NUMBER, "prefill_chunks": INTEGER,
         "cached_tokens": INTEGER, "retractions": INTEGER, "waited_s": OBJECT},
        {"prefill_s": NUMBER, "first_token_s": NUMBER, "decode_s": NUMBER},
    )
}  # fmt: skip
FINISH = const("stop", "length", "tool_calls", "abort")


def _choices(**fields: Schema) -> Schema:
    return array(record({"index": INTEGER, "finish_reason": FINISH, **fields}), least=1)


def _answer(kind: str, choices: Schema) -> Schema:
    return record(
        {
            "id": STRING,
            "object": const(kind),
            "created": INTEGER,
            "model": STRING,
            "choices": choices,
            "usage": USAGE,
        },
        TIMINGS,
    )


ANSWERS: dict[str, Schema] = {
    "Error": record(
        {"error": record({"message": STRING, "type": STRING}, {"param": STRING, "code": STRING})}
    ),
    "AnthropicError": record(
        {"type": const("error"), "error": record({"type": STRING, "message": STRING})}
    ),
    "Completion": _answer("text_completion", _choices(text=STRING)),
    "ChatCompletion": _answer(
        "chat.completion",
        _choices(
            message=record(
                {"role": const("assistant"), "content": maybe(STRING)},
                {"reasoning_content": STRING, "tool_calls": array(ref("ToolCall"))},
            )
        ),
    ),
    "Response": record(
        {
            "id": STRING,
            "object": const("response"),
            "created_at": NUMBER,
            "model": STRING,
            "status": const("completed", "incomplete"),
            "output": array(record({"type": STRING, "id": STRING})),
            "usage": record(
                {"input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER}
            ),
        },
        TIMINGS,
    ),
    "Message": record(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(record({"type": const("text", "thinking", "tool_use")})),
            "stop_reason": const(
                "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"
            ),
            "usage": record({"input_tokens": INTEGER, "output_tokens": INTEGER}),
        },
        {"stop_sequence": STRING, **TIMINGS},
    ),
    "Event": record({"data": described("JSON, or [DONE]", STRING)}, {"event": STRING}),
    "TokenCount": record({"input_tokens": INTEGER}),
    "Generated": {
        "anyOf": [ref("GeneratedText"), array(ref("GeneratedText"))],
    },
    "GeneratedText": record({"text": STRING, "output_ids": array(INTEGER), "meta_info": OBJECT}),
    "Tokens": record({"tokens": array(INTEGER), "count": INTEGER, "max_model_len": INTEGER}),
    "Text": record({"prompt": STRING}),
    "Aborted": record({"aborted": INTEGER}),
    "Flushed": record({"flushed": BOOLEAN, "message": STRING}),
    "Models": record({"object": const("list"), "data": array(ref("Model"), least=1)}),
    "Model": record(
        {"id": STRING, "object": const("model"), "created": INTEGER, "owned_by": STRING}
    ),
    "Health": record({"status": const("ok")}),
    "Version": record({"version": STRING}),
    "ServerInfo": record({"version": STRING, "model": STRING, "options": OBJECT}),
    "ModelInfo": record(
        {
            "model_path": STRING,
            "is_generation": BOOLEAN,
            "weight_version": STRING,
            "model_type": STRING,
            "architectures": array(STRING),
            "context_length": INTEGER,
            "capabilities": OBJECT,
        }
    ),
    "Load": array(
        record(
            {
                "num_reqs": INTEGER,
                "num_running_reqs": INTEGER,
                "num_waiting_reqs": INTEGER,
                "num_tokens": INTEGER,
                "token_usage": NUMBER,
            }
        ),
        least=1,
    ),
    "Rendered": record({"request_id": STRING, "model": STRING, "token_ids": array(INTEGER)}),
    "RenderedPrompts": array(ref("Rendered"), least=1),
    "Steps": record({"total": INTEGER, "steps": array(OBJECT)}),
    "Trace": array(
        record(
            {"name": STRING, "ph": STRING, "ts": NUMBER, "pid": INTEGER, "tid": INTEGER},
            {"dur": NUMBER, "args": OBJECT},
        )
    ),
    "Requests": record({"full": BOOLEAN, "reason": STRING, "requests": array(OBJECT)}),
}
