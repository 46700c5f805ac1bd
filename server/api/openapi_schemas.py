"""JSON schemas of request and response bodies, as /openapi.json shows them.

Requests list the fields that are read; every endpoint ignores others. `null` counts as absent.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
INTEGER: Schema = {"type": "integer"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def record(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """An object; its optional fields may be null."""
    properties = {**required, **{k: maybe(v) for k, v in (optional or {}).items()}}
    return {"type": "object", "properties": properties, "required": list(required)}


def maybe(schema: Schema) -> Schema:
    """Such a value, or null."""
    return {"anyOf": [schema, {"type": "null"}]}


def array(items: Schema, least: int = 0, most: int | None = None) -> Schema:
    bound = {} if most is None else {"maxItems": most}
    return {"type": "array", "items": items, "minItems": least, **bound}


def between(low: float, high: float | None = None, kind: str = "number") -> Schema:
    top = {} if high is None else {"maximum": high}
    return {"type": kind, "minimum": low, **top}


def const(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def described(text: str, schema: Schema) -> Schema:
    return {**schema, "description": text}


TOKEN_IDS = array({"type": "integer", "minimum": 0}, least=1)
TEXT_OR_TEXTS = {"anyOf": [{"type": "string", "minLength": 1},
                           array({"type": "string", "minLength": 1}, most=16)]}  # fmt: skip

SAMPLING: dict[str, Schema] = {
    "temperature": described("0 is greedy", between(0, 1000)),
    "top_p": between(0, 1),
    "top_k": described("0 and -1: off", between(-1, kind="integer")),
    "min_p": between(0, 1),
    "seed": described(
        "same seed, same text, whatever else runs", between(-(2**63), 2**63 - 1, "integer")
    ),
    "presence_penalty": between(-2, 2),
    "frequency_penalty": between(-2, 2),
    "repetition_penalty": between(0.001, 1000),
    "logit_bias": described(
        "token id to a number from -100 to 100",
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": between(-100, 100),
        },
    ),
    "stop": TEXT_OR_TEXTS,
    "stop_regex": TEXT_OR_TEXTS,
    "stop_token_ids": array(between(0, kind="integer")),
    "include_stop_str_in_output": BOOLEAN,
    "ignore_eos": BOOLEAN,
    "min_tokens": between(0, kind="integer"),
    "bad_words": TEXT_OR_TEXTS,
    "skip_special_tokens": BOOLEAN,
}
GRAMMAR: dict[str, Schema] = {
    "response_format": {
        "anyOf": [
            record({"type": const("text", "json_object")}),
            record(
                {"type": const("json_schema"), "json_schema": record({"schema": ref("JSONSchema")})}
            ),
            record({"type": const("structural_tag")}),
        ]
    },
    "guided_json": {"anyOf": [ref("JSONSchema"), STRING]},
    "guided_regex": described("a regular expression for the whole output", STRING),
    "guided_choice": array({"type": "string", "minLength": 1}, least=1),
    "guided_grammar": described("a grammar in Lark's form, or GBNF with ::=", STRING),
    "structural_tag": OBJECT,
}
SCHEDULING: dict[str, Schema] = {
    "priority": described("larger is served first", between(-(2**31), 2**31 - 1, kind="integer")),
    "cache_salt": described("requests of different salts share no cached prefix", STRING),
    "timeout": described("seconds from arrival to the end; 0: the server's", between(0)),
    "include_wait_times": described("usage says what the request waited for", BOOLEAN),
    "user": STRING,
}
STREAM: dict[str, Schema] = {
    "stream": BOOLEAN,
    "stream_options": record({}, {"include_usage": BOOLEAN}),
}
TEXT_PART = record({"type": const("text"), "text": STRING})
CONTENT: Schema = {"anyOf": [STRING, array(TEXT_PART)]}
MESSAGE: Schema = {
    "anyOf": [
        record(
            {"role": const("system", "developer", "user"), "content": CONTENT}, {"name": STRING}
        ),
        record(
            {"role": const("assistant"), "content": CONTENT},
            {"tool_calls": array(ref("ToolCall")), "reasoning_content": STRING},
        ),
        record({"role": const("tool"), "content": CONTENT}, {"tool_call_id": STRING}),
    ]
}
FUNCTION = record(
    {"name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}},
    {"description": STRING, "parameters": ref("JSONSchema"), "strict": BOOLEAN},
)
TOOL_CHOICE: Schema = {
    "anyOf": [
        const("none", "auto", "required"),
        record({"type": const("function"), "function": record({"name": STRING})}),
    ]
}
INPUT_ITEM: Schema = {
    "anyOf": [
        record(
            {"role": const("system", "developer", "user", "assistant"), "content": STRING},
            {"type": const("message")},
        ),
        record(
            {
                "type": const("function_call"),
                "call_id": STRING,
                "name": STRING,
                "arguments": STRING,
            }
        ),
        record({"type": const("function_call_output"), "call_id": STRING, "output": STRING}),
        record({"type": const("reasoning")}),
    ]
}
BLOCK: Schema = {
    "anyOf": [
        TEXT_PART,
        record({"type": const("tool_use"), "id": STRING, "name": STRING, "input": OBJECT}),
        record({"type": const("tool_result"), "tool_use_id": STRING}, {"content": CONTENT}),
        record({"type": const("thinking"), "thinking": STRING}),
    ]
}
ANTHROPIC_MESSAGE = record(
    {
        "role": const("user", "assistant"),
        "content": {"anyOf": [STRING, array(BLOCK)]},
    }
)
ANTHROPIC_TOOL = record(
    {"name": FUNCTION["properties"]["name"], "input_schema": ref("JSONSchema")},
    {"description": STRING},
)

REQUESTS: dict[str, Schema] = {
    "CompletionRequest": record(
        {
            "prompt": described(
                "text or token ids, or a list of either",
                {
                    "anyOf": [
                        {"type": "string", "minLength": 1},
                        array({"type": "string", "minLength": 1}, least=1),
                        TOKEN_IDS,
                        array(TOKEN_IDS, least=1),
                    ]
                },
            )
        },
        {
            "model": STRING,
            "max_tokens": described("default 16", between(0, kind="integer")),
            "n": between(1, kind="integer"),
            "best_of": between(1, kind="integer"),
            "echo": BOOLEAN,
            "logprobs": between(0, kind="integer"),
            **STREAM,
            **SAMPLING,
            **GRAMMAR,
            **SCHEDULING,
        },
    ),
    "ChatRequest": record(
        {"messages": array(ref("ChatMessage"), least=1)},
        {
            "model": STRING,
            "max_completion_tokens": between(1, kind="integer"),
            "max_tokens": between(1, kind="integer"),
            "n": between(1, kind="integer"),
            "logprobs": BOOLEAN,
            "top_logprobs": described("needs logprobs", between(0, kind="integer")),
            "tools": array(record({"type": const("function"), "function": FUNCTION})),
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": BOOLEAN,
            "chat_template_kwargs": OBJECT,
            "add_generation_prompt": BOOLEAN,
            "continue_final_message": BOOLEAN,
            **STREAM,
            **SAMPLING,
            **GRAMMAR,
            **SCHEDULING,
        },
    ),
    "ChatMessage": MESSAGE,
    "JSONSchema": described("keywords that cannot be enforced are refused by name", OBJECT),
    "ToolCall": record(
        {"function": record({"name": STRING, "arguments": STRING})},
        {"id": STRING, "type": const("function")},
    ),
    "ResponseRequest": record(
        {"input": {"anyOf": [STRING, array(INPUT_ITEM, least=1)]}},
        {
            "model": STRING,
            "instructions": STRING,
            "max_output_tokens": between(1, kind="integer"),
            "stream": BOOLEAN,
            "temperature": between(0, 1000),
            "top_p": between(0, 1),
            "tools": array(
                {
                    **FUNCTION,
                    "properties": {"type": const("function"), **FUNCTION["properties"]},
                    "required": ["type", "name"],
                }
            ),
            "tool_choice": TOOL_CHOICE,
            "parallel_tool_calls": BOOLEAN,
            "text": record(
                {},
                {
                    "format": {
                        "anyOf": [
                            record({"type": const("text", "json_object")}),
                            record({"type": const("json_schema"), "schema": ref("JSONSchema")}),
                        ]
                    }
                },
            ),
            "reasoning": OBJECT,
            "metadata": OBJECT,
            "user": STRING,
        },
    ),
    "MessageRequest": record(
        {"max_tokens": between(1, kind="integer"), "messages": array(ANTHROPIC_MESSAGE, least=1)},
        {
            "model": STRING,
            "system": {"anyOf": [STRING, array(TEXT_PART)]},
            "stop_sequences": array({"type": "string", "minLength": 1}, most=16),
            "stream": BOOLEAN,
            "temperature": between(0, 1000),
            "top_p": between(0, 1),
            "top_k": between(-1, kind="integer"),
            "tools": array(ANTHROPIC_TOOL),
            "tool_choice": record({"type": const("auto", "any", "none", "tool")}, {"name": STRING}),
            "thinking": record({"type": const("enabled", "disabled", "adaptive")}),
            "metadata": OBJECT,
        },
    ),
    "CountTokensRequest": record(
        {"messages": array(ANTHROPIC_MESSAGE, least=1)},
        {
            "model": STRING,
            "system": {"anyOf": [STRING, array(TEXT_PART)]},
            "tools": array(ANTHROPIC_TOOL),
        },
    ),
    "GenerateRequest": record(
        {},
        {
            "text": {"anyOf": [STRING, array(STRING, least=1)]},
            "input_ids": {"anyOf": [TOKEN_IDS, array(TOKEN_IDS, least=1)]},
            "sampling_params": record(
                {},
                {
                    "max_new_tokens": between(1, kind="integer"),
                    "temperature": between(0, 1000),
                    "top_p": between(0, 1),
                    "json_schema": {"anyOf": [ref("JSONSchema"), STRING]},
                    "regex": STRING,
                    "ebnf": STRING,
                },
            ),
            "stream": BOOLEAN,
            "return_logprob": BOOLEAN,
            "top_logprobs_num": between(0, kind="integer"),
            "logprob_start_len": between(-1, kind="integer"),
            "rid": STRING,
        },
    ),
    "TokenizeRequest": record(
        {},
        {
            "model": STRING,
            "prompt": STRING,
            "messages": array(ref("ChatMessage"), least=1),
            "add_special_tokens": BOOLEAN,
            "return_token_strs": BOOLEAN,
        },
    ),
    "DetokenizeRequest": record(
        {"tokens": array(between(0, kind="integer"))},
        {"model": STRING, "skip_special_tokens": BOOLEAN},
    ),
    "AbortRequest": record({}, {"rid": STRING, "request_id": STRING, "abort_all": BOOLEAN}),
}

USAGE = record({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
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
        }
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
        }
    ),
    "Message": record(
        {
            "id": STRING,
            "type": const("message"),
            "role": const("assistant"),
            "model": STRING,
            "content": array(record({"type": const("text", "thinking", "tool_use")})),
            "stop_reason": const("end_turn", "max_tokens", "stop_sequence", "tool_use"),
            "usage": record({"input_tokens": INTEGER, "output_tokens": INTEGER}),
        },
        {"stop_sequence": STRING},
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
    "ServerInfo": record({"version": STRING, "model": STRING, "options": OBJECT}),
    "Steps": record({"total": INTEGER, "steps": array(OBJECT)}),
    "Requests": record({"full": BOOLEAN, "reason": STRING, "requests": array(OBJECT)}),
}
