"""Which fields of a request ask for structured output, and the grammar source they mean.

Field names follow the OpenAI reference (`response_format`), vLLM (`guided_*`,
`structured_outputs`) and SGLang (`json_schema`, `regex`, `ebnf`, for the native endpoint).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from server.grammars import sources as sources
from server.grammars.sources import LarkBuilder, Source, Tag

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_KINDS: dict[str, Callable[[Any, str], Source]] = {
    "json": sources.json_schema,
    "regex": sources.regex,
    "choice": sources.choice,
    "grammar": sources.context_free,
}
_NATIVE = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


def source_of(
    body: Mapping[str, Any], special_tokens: Mapping[str, int], *, native: bool = False
) -> tuple[Source, str] | None:
    """The grammar that a request body asks for and the field it came from, or None.

    Args:
        special_tokens: text of each special token of the tokenizer, with its id.
        native: also read SGLang's names, as the native endpoint does.

    Raises: InvalidRequest: a field that makes no sense, or two fields that ask at once.
    """
    asked: list[tuple[str, Callable[[], Source | None]]] = []
    if (fmt := body.get("response_format")) is not None:
        asked.append(("response_format", lambda: _response_format(fmt, special_tokens)))
    for kind, make in _KINDS.items():
        name = f"guided_{kind}"
        if (value := body.get(name)) is not None:
            asked.append((name, lambda m=make, v=value, n=name: m(v, n)))  # type: ignore[misc]
    if (tag := body.get("structural_tag")) is not None:
        asked.append(("structural_tag", lambda: structural_tag(tag, special_tokens)))
    if (wish := body.get("structured_outputs")) is not None:
        asked.append(("structured_outputs", lambda: _structured_outputs(wish, special_tokens)))
    for name, kind in _NATIVE.items() if native else ():
        if (value := body.get(name)) is not None:
            make = _KINDS[kind]
            asked.append((name, lambda m=make, v=value, n=name: m(v, n)))  # type: ignore[misc]
    found = [(source, name) for name, make in asked if (source := make()) is not None]
    if len(found) > 1:
        raise InvalidRequest(
            f"{found[0][1]} and {found[1][1]} both rule the output; give one of them",
            param=found[1][1],
        )
    return found[0] if found else None


def _response_format(fmt: Any, special_tokens: Mapping[str, int]) -> Source | None:
    name = "response_format"
    kind = fmt.get("type") if isinstance(fmt, dict) else None
    if kind not in RESPONSE_FORMATS:
        given = repr(kind) if isinstance(fmt, dict) else repr(fmt)
        raise InvalidRequest(
            f"{name}.type {given}: must be one of {', '.join(RESPONSE_FORMATS)}", param=name
        )
    if kind == "text":
        return None
    if kind == "json_object":
        return sources.any_json_object(name)
    if kind == "structural_tag":
        return structural_tag(fmt, special_tokens, name)
    holder = fmt.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if schema is None:
        raise InvalidRequest(f"{name}.json_schema.schema is missing", param=name)
    return sources.json_schema(schema, f"{name}.json_schema.schema")


def _structured_outputs(wish: Any, special_tokens: Mapping[str, int]) -> Source | None:
    name = "structured_outputs"
    known = (*_KINDS, "json_object", "structural_tag")
    given = [k for k in known if wish.get(k) is not None] if isinstance(wish, dict) else []
    if len(given) != 1:
        raise InvalidRequest(
            f"{name} must be an object with exactly one of {', '.join(known)}", param=name
        )
    kind = given[0]
    if kind == "json_object":
        return sources.any_json_object(name) if wish[kind] is True else None
    if kind == "structural_tag":
        return structural_tag(wish[kind], special_tokens, f"{name}.{kind}")
    return _KINDS[kind](wish[kind], f"{name}.{kind}")


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
            raise InvalidRequest(f"{param}.structures holds {one!r}, no object", param=param)
        content = sources.json_schema(one.get("schema", {}), f"{param}.structures.schema")
        found.append(Tag(_text(one, "begin", param), content, _text(one, "end", param)))
    return sources.triggered_tags(found, _texts(triggers, param), special_tokens, param)


def _text(holder: dict[str, Any], key: str, param: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}: {key} must be a string, got {value!r}", param=param)
    return value


def _texts(value: Any, param: str) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise InvalidRequest(
            f"{param}.triggers must be a non-empty list of strings, got {value!r}", param=param
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
            "json_schema": lambda f: sources.json_schema(f.get("json_schema"), param),
            "regex": lambda f: sources.regex(f.get("pattern"), param),
            "grammar": lambda f: sources.context_free(f.get("grammar"), param),
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
                f"{self.param}: format type {kind!r} at depth {depth}: must be one of"
                f" {', '.join(self.makers)}, at most {sources.MAX_DEPTH} deep",
                param=self.param,
            )
        return self.makers[kind](fmt)

    def _children(self, fmt: dict[str, Any], key: str) -> list[Any]:
        value = fmt.get(key)
        if not isinstance(value, list) or not value:
            raise InvalidRequest(
                f"{self.param}: {key} must be a non-empty list, got {value!r}", param=self.param
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
