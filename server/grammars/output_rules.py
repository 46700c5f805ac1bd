"""What requests ask their output to look like, and the grammar sources that it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest, shown
from server.grammars import sources
from server.grammars.grammar_text import context_free, regex
from server.grammars.json_schema import any_json_object, json_schema
from server.grammars.sources import LarkBuilder, Source, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class OutputRule:
    """What a request asks the output to look like.

    Args:
        name: the field that says so, for messages.
        kind: json, regex, choice, grammar, json_object or structural_tag; rules how `value` reads.
    """

    name: str
    kind: str
    value: Any


def source_of(
    rules: Sequence[OutputRule], special_tokens: Mapping[str, int]
) -> tuple[Source, str] | None:
    """The grammar that a request asks for and the field it came from, or None.

    Args: special_tokens: text of each special token of the tokenizer, with its id.
    Raises: InvalidRequest: a rule that makes no sense, or two of them.
    """
    if len(rules) > 1:
        first, second = rules[0].name, rules[1].name
        raise InvalidRequest(
            f"{first} and {second} both rule the output; give one of them", param=second
        )
    for rule in rules:
        if rule.kind == "json_object":
            return any_json_object(rule.name), rule.name
        if rule.kind == "structural_tag":
            return structural_tag(rule.value, special_tokens, rule.name), rule.name
        return _MAKERS[rule.kind](rule.value, rule.name), rule.name
    return None


_MAKERS: dict[str, Callable[[Any, str], Source]] = {
    "json": json_schema,
    "regex": regex,
    "choice": sources.choice,
    "grammar": context_free,
}


def structural_tag(
    wish: Any, special_tokens: Mapping[str, int], param: str = "structural_tag"
) -> Source:
    """The source of a structural tag: `structures` and `triggers`, or a tree under `format`.

    Raises: InvalidRequest: naming the part that makes no sense.
    """
    if not isinstance(wish, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    if "format" in wish:
        return _FormatTree(special_tokens, param).source(wish["format"])
    structures, triggers = wish.get("structures"), wish.get("triggers")
    if not isinstance(structures, list) or not structures:
        raise InvalidRequest(f"{param}.structures must be a non-empty list", param=param)
    found = []
    for one in structures:
        if not isinstance(one, dict):
            raise InvalidRequest(f"{param}.structures holds {shown(one)}, no object", param=param)
        content = json_schema(one.get("schema", {}), f"{param}.structures.schema")
        found.append(Tag(_text(one, "begin", param), content, _text(one, "end", param)))
    return sources.triggered_tags(found, _texts(triggers, param), special_tokens, param)


def _text(holder: dict[str, Any], key: str, param: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}: {key} must be a string, got {shown(value)}", param=param)
    return value


def _texts(value: Any, param: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(
            f"{param}.triggers must be a non-empty list of strings, got {shown(value)}", param=param
        )
    return value


class _FormatTree:
    """The newer form of structural tags: a tree of formats, each of which becomes a source."""

    def __init__(self, special_tokens: Mapping[str, int], param: str) -> None:
        self.special_tokens = special_tokens
        self.param = param
        self.makers: dict[str, Callable[[dict[str, Any]], Source]] = {
            "const_string": lambda f: self._joined([self._literal(_text(f, "value", param))], " "),
            "any_text": lambda f: self._joined([sources.ANY_TEXT], " "),
            "json_schema": lambda f: json_schema(f.get("json_schema"), param),
            "regex": lambda f: regex(f.get("pattern"), param),
            "grammar": lambda f: context_free(f.get("grammar"), param),
            "sequence": lambda f: self._joined(self._elements(f), " "),
            "or": lambda f: self._joined(self._elements(f), " | "),
            "tag": lambda f: sources.tags(
                [self._tag(f)], special_tokens, at_least_one=True, many=False
            ),
            "triggered_tags": lambda f: sources.triggered_tags(
                self._tags(f), _texts(f.get("triggers"), param), special_tokens, param
            ),
            "tags_with_separator": lambda f: sources.tags(
                self._tags(f),
                special_tokens,
                at_least_one=f.get("at_least_one") is True,
                many=f.get("stop_after_first") is not True,
                separator=_text(f, "separator", param),
            ),
        }

    def source(self, fmt: Any, depth: int = 0) -> Source:
        self.depth = depth
        kind = fmt.get("type") if isinstance(fmt, dict) else None
        if not isinstance(kind, str) or kind not in self.makers or depth > sources.MAX_DEPTH:
            raise InvalidRequest(
                f"{self.param}: format type {shown(kind)} at depth {depth}: must be one of"
                f" {', '.join(self.makers)}, at most {sources.MAX_DEPTH} deep",
                param=self.param,
            )
        return self.makers[kind](fmt)

    def _children(self, fmt: dict[str, Any], key: str) -> list[Any]:
        value = fmt.get(key)
        if not isinstance(value, list) or not value:
            raise InvalidRequest(
                f"{self.param}: {key} must be a non-empty list, got {shown(value)}",
                param=self.param,
            )
        return value

    def _literal(self, text: str) -> str:
        return LarkBuilder(self.special_tokens).literal(text)

    def _elements(self, fmt: dict[str, Any]) -> list[Source]:
        depth = self.depth
        return [self.source(e, depth + 1) for e in self._children(fmt, "elements")]

    def _joined(self, parts: list[Any], joint: str) -> Source:
        build = LarkBuilder(self.special_tokens)
        names = [part if isinstance(part, str) else build.embed(part) for part in parts]
        return build.source(joint.join(names))

    def _tag(self, fmt: Any) -> Tag:
        if not isinstance(fmt, dict):
            raise InvalidRequest(f"{self.param}: a tag must be an object", param=self.param)
        inner, depth = fmt.get("content"), self.depth
        free = isinstance(inner, dict) and inner.get("type") == "any_text"
        content = None if free else self.source(inner, depth + 1)
        self.depth = depth
        return Tag(_text(fmt, "begin", self.param), content, _text(fmt, "end", self.param))

    def _tags(self, fmt: dict[str, Any]) -> list[Tag]:
        return [self._tag(tag) for tag in self._children(fmt, "tags")]
