"""What a client may send to hold up the others: a path and a body, by name."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable

Payload = tuple[str, bytes]

WORDS = "the quick brown fox jumps over the lazy dog and runs away from him "
USER = [{"role": "user", "content": "x"}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def completion(**fields) -> Payload:
    return COMPLETIONS, json.dumps({"prompt": "x", "max_tokens": 8, **fields}).encode()


def chat(**fields) -> Payload:
    return CHAT, json.dumps({"messages": USER, "max_tokens": 8, **fields}).encode()


def repeated(before: str, item: str, times: int, after: str) -> bytes:
    return (before + ",".join([item] * times) + after).encode()


def said(content) -> list:
    return [{"role": "user", "content": content}]


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT_4MB = (WORDS * 60_000)[:4_000_000]
ASSISTANT_CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] * 7000,
}
# Each name says what is sent; each function makes it, since all together are large.
PAYLOADS: dict[str, Callable[[], Payload]] = {
    # Bodies
    "10 million empty messages": lambda: (
        CHAT,
        repeated('{"messages":[', "{}", 10_000_000, "]}"),
    ),
    "1.4 million empty messages": lambda: (CHAT, repeated('{"messages":[', "{}", 1_390_000, "]}")),
    "200,000 ids": lambda: (COMPLETIONS, repeated('{"prompt":[', "1", 199_000, "]}")),
    "many keys": lambda: completion(**{f"key{i}": i for i in range(55_000)}),
    "too many keys": lambda: completion(**{f"key{i}": i for i in range(200_000)}),
    "a number of 4 MB of text": lambda: completion(temperature="x" * 4_000_000),
    "a number of lists": lambda: (
        COMPLETIONS,
        repeated('{"prompt":"x","temperature":[', "[1]", 59_000, "]}"),
    ),
    "text of escapes": lambda: completion(prompt='\n"\\' * 600_000),
    "brackets": lambda: (COMPLETIONS, b"[" * 4_000_000),
    "text without an end": lambda: (COMPLETIONS, b'{"prompt":"' + b"\\n" * 1_990_000),
    "a gzip bomb": lambda: (
        COMPLETIONS,
        gzip.compress(b'{"prompt":"' + b"x" * 100_000_000 + b'"}', 1),
    ),
    "metadata": lambda: (
        "/v1/responses",
        json.dumps({"input": "x", "metadata": {f"k{i}": "v" for i in range(55_000)}}).encode(),
    ),
    # Texts
    "4 MB chat": lambda: chat(messages=said(TEXT_4MB)),
    "4 MB completion": lambda: completion(prompt=TEXT_4MB),
    "4 MB of blanks": lambda: completion(prompt=" " * 4_000_000),
    "4 MB tokenized": lambda: ("/tokenize", json.dumps({"prompt": TEXT_4MB}).encode()),
    "150 kB tokenized": lambda: (
        "/tokenize",
        json.dumps({"prompt": TEXT_4MB[:150_000], "return_token_strs": True}).encode(),
    ),
    "4 MB counted": lambda: (
        "/v1/messages/count_tokens",
        json.dumps({"messages": said(TEXT_4MB)}).encode(),
    ),
    "190,000 ids as text": lambda: (
        "/detokenize",
        json.dumps({"tokens": [i % 250 for i in range(190_000)]}).encode(),
    ),
    "256 prompts": lambda: completion(
        prompt=[(WORDS * 30)[i : i + 1900] for i in range(256)], max_tokens=1
    ),
    "1,024 prompts": lambda: completion(prompt=[WORDS * 30] * 1024, max_tokens=1),
    # Conversations
    "10,000 messages": lambda: chat(
        messages=[{"role": ("user", "assistant")[i % 2], "content": "hi"} for i in range(10_000)]
    ),
    "15,000 text parts": lambda: chat(messages=said([{"type": "text", "text": "a"}] * 15_000)),
    "7,000 tool calls": lambda: chat(messages=[*USER, ASSISTANT_CALLS, *USER]),
    "4,000 tools": lambda: chat(tools=[tool(f"f{i}") for i in range(4000)]),
    "2,000 tools, one required": lambda: chat(
        tools=[tool(f"f{i}") for i in range(2000)], tool_choice="required"
    ),
    "40,000 template variables": lambda: chat(
        chat_template_kwargs={f"k{i}": i for i in range(40_000)}
    ),
    "items of a response": lambda: (
        "/v1/responses",
        json.dumps({"input": said("a") * 19_000, "max_output_tokens": 1}).encode(),
    ),
    "blocks of a message": lambda: (
        "/v1/messages",
        json.dumps(
            {"messages": said([{"type": "text", "text": "a"}] * 15_000), "max_tokens": 1}
        ).encode(),
    ),
    # Sampling and stops
    "16 expressions of 4,000": lambda: completion(stop_regex=["(?i)" + "ab" * 2000] * 16),
    "an expression of 500": lambda: completion(stop_regex="(?i)" + "ab" * 250),
    "expressions that backtrack": lambda: completion(
        stop_regex=[f"(.|\\w)*(.|a)*{i}~" for i in range(8)], max_tokens=60, ignore_eos=True
    ),
    "4,000 parentheses": lambda: completion(stop_regex="(" * 4000),
    "256 bad words": lambda: completion(
        bad_words=[f"w{i} abcdefghij klmnopqrs"[:32] for i in range(256)]
    ),
    "256 long bad words": lambda: completion(bad_words=["x y" * 1300] * 256),
    "16 long stops": lambda: completion(stop=["a" * 511 + chr(98 + i) for i in range(16)]),
    "64 choices with biases": lambda: completion(logit_bias={str(i): 1 for i in range(256)}, n=64),
    "a bias for every token": lambda: completion(logit_bias={str(i): 1 for i in range(49_152)}),
    "1,000 stops": lambda: completion(stop=[f"stop {i}" for i in range(1000)]),
    "20 alternatives of 8 choices": lambda: chat(
        logprobs=True, top_logprobs=20, n=8, max_tokens=1000, ignore_eos=True
    ),
    "20 alternatives of a completion": lambda: completion(
        logprobs=20, n=8, max_tokens=1000, ignore_eos=True
    ),
    "20 alternatives of a prompt": lambda: completion(
        prompt="x" * 7000, logprobs=20, echo=True, max_tokens=1
    ),
    "20 alternatives natively": lambda: (
        "/generate",
        json.dumps(
            {
                "text": "x" * 4000,
                "return_logprob": True,
                "top_logprobs_num": 20,
                "logprob_start_len": 0,
                "sampling_params": {"n": 8, "max_new_tokens": 1000, "ignore_eos": True},
            }
        ).encode(),
    ),
    "49,000 stop ids": lambda: completion(stop_token_ids=[i % 250 for i in range(55_000)], n=64),
    "128 choices": lambda: completion(n=128),
    # Grammars
    "an ambiguous grammar": lambda: completion(
        guided_grammar='start: e\ne: e e | "a"', max_tokens=1500, ignore_eos=True
    ),
    "an ambiguous EBNF": lambda: completion(
        ebnf='root ::= e\ne ::= e e e | e e | "a" | "b"', max_tokens=1500, ignore_eos=True
    ),
    "an expression of many states": lambda: completion(
        guided_regex=r"(.|\n)*a(.|\n){200}", max_tokens=300
    ),
    "an object of 440 keys": lambda: completion(
        guided_json={"properties": {f"p{i}": {"type": "string"} for i in range(440)}}
    ),
    "300 patterns": lambda: completion(
        guided_json={
            "anyOf": [{"type": "string", "pattern": f"^(a|b)*c{{{i + 1}}}$"} for i in range(300)]
        }
    ),
    "4,096 choices": lambda: completion(guided_choice=[f"choice {i}" for i in range(4096)]),
    "500 structures": lambda: completion(
        structural_tag={
            "structures": [{"begin": f"<f{i}>", "end": "</f>"} for i in range(500)],
            "triggers": ["<f"],
        }
    ),
}
