"""Grammars by random walks: any text that the masks allow is one that the client asked for."""

from __future__ import annotations

import ast
import asyncio
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers
from jsonschema.validators import validator_for
from tokenizers import decoders, models, normalizers

from runtime.errors import InvalidRequest
from server.api.fields.grammar import GrammarFields
from server.api.incoming import read_value
from server.formats.tool_families import TOOL_FAMILIES, answer_source, tool_family
from server.formats.tools import parse_tools
from server.generation.params import ApiLimits
from server.grammars import sources
from server.grammars.compiler import GrammarCompiler, hugging_face_tokenizer
from server.grammars.grammar_text import regex
from server.grammars.json_schema import any_json_object, json_schema
from server.grammars.output_rules import source_of
from tests.fakes import IM_END as EOS
from tests.fakes import IM_START, byte_tokenizer
from tests.server.server_kit import MARKER
from tests.values import present

SCHEMAS = json.loads((Path(__file__).parent / "json_schemas.json").read_text(encoding="utf-8"))
TOKENIZER = byte_tokenizer(more=(MARKER,))
SPECIAL = TOKENIZER.special_tokens()
WORDS = (TOKENIZER.vocab_size + 31) // 32


@pytest.fixture(scope="module")
def ll_tokenizer():
    return hugging_face_tokenizer(TOKENIZER.to_json(), TOKENIZER.vocab_size, [EOS])


@pytest.fixture
def compiler(ll_tokenizer):
    found = GrammarCompiler(lambda: ll_tokenizer, [EOS], threads=1)
    yield found
    found.close()


async def compiled(compiler, source, param):
    """The grammar, once it can be used.

    Raises: what a request that asks for it is told."""
    grammar = compiler.grammar(source, param)
    known = asyncio.Event()
    matcher = grammar.matcher()
    if not matcher.ready:
        matcher.start(known.set)
        await known.wait()
    if matcher.refused is not None:
        raise matcher.refused
    assert matcher.ready
    return grammar


def allowed(matcher):
    """Ids that the mask allows."""
    bits = np.zeros(WORDS, dtype=np.int32)
    matcher.fill_mask(bits)
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))


def walk(matcher, rng, most=400):
    """A text that the masks allow, or None where it did not end by itself in so many tokens."""
    ids: list[int] = []
    for _ in range(most):
        options = allowed(matcher)
        assert matcher.failed is None
        assert options.size, "there is always a way on"
        # Quotes and brackets more often than their share, so that texts come to an end.
        closing = [i for i in options if TOKENIZER.token_bytes(int(i)) in (b'"', b"}", b"]")]
        token = int(rng.choice(closing if closing and rng.random() < 0.3 else options))
        if EOS in options and rng.random() < 0.3:
            token = EOS
        matcher.accept(token)
        if token == EOS:
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        ids.append(token)
    return None


async def walks(compiler, source, count, seed=0):
    grammar = await compiled(compiler, source, "x")
    rng = np.random.default_rng(seed)
    return [text for _ in range(count) if (text := walk(grammar.matcher(), rng)) is not None]


def follow(matcher, text):
    """Whether every token of the text is allowed in its turn."""
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if token not in allowed(matcher):
            return False
        matcher.accept(token)
    return True


def test_there_are_a_hundred_schemas():
    assert len(SCHEMAS) >= 100
    for schema in SCHEMAS.values():
        validator_for(schema, default=jsonschema.Draft202012Validator).check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.sampled(40)
async def test_schema(compiler, name):
    schema = SCHEMAS[name]
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for text in await walks(compiler, json_schema(schema, "x"), 6):
        value = json.loads(text)
        validator.validate(value)
        json.dumps(value, ensure_ascii=False).encode()  # no half of a surrogate pair
        assert not re.search(r"\s{24}", text), "blanks are bounded"


async def test_free_keys_have_one_spelling(compiler):
    schema = {"properties": {"id": {"type": "integer"}}, "required": ["id"], "type": "object",
              "additionalProperties": {"type": "boolean"}}  # fmt: skip
    grammar = await compiled(compiler, json_schema(schema, "x"), "x")
    assert follow(grammar.matcher(), '{"id": 1, "ie": true}')
    assert not follow(grammar.matcher(), '{"id": 1, "id": true}')
    assert not follow(grammar.matcher(), '{"id": 1, "\\u0069d": true}')


async def test_pretty_and_compact_json_are_both_allowed(compiler):
    grammar = await compiled(compiler, any_json_object("x"), "x")
    value = {"a": [1, {"b": None}], "c": "d"}
    assert follow(grammar.matcher(), json.dumps(value, indent=2))
    assert follow(grammar.matcher(), json.dumps(value, indent="\t"))
    assert follow(grammar.matcher(), json.dumps(value, separators=(",", ":")))
    assert not follow(grammar.matcher(), "{" + " " * 40)
    assert not follow(grammar.matcher(), "{}" + " ")


async def test_complete_output_can_only_end(compiler):
    grammar = await compiled(compiler, any_json_object("x"), "x")
    matcher = grammar.matcher()
    assert follow(matcher, "{}")
    assert matcher.is_terminated()
    assert list(allowed(matcher)) == [EOS]
    matcher.accept(5)  # a token that was under way: ignored
    assert matcher.is_terminated()
    assert matcher.failed is None


async def test_matchers_of_one_grammar_are_apart(compiler):
    grammar = await compiled(compiler, sources.choice(["ab", "cd"], "x"), "x")
    first, second = grammar.matcher(), grammar.matcher()
    assert follow(first, "ab")
    assert first.is_terminated()
    assert not second.is_terminated()
    assert follow(second, "cd")


async def test_min_tokens_holds_the_end_back_where_there_is_a_choice(compiler):
    grammar = await compiled(compiler, regex("a+", "x"), "x")
    stop = TOKENIZER.encode("b", add_special_tokens=False)[0]
    matcher = grammar.matcher(min_tokens=3, stop_token_ids=[stop])
    for _ in range(3):
        assert EOS not in allowed(matcher)
        assert follow(matcher, "a")
    assert EOS in allowed(matcher)
    only = (await compiled(compiler, sources.choice(["a"], "x"), "x")).matcher(min_tokens=9)
    assert follow(only, "a")
    assert list(allowed(only)) == [EOS]


async def test_wrong_token_is_a_failure_that_allows_nothing(compiler):
    matcher = (await compiled(compiler, sources.choice(["ab"], "x"), "x")).matcher()
    matcher.accept(TOKENIZER.encode("z", add_special_tokens=False)[0])
    assert matcher.failed
    assert allowed(matcher).size == 0
    assert not matcher.is_terminated()


async def test_special_tokens_are_not_text(compiler):
    grammar = await compiled(compiler, regex("(.|\n)*", "x"), "x")
    assert not set(allowed(grammar.matcher())) & {IM_START, SPECIAL[MARKER]}


async def test_vocabulary_larger_than_the_model_s(compiler):
    matcher = (await compiled(compiler, sources.choice(["ab"], "x"), "x")).matcher()
    bits = np.zeros(WORDS - 1, dtype=np.int32)
    matcher.fill_mask(bits)
    found = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    assert list(found) == TOKENIZER.encode("a", add_special_tokens=False)


@pytest.mark.parametrize(
    ("body", "yes", "no"),
    [
        ({"guided_regex": r"a/b|\d{2}"}, ["a/b", "12"], ["c"]),
        ({"guided_regex": "^x$"}, ["x"], ["xx"]),
        ({"guided_regex": "a\nb"}, ["a\nb"], ["a b"]),
        ({"guided_choice": ['say "é"', "b\n"]}, ['say "é"', "b\n"], ["c"]),
        ({"guided_grammar": 'root ::= "a" b*\nb ::= [x-y]'}, ["axy"], ["b"]),
        ({"guided_grammar": 'start: "a" B*\nB: "x" | "y"'}, ["axy"], ["b"]),
        ({"response_format": {"type": "text"}, "guided_choice": ["a"]}, ["a"], ["b"]),
        ({"structural_tag": {"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "A"},
            {"type": "or", "elements": [{"type": "regex", "pattern": "[0-9]"},
                                        {"type": "json_schema", "json_schema": {"const": True}}]},
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            {"type": "tags_with_separator", "separator": ", ", "at_least_one": True, "tags": [
                {"begin": "<q>", "end": "</q>",
                 "content": {"type": "json_schema", "json_schema": {"type": "integer"}}}]}]}}},
         ["A7<t>any</t><q>1</q>, <q>2</q>", "Atrue<t></t><q>1</q>"], ["B", "Afalse", "A7<q>"]),
        ({"structural_tag": {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
            {"begin": "<f=a>", "end": "</f>", "content": {"type": "regex", "pattern": "1+"}},
            {"begin": "<f=b>", "end": "</f>", "content": {"type": "grammar",
                                                          "grammar": 'start: "x"'}}]}}},
         ["hi <f=a>11</f> and <f=b>x</f> end", "<f"], ["<f=c>", "<f=a>x"]),
    ],
)  # fmt: skip
async def test_fields(compiler, body, yes, no):
    limits = ApiLimits(model="m", vocab_size=TOKENIZER.vocab_size, context_length=100)
    rules = read_value(GrammarFields, body, limits).rules()
    grammar = await compiled(compiler, *present(source_of(rules, SPECIAL)))
    for text in yes:
        matcher = grammar.matcher()
        assert follow(matcher, text), text
        assert EOS in allowed(matcher) or text == "<f", text
    for text in no:
        assert not follow(grammar.matcher(), text), text


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "nonsense"}, "nonsense"),
        ({"type": "object", "properties": {"a": "b"}}, "schema must be"),
        ({"type": "string", "pattern": "(["}, "unclosed"),
        ({"$ref": "#"}, "no text satisfies"),
        ({"$ref": "http://example.com/x"}, "example.com"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "object", "minProperties": 2}, "minProperties 2"),
        ({"const": "\x01"}, "control characters"),
        ({"type": "integer", "multipleOf": 1000003}, "multipleOf 1000003"),
        (
            {"enum": [str(i) for i in range(100_000)]},
            "the grammar has 889047 characters; at most 150000",
        ),
        (False, "allows nothing"),
        (5, "must be a JSON object"),
        ("{", "not JSON"),
    ],
)
async def test_schema_that_is_wrong_or_cannot_be_enforced(compiler, schema, words):
    with pytest.raises(InvalidRequest, match=re.escape(words)) as caught:
        await compiled(compiler, json_schema(schema, "guided_json"), "guided_json")
    assert caught.value.param == "guided_json"
    assert "<state>" not in str(caught.value)


async def test_schema_nested_too_deeply(compiler):
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="levels deep"):
        json_schema(schema, "guided_json")


async def test_tokenizer_that_the_library_cannot_read():
    backend = tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    compiler = GrammarCompiler(lambda: hugging_face_tokenizer(backend.to_str(), 2, [0]), [0])
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=r"guided_choice: .* this model's tokenizer"):
            await compiled(compiler, sources.choice(["a"], "guided_choice"), "guided_choice")
    compiler.close()


async def test_sentence_piece_tokenizer_with_byte_fallback():
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "▁t", "s"]
    backend = tokenizers.Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [("▁", "t")], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    vocab = len(pieces)
    compiler = GrammarCompiler(lambda: hugging_face_tokenizer(backend.to_str(), vocab, [0]), [0])
    grammar = await compiled(compiler, sources.choice(["é t s"], "x"), "x")
    matcher = grammar.matcher()
    for piece in ("<0xC3>", "<0xA9>", "▁t", "▁", "s"):
        bits = np.zeros((vocab + 31) // 32, dtype=np.int32)
        matcher.fill_mask(bits)
        token = pieces.index(piece)
        assert bits[token // 32] >> (token % 32) & 1, piece
        matcher.accept(token)
    assert matcher.is_terminated()
    compiler.close()


async def test_text_before_the_grammar(compiler):
    for end in ("</think>", "<|im_start|>"):
        body = sources.choice(["yes"], "x")
        grammar = await compiled(compiler, sources.after_text(end, body, SPECIAL), "x")
        matcher = grammar.matcher()
        assert follow(matcher, f"I think so. {end}\n\nyes")
        assert matcher.is_terminated()
        assert not follow(grammar.matcher(), f"I think so. {end}no")


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer"},
                       "exact": {"type": "boolean"}, "unit": {"enum": ["C", "F"]}},
        "required": ["days"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
async def test_required_calls_are_read_back_and_follow_their_schemas(compiler, family):
    request = present(parse_tools(TOOLS, "required"))
    source = answer_source(request, TOOL_FAMILIES[family], None, SPECIAL)
    texts = await walks(compiler, source, 25)
    assert len(texts) > 10
    schemas = {t["function"]["name"]: t["function"]["parameters"] for t in TOOLS}
    for text in texts:
        parser = TOOL_FAMILIES[family].read(request)
        events = parser.feed(text) + parser.finish()
        names = [event.name for event in events if hasattr(event, "name")]
        arguments = [""] * len(names)
        for event in events:
            if not hasattr(event, "name"):
                assert hasattr(event, "index"), f"text beside the calls: {text!r}"
                arguments[event.index] += event.text
        assert names
        for name, given in zip(names, arguments, strict=True):
            jsonschema.validate(json.loads(given), schemas[name])
        if family == "pythonic":
            ast.parse(text.replace("true", "True").replace("false", "False"))


async def test_one_call_at_most_without_parallel_calls(compiler):
    request = present(parse_tools(TOOLS, "required", parallel=False))
    source = answer_source(request, TOOL_FAMILIES["hermes"], None, SPECIAL)
    grammar = await compiled(compiler, source, "x")
    matcher = grammar.matcher()
    assert follow(matcher, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert matcher.is_terminated()


async def test_strict_tools_are_enforced_where_a_call_is_free(compiler):
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    source = answer_source(present(parse_tools([tool])), TOOL_FAMILIES["hermes"], None, SPECIAL)
    grammar = await compiled(compiler, source, "x")
    begin = '<tool_call>\n{"name": "get_weather", "arguments": {'
    assert follow(grammar.matcher(), "Just text.")
    assert follow(grammar.matcher(), "First: " + begin + '"days": 3}}\n</tool_call>')
    assert not follow(grammar.matcher(), begin + '"nights": 3')
    assert answer_source(present(parse_tools(TOOLS)), TOOL_FAMILIES["hermes"], None, {}) is None


async def test_tools_beside_a_response_format(compiler):
    body = sources.choice(["plain"], "x")
    source = answer_source(present(parse_tools(TOOLS)), TOOL_FAMILIES["hermes"], body, SPECIAL)
    grammar = await compiled(compiler, source, "x")
    assert follow(grammar.matcher(), "plain")
    assert follow(grammar.matcher(), '<tool_call>\n{"name": "now", "arguments": {}}')
    assert not follow(grammar.matcher(), "other")


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3_json"),
        ("<|tool_call|>", "granite"),
        ("[func_name1(params)]", "pythonic"),
        (None, "hermes"),
    ],
)
def test_family_is_told_from_the_template(template, family):
    assert tool_family(None, template) is TOOL_FAMILIES[family]
