"""Fields that rule what the output must look like, under the names that servers have for them."""

from __future__ import annotations

from typing import Any

from server.api.fields.bodies import Body, Record, Tagged, ignored, required, served
from server.api.fields.kinds import Boolean, Checked, Choice, Either, Items, JsonObject, Text
from server.grammars.output_rules import OutputRule
from server.grammars.sources import MAX_CHOICES

SCHEMA = Either(JsonObject("a JSON schema"), Text(), Boolean())
EXPRESSION = Text(least=1)
CHOICES = Items(EXPRESSION, "strings, none empty", least=1, most=MAX_CHOICES)

_JSON = "a JSON schema, or the text of one, for the whole output"
_REGEX = "a regular expression for the whole output"
_GRAMMAR = "a grammar for the whole output, in Lark's form, or GBNF with ::="


class TagStructure(Body):
    begin = required(Text(), "the text with which it begins")
    schema = served(SCHEMA, "a JSON schema for what is in it; without it, any object")
    end = required(Text(), "the text with which it ends")


class StructuralTag(Body):
    structures = served(
        Items(Checked(Record(TagStructure)), "structures", least=1), "what may be begun"
    )
    triggers = served(
        Items(Text(), "strings", least=1), "free text ends in one of these where a structure begins"
    )
    format = served(
        JsonObject("an object with a type"),
        "instead, a tree of formats: const_string, any_text, json_schema, regex, grammar,"
        " sequence, or, tag, triggered_tags, tags_with_separator",
    )
    one_of = ("structures", "format")

    def wish(self) -> dict[str, Any]:
        """What was given, for the grammar to be made of."""
        found = {name: getattr(self, name) for name in ("structures", "triggers", "format")}
        return {name: value for name, value in found.items() if value is not None}


TAG = Record(StructuralTag)


class NamedSchema(Body):
    name = served(Text(), "for the client's own use")
    description = served(Text(), "for the client's own use")
    schema = required(SCHEMA, _JSON)
    unserved = ignored("a schema is always enforced", "strict")


class TextFormat(Body):
    type = required(Choice("text"), "any text")


class ObjectFormat(Body):
    type = required(Choice("json_object"), "a JSON object")
    schema = served(SCHEMA, "a JSON schema, which then is enforced")


class SchemaFormat(Body):
    type = required(Choice("json_schema"), "JSON of a schema")
    json_schema = served(Record(NamedSchema), "the schema, as OpenAI places it")
    schema = served(SCHEMA, "the schema, as llama.cpp places it")
    one_of = ("json_schema", "schema")


class TagFormat(StructuralTag):
    type = required(Choice("structural_tag"), "text with structures in it")


class StructuredOutputs(Body):
    """One of these; vLLM's newer form of guided_json and its like."""

    json = served(SCHEMA, _JSON)
    regex = served(EXPRESSION, _REGEX)
    choice = served(CHOICES, "the output is one of these")
    grammar = served(EXPRESSION, _GRAMMAR)
    json_object = served(Boolean(), "the output is a JSON object")
    structural_tag = served(TAG, "text with structures in it")
    unserved = ignored(
        "grammars are enforced by one engine, blanks and unlisted keys as the schema has them",
        "backend",
        "disable_additional_properties",
        "disable_any_whitespace",
        "disable_fallback",
        "whitespace_pattern",
    )

    one_of = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

    def rule(self, where: str) -> OutputRule:
        """What it asks for."""
        given = {name: getattr(self, name) for name in self.one_of}
        [(name, value)] = [pair for pair in given.items() if pair[1] not in (None, False)]
        return _rule(f"{where}.{name}", name, value)


# Fields that hold a rule of their own, with its kind.
_RULES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}


class GrammarFields(Body):
    """At most one of them may be given."""

    response_format = served(
        Tagged(
            "type",
            {
                "text": TextFormat,
                "json_object": ObjectFormat,
                "json_schema": SchemaFormat,
                "structural_tag": TagFormat,
            },
        ),
        "OpenAI's way to ask for JSON",
    )
    structured_outputs = served(Record(StructuredOutputs), "vLLM's way")
    guided_json = served(SCHEMA, _JSON)
    guided_regex = served(EXPRESSION, _REGEX)
    guided_choice = served(CHOICES, "the output is one of these")
    guided_grammar = served(EXPRESSION, _GRAMMAR)
    json_schema = served(SCHEMA, _JSON)
    regex = served(EXPRESSION, _REGEX)
    ebnf = served(EXPRESSION, _GRAMMAR)
    grammar = served(EXPRESSION, _GRAMMAR)
    structural_tag = served(TAG, "text with structures in it")

    def rules(self) -> list[OutputRule]:
        """What the output must look like, from every field that says so."""
        found = [
            _rule(name, kind, value)
            for name, kind in _RULES.items()
            if (value := getattr(self, name)) is not None
        ]
        if self.structured_outputs is not None:
            found.append(self.structured_outputs.rule("structured_outputs"))
        return found + format_rules(self.response_format, "response_format")


def format_rules(given: Body | None, where: str) -> list[OutputRule]:
    """The rule of a response format. where: it stands in the body."""
    match given:
        case ObjectFormat(schema=None):
            return [OutputRule(where, "json_object", True)]
        case ObjectFormat(schema=schema):
            return [OutputRule(f"{where}.schema", "json", schema)]
        case SchemaFormat(json_schema=NamedSchema() as named):
            return [OutputRule(f"{where}.json_schema.schema", "json", named.schema)]
        case SchemaFormat(schema=schema):
            return [OutputRule(f"{where}.schema", "json", schema)]
        case TagFormat():
            return [_rule(where, "structural_tag", given)]
    return []


def _rule(name: str, kind: str, value: Any) -> OutputRule:
    return OutputRule(name, kind, value.wish() if isinstance(value, StructuralTag) else value)
