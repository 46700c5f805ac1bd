"""How families of models write tool calls: how they are read, and the grammar of those allowed.

`TOOL_FAMILIES` is keyed by the value of --tool-call-parser. Without the option the family is told
from the chat template. Models whose template knows no tools are told of them in the system message,
and write calls in the Hermes way.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.errors import ConfigError, InvalidRequest
from server.formats.json_calls import GraniteParser, HermesParser, Llama3JsonParser, MistralParser
from server.formats.pythonic_calls import PythonicParser
from server.formats.tool_parser import ToolCallParser, mistral_call_id, openai_call_id
from server.grammars import sources
from server.grammars.json_schema import any_json_object, json_schema
from server.grammars.sources import LarkBuilder, Source, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from server.formats.tools import Tool, ToolRequest

# Each is a rule that refers to the next: the grammar library follows them by recursion.
_MAX_KEYWORDS = 450


@dataclass(frozen=True, slots=True)
class ToolFamily:
    """How a family of models writes calls.

    Args:
        parser: reads them.
        before, separator, after: around and between the calls of one answer.
        begin: before a call's arguments; {name} stands for the name as JSON text.
        end: after them.
        in_text: calls may follow free text (their beginning cannot be mistaken).
        keywords: arguments are Python keyword arguments, not a JSON object.
        new_id: makes call ids.
    """

    parser: type[ToolCallParser]
    begin: str
    end: str
    separator: str = ""
    before: str = ""
    after: str = ""
    in_text: bool = False
    keywords: bool = False
    new_id: Callable[[], str] = openai_call_id

    def read(self, request: ToolRequest, new_id: Callable[[], str] | None = None) -> ToolCallParser:
        """A parser for one answer. Args: new_id: where the model wants ids of another form."""
        known = {tool.name: tool.parameter_names for tool in request.tools}
        return self.parser(known, new_id or self.new_id)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the model itself would write them.

        Args: calls: names and arguments; an object, or a text that is written as it is.
        """
        one_by_one = [
            self.begin.replace("{name}", name if self.keywords else json.dumps(name))
            + self._written_arguments(arguments)
            + self.end
            for name, arguments in calls
        ]
        return self.before + self.separator.join(one_by_one) + self.after

    def _written_arguments(self, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            return str(arguments)
        if self.keywords:
            return ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return json.dumps(arguments, ensure_ascii=False)

    def tags(self, tools: Sequence[Tool], *, enforced: bool) -> list[Tag]:
        """A call of each tool. Args: enforced: by its schema, else by any JSON object."""
        found = []
        for tool in tools:
            name = tool.name if self.keywords else json.dumps(tool.name)
            param = f"tools.{tool.name}.parameters"
            if self.keywords:
                content = _keyword_arguments(tool.parameters, param)
            elif enforced or tool.strict:
                content = json_schema(tool.parameters, param)
            else:
                content = any_json_object(param)
            found.append(Tag(self.begin.replace("{name}", name), content, self.end))
        return found


TOOL_FAMILIES = {
    "hermes": ToolFamily(
        HermesParser,
        begin='<tool_call>\n{"name": {name}, "arguments": ',
        end="}\n</tool_call>",
        separator="\n",
        in_text=True,
    ),
    "llama3_json": ToolFamily(
        Llama3JsonParser, begin='{"name": {name}, "parameters": ', end="}", separator="; "
    ),
    "mistral": ToolFamily(
        MistralParser,
        begin='{"name": {name}, "arguments": ',
        end="}",
        separator=", ",
        before="[TOOL_CALLS][",
        after="]",
        in_text=True,
        new_id=mistral_call_id,
    ),
    "granite": ToolFamily(
        GraniteParser,
        begin='{"name": {name}, "arguments": ',
        end="}",
        separator=", ",
        before="<|tool_call|>[",
        after="]",
        in_text=True,
    ),
    "pythonic": ToolFamily(
        PythonicParser,
        begin="{name}(",
        end=")",
        separator=", ",
        before="[",
        after="]",
        keywords=True,
    ),
}
TOOL_FAMILIES["qwen"] = TOOL_FAMILIES["hermes"]


def tool_family(name: str | None, template: str | None) -> ToolFamily:
    """The family of an option's value, or else of a chat template.

    Raises: ConfigError: there is no such family.
    """
    if name is not None:
        if name not in TOOL_FAMILIES:
            raise ConfigError(
                f"tool_call_parser {name!r}: must be one of {', '.join(TOOL_FAMILIES)}"
            )
        return TOOL_FAMILIES[name]
    for mark, family in (
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_call|>", "granite"),
        ("<|tool|>", "granite"),  # Phi 4 mini: its template shows tools, but no calls
        ("[func_name1(", "pythonic"),
        ("<|python_start|>", "pythonic"),
        ("<|python_tag|>", "llama3_json"),
        ('"parameters": ', "llama3_json"),
    ):
        if mark in (template or ""):
            return TOOL_FAMILIES[family]
    return TOOL_FAMILIES["hermes"]


def answer_source(
    request: ToolRequest,
    family: ToolFamily,
    body: Source | None,
    special_tokens: Mapping[str, int],
) -> Source | None:
    """What the answer to a request with tools must look like; None: anything.

    Args: body: what an answer that calls no tool must look like, or None.
    """
    free = not request.required and body is None
    ruled = not request.parallel or any(tool.strict for tool in request.allowed)
    if free and not (family.in_text and ruled):
        return None
    tags = family.tags(request.allowed, enforced=not free)
    if free:
        marked = [
            replace(tag, begin=family.before + tag.begin, end=tag.end + family.after)
            for tag in tags
        ]
        marker = next(iter(family.parser.markers))
        return sources.triggered_tags(
            marked, [marker], special_tokens, "tools", once=not request.parallel
        )
    calls = sources.tags(
        tags,
        special_tokens,
        at_least_one=True,
        many=request.parallel,
        separator=family.separator,
        wrap=(family.before, family.after),
    )
    if request.required or body is None:
        return calls
    build = LarkBuilder(special_tokens)
    return build.source(f"{build.embed(calls)} | {build.embed(body)}")


def _keyword_arguments(schema: dict[str, Any], param: str) -> Source:
    """key=value, ... in the order of the schema's properties, required ones always there."""
    properties = schema.get("properties")
    required = schema.get("required")
    needed = required if isinstance(required, list) else []
    shared = {k: v for k, v in schema.items() if k in ("$defs", "definitions", "$schema")}
    build = LarkBuilder({})
    items = list(properties.items()) if isinstance(properties, dict) else []
    if len(items) > _MAX_KEYWORDS:
        raise InvalidRequest(
            f"{param}: {len(items)} parameters cannot be enforced; at most {_MAX_KEYWORDS} can",
            param=param,
        )
    # first_i: the properties from i on, when none was given so far; more_i: when some were.
    for index, (key, value) in enumerate(items):
        part = {**value, **shared} if isinstance(value, dict) else value
        item = f"{build.literal(key + '=')} {build.embed(json_schema(part, param))}"
        first, more = f"{item} more_{index + 1}", f'", " {item} more_{index + 1}'
        if key not in needed:
            first, more = f"{first} | first_{index + 1}", f"{more} | more_{index + 1}"
        build.rules += [f"first_{index}: {first}", f"more_{index}: {more}"]
    build.rules += [f'first_{len(items)}: ""', f'more_{len(items)}: ""']
    return build.source("first_0")
