"""A model's chat templates: messages to prompt text, as transformers renders it."""

from __future__ import annotations

import datetime
import json
import re
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.checkpoints.json_file import read_optional_json_object
from runtime.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.nodes import Node
    from jinja2.parser import Parser

Message = dict[str, Any]

# Put behind the content that is to be continued, so that the prompt can be cut exactly there. The
# blank at its end shows whether the template trims what it is given.
_CUT_HERE = "loomserve-cuts-the-prompt-here "


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


_NAME = re.compile(r"[A-Za-z_]\w*")


class ChatTemplate:
    """Compiled templates by name.

    Args:
        sources: by name; "default" is used, or "tool_use" where there are tools and it exists.
        special_tokens: names such as bos_token that templates refer to.

    Attributes: words: all names in the templates; a field that is none of them is read by none.

    Raises: ModelError: a template that does not compile.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._env = _environment()
        self.sources = dict(sources)
        self.words = frozenset(_NAME.findall("\n".join(sources.values())))
        self._special_tokens = dict(special_tokens)
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = self._env.from_string(source)
            except (jinja2.TemplateError, RecursionError) as error:
                raise ModelError(f"chat template {name!r}: {error}") from None

    def name(self, *, tools: bool) -> str:
        """The template for a conversation with tools, or for one without."""
        if tools and "tool_use" in self.sources:
            return "tool_use"
        return "default" if "default" in self.sources else next(iter(self.sources))

    def variables(self, *, tools: bool) -> frozenset[str]:
        """The variables that a template expects from its caller."""
        source = self.sources[self.name(tools=tools)]
        return frozenset(jinja2.meta.find_undeclared_variables(self._env.parse(source)))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        tools_variable: str = "tools",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation.

        Args:
            tools_variable: the name under which this template reads the tools.
            continue_final_message: the prompt ends inside the last message, with its content.
            kwargs: further variables of the template.

        Raises: InvalidRequest: the template refuses the messages.
        """
        messages = [dict(message) for message in messages]
        final = messages[-1].get("content") or ""
        if continue_final_message:
            messages[-1]["content"] = _with_text_behind(final, _CUT_HERE)
        variables = {
            **self._special_tokens,
            "documents": None,
            "tools": None,
            **(kwargs or {}),
            **({tools_variable: tools} if tools else {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._templates[self.name(tools=bool(tools))].render(variables)
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
        return _cut(text, final) if continue_final_message else text


def _with_text_behind(content: Any, text: str) -> Any:
    """The content of a message with text behind its own, which is a string or in its last part."""
    if isinstance(content, str):
        return content + text
    *before, last = content
    return [*before, {**last, "text": last["text"] + text}]


def _cut(text: str, content: Any) -> str:
    """The prompt up to the mark behind the last message's content."""
    wanted = content if isinstance(content, str) else content[-1]["text"]
    at = text.rfind(_CUT_HERE.strip())
    if at < 0 or wanted.strip() not in text:
        raise InvalidRequest(
            "continue_final_message: the last message's content does not appear in the rendered"
            " conversation, so it cannot be continued",
            param="continue_final_message",
        )
    # Where the template trims, blanks before the mark would have been trimmed without it.
    return text[:at] if text.startswith(_CUT_HERE, at) else text[:at].rstrip()


def template_sources(
    folder: Path, config: Mapping[str, Any], override: Path | None
) -> dict[str, str]:
    """The chat templates of a model in Hugging Face layout, by name; empty where it has none.

    The option's file comes before all else. Then chat_template.jinja and the files in
    additional_chat_templates, which are named after their template; then `chat_template` of the
    tokenizer's config or of chat_template.json: a text, or a list of objects with name and
    template.

    Args: config: of tokenizer_config.json. override: the option's file.
    Raises: ModelError: a file that cannot be read, or a list with something else in it.
    """
    if override is not None:
        return {"default": _read(override)}
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    found = {file.stem: _read(file) for file in files}
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return {"default": _read(jinja), **found}
    value = config.get("chat_template")
    value = value or read_optional_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(value, list):
        try:
            value = {entry["name"]: entry["template"] for entry in value}
        except (TypeError, KeyError):
            raise ModelError(
                f"{folder}: chat_template must be a list of objects with name and template"
            ) from None
    named = value if isinstance(value, dict) else {"default": value} if value else {}
    if bad := [name for name, text in named.items() if not isinstance(text, str)]:
        raise ModelError(f"{folder}: chat_template {bad[0]!r} is not a text")
    return {**named, **found}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"chat template {path}: cannot be read: {error}") from None
