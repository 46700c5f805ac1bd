"""Random conversations under chat templates, compared with transformers and with plain jinja2.

    python -m tests.server.formats.random_chats [FOLDER ...] [--chats 200] [--seed 0]

checks the templates of this repository, of installed packages, and every *.jinja file under the
folders, and prints how each fared. The test of the same checks runs a few chats of each template.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import datetime
import functools
import json
import random
import re
import site
import sys
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import InvalidRequest, ModelError
from server.formats.conversation import fit, parse_messages
from server.formats.template_traits import find_traits
from server.formats.tool_families import TOOL_FAMILIES
from server.formats.tools import parse_tools
from server.text.chat_template import ChatTemplate

OWN = Path(__file__).parent.parent / "text" / "templates"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = (
    "one",
    "two",
    "<",
    "i",
    "end",
    "</s",
    "{{ x }}",
    "{% if %}",
    "é日🙂",
    '"q"',
    "a\nb",
    "\\",
    "'",
)


class Mismatch(AssertionError):
    """Two renderings that ought to be equal are not, or something of a conversation is lost."""


@dataclasses.dataclass(frozen=True)
class Chat:
    """A request's messages as clients write them, its tools, and the options of rendering."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    options: dict[str, Any]


class Draw:
    """Random parts of conversations; every value that must not be lost is a word of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0

    def word(self) -> str:
        self.count += 1
        return f"w{self.count}x"

    def text(self) -> str:
        """Some words, odd ones too, at times with blanks around."""
        rng = self.rng
        words = [rng.choice(WORDS) for _ in range(rng.randrange(4))]
        words.insert(rng.randrange(len(words) + 1), self.word())
        blank = rng.choice(("", "", "", " ", "\n"))
        return rng.choice(("", "", "", " ", "\n\n")) + " ".join(words) + blank

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(7 if depth < 2 else 4)
        if kind < 4:
            return (self.word(), self.rng.randrange(100), True, None)[kind]
        if kind == 4:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(3))]
        return {self.word(): self.value(depth + 1) for _ in range(self.rng.randrange(3))}

    def tool(self) -> dict[str, Any]:
        kinds = ("string", "integer", "boolean")
        keys = [self.word() for _ in range(self.rng.randrange(1, 3))]
        properties = {
            key: {"type": self.rng.choice(kinds), "description": self.word()} for key in keys
        }
        parameters = {"type": "object", "properties": properties, "required": keys[:1]}
        function = {"name": self.word(), "description": self.word(), "parameters": parameters}
        return {"type": "function", "function": function}

    def chat(self) -> Chat:
        rng = self.rng
        tools = [self.tool() for _ in range(rng.choice((0, 0, 1, 2)))]
        messages: list[dict[str, Any]] = []
        if rng.random() < 0.5:
            messages.append({"role": rng.choice(("system", "developer")), "content": self.text()})
        for _ in range(rng.randrange(3)):
            messages += [self.user(), *self.turn(tools)]
        messages.append(self.user())
        ending = rng.choice(("question", "question", "closed", "result", "begun"))
        options: dict[str, Any] = {"add_generation_prompt": True}
        if ending in ("closed", "begun"):
            text = self.text() if rng.random() < 0.8 else rng.choice(("<", "i", "end", "m", "e"))
            messages.append({"role": "assistant", "content": text})
            options = {"add_generation_prompt": False}
            if ending == "begun":
                options["continue_final_message"] = True
        elif ending == "result":
            messages += self.calls(tools)
        return Chat(messages, tools, options)

    def user(self) -> dict[str, Any]:
        return {"role": "user", "content": self.text()}

    def turn(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the assistant does after a question."""
        before = self.calls(tools) if self.rng.random() < 0.4 else []
        said: dict[str, Any] = {"role": "assistant", "content": self.text()}
        if self.rng.random() < 0.3:
            said["tool_calls"] = []
        if self.rng.random() < 0.3:
            said["reasoning_content"] = self.text()
        return [*before, said]

    def calls(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not tools:
            return []
        calls, results = [], []
        for _ in range(self.rng.choice((1, 1, 2))):
            function = self.rng.choice(tools)["function"]
            arguments = {key: self.value() for key in function["parameters"]["properties"]}
            call_id = "call_" + self.word()
            written = {"name": function["name"], "arguments": json.dumps(arguments)}
            calls.append({"id": call_id, "type": "function", "function": written})
            results.append({"role": "tool", "tool_call_id": call_id, "content": self.text()})
        content = self.rng.choice((None, "", self.text()))
        return [{"role": "assistant", "content": content, "tool_calls": calls}, *results]


class _Generation(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache
def _by_jinja(source: str) -> jinja2.Template:
    """The template in a plain jinja2 environment, set up as transformers documents it."""
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    env.filters["tojson"] = lambda value, ensure_ascii=False, **more: json.dumps(
        value, ensure_ascii=ensure_ascii, **more
    )
    env.globals["raise_exception"] = _refuse
    env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return env.from_string(source)


def a_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of transformers for its `apply_chat_template`; it never tokenizes."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


def by_transformers(tokenizer, sources: dict[str, str], messages, tools, options) -> str:
    tokenizer.chat_template = sources if len(sources) > 1 else sources["default"]
    found = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, **options)
    assert isinstance(found, str)
    return found


class Checker:
    """Checks one model's templates. sources: by name."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.sources = sources
        self.template = ChatTemplate(sources, SPECIAL)
        self.traits = {tools: find_traits(self.template, tools=tools) for tools in (False, True)}
        self.tokenizer = a_tokenizer()
        self.refused = self.equal = self.as_sent = 0

    def check(self, chat: Chat) -> None:
        """Raises: Mismatch."""
        request = parse_tools(chat.tools)
        offered = request.tools if request is not None else ()
        traits = self.traits[bool(offered)]
        messages, more = fit(
            parse_messages(chat.messages), offered, traits, TOOL_FAMILIES["hermes"]
        )
        try:
            text = self.template.render(messages, **more, **chat.options)
        except InvalidRequest as error:
            self.refused += 1
            self._refused_by_all(messages, more, chat.options, error)
            return
        self._same_as_references(text, messages, more, chat.options)
        self._nothing_lost(text, chat, traits)
        self._same_as_sent(text, chat, traits)

    def _same_as_references(self, text: str, messages, more, options) -> None:
        """Equal input, equal text: this is about the renderer alone."""
        tools, variable = more.get("tools"), more.get("tools_variable", "tools")
        name = self.template.name(tools=bool(tools))
        if not options.get("continue_final_message"):
            plain = _by_jinja(self.sources[name]).render(
                {**SPECIAL, "documents": None, "tools": None}
                | {"messages": messages, variable: tools or None, **options}
            )
            _equal(text, plain, "jinja2")
        if any(message.get("content", "") is None for message in messages):
            return  # transformers takes fields that are null out of messages
        given = {variable: tools} if variable != "tools" else {}
        common = tools if variable == "tools" else None
        theirs = by_transformers(
            self.tokenizer, self.sources, messages, common, {**given, **options}
        )
        _equal(text, theirs, "transformers")
        self.equal += 1

    def _refused_by_all(self, messages, more, options, error: InvalidRequest) -> None:
        variable = more.get("tools_variable", "tools")
        given = {**options, variable: more.get("tools")}
        try:
            theirs = by_transformers(
                self.tokenizer, self.sources, messages, given.pop("tools", None), given
            )
        except Exception:
            return
        raise Mismatch(f"refused here ({error}), but transformers renders {theirs!r}")

    def _nothing_lost(self, text: str, chat: Chat, traits) -> None:
        """Names of tools, the last question and what came after it are in the prompt. Words beside
        calls, and a rule that is far from the end, some families leave out themselves."""
        words = [tool["function"]["name"] for tool in chat.tools]
        last = max(i for i, m in enumerate(chat.messages) if m["role"] == "user")
        for message in chat.messages[last:]:
            words += [] if message.get("tool_calls") else _words_of(message.get("content"))
            for call in message.get("tool_calls", ()):
                words += _words_of(call["function"]["name"])
                words += _words_of(call["function"]["arguments"])
        if traits.system and chat.messages[-1]["role"] == "user":
            words += _words_of(chat.messages[0]["content"])  # the rule, or the first question
        if lost := [word for word in words if word not in text]:
            raise Mismatch(f"{lost} lost from {chat}: {text!r}")

    def _same_as_sent(self, text: str, chat: Chat, traits) -> None:
        """What transformers makes of the client's own messages, where nothing had to be done."""
        usual = dataclasses.replace(
            traits, system=True, takes_odd_arguments=True, nine_character_ids=False
        )
        with_calls = any(message.get("tool_calls") for message in chat.messages)
        if with_calls and not (usual.calls and usual.results and usual.empty_content == ""):
            return
        if chat.tools and (usual.tools_in, usual.tools_variable) != ("variable", "tools"):
            return
        if usual.parts or usual.arguments_as_json or (traits.nine_character_ids and with_calls):
            return
        if usual.one_call and any(len(m.get("tool_calls", ())) > 1 for m in chat.messages):
            return
        theirs = by_transformers(
            self.tokenizer, self.sources, _for_transformers(chat.messages), chat.tools, chat.options
        )
        _equal(text, theirs, "transformers, given the client's messages")
        self.as_sent += 1


def _for_transformers(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages in the form that transformers documents: arguments are objects, the role is
    "system", and what is absent is left out (content is not: many templates want one)."""
    found = []
    for message in messages:
        sent = dict(message)
        sent["role"] = sent["role"].replace("developer", "system")
        sent["content"] = sent["content"] or ""
        if calls := sent.pop("tool_calls", None):
            sent["tool_calls"] = []
            for call in calls:
                function = dict(call["function"])
                function["arguments"] = json.loads(function["arguments"])
                sent["tool_calls"].append({**call, "function": function})
        found.append(sent)
    return found


def _words_of(value: Any) -> list[str]:
    return re.findall(r"w\d+x", value or "")


def _equal(ours: str, theirs: str, whose: str) -> None:
    if ours != theirs:
        raise Mismatch(f"here {ours!r}\n{whose}: {theirs!r}")


def own_templates() -> dict[str, dict[str, str]]:
    """The templates beside the tests, and a model that has two."""
    found = {
        path.stem: {"default": path.read_text(encoding="utf-8")} for path in sorted(OWN.glob("*"))
    }
    tool_use = found.pop("hermes_tool_use")["default"]
    found["hermes"] = {"default": found["phi3"]["default"], "tool_use": tool_use}
    return found


def templates_of_packages() -> dict[str, dict[str, str]]:
    """Chat templates that installed packages ship: files, and texts in transformers' processors."""
    found = {}
    for folder in map(Path, site.getsitepackages()):
        for path in sorted(folder.glob("*/chat_templates/*.jinja")):
            found[f"{path.parts[-3]}/{path.stem}"] = {"default": path.read_text(encoding="utf-8")}
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/processing_*.py")):
        code = path.read_text(encoding="utf-8")
        if "{%" not in code:
            continue
        for node in ast.walk(ast.parse(code)):
            if not isinstance(node, ast.Constant) or not isinstance(text := node.value, str):
                continue
            if "{%" in text and "messages" in text:
                found[f"transformers/{path.parent.name}/{node.lineno}"] = {"default": text}
    return found


def templates_in(folder: Path) -> dict[str, dict[str, str]]:
    return {
        str(path.relative_to(folder)): {"default": path.read_text(encoding="utf-8")}
        for path in sorted(folder.rglob("*.jinja"))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--chats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    models = own_templates() | templates_of_packages()
    for folder in options.folders:
        models |= templates_in(folder)
    wrong = 0
    for name, sources in models.items():
        try:
            checker = Checker(sources)
        except ModelError as error:
            print(f"{name}: {error}")
            continue
        bad: list[str] = []
        for number in range(options.chats):
            chat = Draw(options.seed + number).chat()
            try:
                checker.check(chat)
            except Mismatch as error:
                bad.append(f"chat {options.seed + number}: {error}")
        print(
            f"{name}: {checker.equal} equal, {checker.as_sent} of these as sent,"
            f" {checker.refused} refused, {len(bad)} wrong"
        )
        if bad:
            print("  " + bad[0])
        wrong += len(bad)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
