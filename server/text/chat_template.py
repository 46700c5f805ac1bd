"""A model's chat template: messages to prompt text, as transformers renders it."""

from __future__ import annotations

import datetime
import json
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.nodes import Node
    from jinja2.parser import Parser

Message = dict[str, Any]


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks assistant text for training; for serving it is just its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    env.filters["tojson"] = _to_json
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = _strftime_now
    return env


class ChatTemplate:
    """Compiled templates by name.

    Args:
        sources: by name; "default" is used, or "tool_use" where there are tools and it exists.
        special_tokens: names such as bos_token that templates refer to.

    Raises: ModelError: a template that does not compile.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        env = _environment()
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = env.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(f"chat template {name!r}: {error}") from None

    @property
    def source(self) -> str:
        """The text of the template that is used without tools."""
        return self.sources.get("default") or next(iter(self.sources.values()))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            continue_final_message: the prompt ends inside the last message, with its content.
            kwargs: further variables of the template.

        Raises: InvalidRequest: the template refuses the messages.
        """
        template = self._choose(bool(tools))
        variables = {
            **self._special_tokens,
            **(kwargs or {}),
            "messages": [dict(message) for message in messages],
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"messages: the model's chat template refused them: {error}", param="messages"
            ) from None
        except Exception as error:  # the template's own code failed on what the client sent
            raise InvalidRequest(
                "messages: the model's chat template cannot render them"
                f" ({type(error).__name__}: {error})",
                param="messages",
            ) from None
        return _cut_after_final(text, messages[-1]) if continue_final_message else text

    def _choose(self, tools: bool) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        return self._templates.get("default") or next(iter(self._templates.values()))


def _cut_after_final(text: str, message: Message) -> str:
    """The text up to the end of the last message's content."""
    content = message.get("content") or ""
    # Templates often strip what they are given; a trailing blank of the content then is not there.
    for wanted in (content, content.rstrip(), content.strip()):
        start = text.rfind(wanted) if wanted else -1
        if start >= 0:
            return text[: start + len(wanted)]
    raise InvalidRequest(
        "continue_final_message: the last message's content does not appear in the rendered"
        " conversation, so it cannot be continued",
        param="continue_final_message",
    )
