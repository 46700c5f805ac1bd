"""Grammar sources, and how they are put together: choices, tags, free text around others.

A source is a list of llguidance grammars, the first of which is the start; the others are reached
from Lark text as `@name`. Nothing here needs a tokenizer, except that the text of a special token
must be written by its id (`literal`), since a special token never stands for its characters.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Source = list[dict[str, Any]]

MAX_DEPTH = 64
# Beyond these the library compiles for seconds (14 s for 100,000).
MAX_CHOICES = 4096

ANY_TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class Tag:
    """A stretch of output with a fixed beginning, a grammar inside, and a fixed end.

    Args: content: None lets any text stand there.
    """

    begin: str
    content: Source | None
    end: str


@dataclass(slots=True)
class LarkBuilder:
    """Lark text with its sub-grammars; special tokens are written by id.

    Args: special_tokens: text of each special token, with its id.
    """

    special_tokens: Mapping[str, int]
    rules: list[str] = field(default_factory=list)
    subs: Source = field(default_factory=list)

    def literal(self, text: str) -> str:
        """Lark for exactly this text."""
        if not text:
            return '""'
        names = [t for t in sorted(self.special_tokens, key=len, reverse=True) if t and t in text]
        if not names:
            return json.dumps(text, ensure_ascii=False)
        pieces = re.split("(" + "|".join(map(re.escape, names)) + ")", text)
        return " ".join(
            f"<[{self.special_tokens[piece]}]>"
            if piece in self.special_tokens
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        )

    def embed(self, source: Source) -> str:
        """A reference to another source, whose grammars become sub-grammars of this one."""
        prefix = f"g{len(self.subs)}"
        renamed = {g["name"]: f"{prefix}_{g['name']}" for g in source}
        for grammar in source:
            sub = {**grammar, "name": renamed[grammar["name"]]}
            if lark := grammar.get("lark_grammar"):
                sub["lark_grammar"] = re.sub(
                    r"@(\w+)", lambda m: "@" + renamed.get(m[1], m[1]), lark
                )
            self.subs.append(sub)
        return "@" + renamed[source[0]["name"]]

    def until(self, text: str, name: str) -> str:
        """A reference to a rule for any text up to and including the first `text`."""
        if text in self.special_tokens:
            self.rules.append(f"{name}: ANY <[{self.special_tokens[text]}]>")
        else:
            self.rules.append(f"{name}[lazy]: ANY {json.dumps(text, ensure_ascii=False)}")
        if (any_rule := f"ANY: {ANY_TEXT}") not in self.rules:
            self.rules.append(any_rule)
        return name

    def source(self, start: str) -> Source:
        """The finished source."""
        lark = "\n".join(["%llguidance {}", f"start: {start}", *self.rules])
        return [{"name": "start", "lark_grammar": lark}, *self.subs]


def choice(options: Any, param: str) -> Source:
    """The source of a list of texts, one of which is the output."""
    if not isinstance(options, list) or not 0 < len(options) <= MAX_CHOICES:
        raise InvalidRequest(f"{param} must be a list of 1 to {MAX_CHOICES} strings", param=param)
    if bad := [o for o in options if not isinstance(o, str) or not o]:
        raise InvalidRequest(
            f"{param} holds {shown(bad[0])}; only non-empty strings go", param=param
        )
    # As one terminal: as a rule, the parser would hold a row of as many items, and give up.
    texts = " | ".join(json.dumps(o, ensure_ascii=False) for o in options)
    lark = f"start: CHOICE\nCHOICE: {texts}"
    return [{"name": "choice", "lark_grammar": lark}]


def tags(
    choices: Sequence[Tag],
    special_tokens: Mapping[str, int],
    *,
    at_least_one: bool = False,
    many: bool = True,
    separator: str = "",
    wrap: tuple[str, str] = ("", ""),
) -> Source:
    """Output that is one or more tags and nothing else.

    Args:
        at_least_one: without it the empty output goes as well.
        many: more than one tag may come, with `separator` between them.
        wrap: text before the first and after the last tag.
    """
    build = LarkBuilder(special_tokens)
    one = "(" + " | ".join(_tag(build, tag, tag.begin) for tag in choices) + ")"
    more = f" ({build.literal(separator)} {one})*" if many else ""
    body = f"{one}{more}" if at_least_one else f"({one}{more})?"
    return build.source(f"{build.literal(wrap[0])} {body} {build.literal(wrap[1])}")


def triggered_tags(
    choices: Sequence[Tag],
    triggers: Iterable[str],
    special_tokens: Mapping[str, int],
    param: str,
    *,
    once: bool = False,
) -> Source:
    """Free text in which each occurrence of a trigger must open one of the tags.

    Args: once: the first tag ends the output.
    Raises: InvalidRequest: a tag that begins with no trigger.
    """
    build = LarkBuilder(special_tokens)
    ordered = sorted(set(triggers), key=len, reverse=True)
    options = []
    for number, tag in enumerate(choices):
        trigger = next((t for t in ordered if t and tag.begin.startswith(t)), None)
        if trigger is None:
            raise InvalidRequest(
                f"{param}: the tag {shown(tag.begin)} begins with none of the triggers {ordered}",
                param=param,
            )
        head = build.until(trigger, f"open_{number}")
        options.append(f"{head} {_tag(build, tag, tag.begin[len(trigger) :])}")
    build.rules.append("tail: ANY")
    either = " | ".join(options)
    return build.source(f"{either} | tail" if once else f"({either})* tail")


def _tag(build: LarkBuilder, tag: Tag, begin: str) -> str:
    if tag.content is not None:
        return f"{build.literal(begin)} {build.embed(tag.content)} {build.literal(tag.end)}"
    if not tag.end:
        raise InvalidRequest(f"the tag {shown(tag.begin)} with free text needs an end")
    return f"{build.literal(begin)} {build.until(tag.end, f'close_{len(build.rules)}')}"


def after_text(end: str, body: Source, special_tokens: Mapping[str, int]) -> Source:
    """Free text up to the first `end` (a chain of thought), then the body."""
    build = LarkBuilder(special_tokens)
    head = build.until(end, "thought")
    return build.source(rf"{head} /\n{{0,2}}/ {build.embed(body)}")
