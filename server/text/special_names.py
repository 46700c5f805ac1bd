"""Names of special tokens in what clients write, kept apart from those that the template writes.

A tokenizer reads `<|im_end|>` as a control token wherever it stands, so a user, a tool's answer or
a retrieved page could close its own turn and speak as the system. Here the name stays what it is
in such a text: plain text.

How: the conversation is rendered a second time with every such name hidden behind code points that
stand in no text of the conversation, one for each of its characters, so that templates that trim,
slice or measure a text find it as long as before. The two renderings, with the names put back, are
the same text, which therefore is the one that the template makes of the real conversation; the
second tells whose each name is. Where they differ, the template acts on a name in what a client
wrote. Then the other names are hidden as before, and that one is the client's where it stands
within a whole text, or a whole line, of the client's; where that leaves more of them than the
template writes by itself, the conversation is refused.

The text is then read by another tokenizer: a copy in which each special token has a secret name.
What the template wrote is renamed; what the client wrote is there no name of anything. All else,
what stands beside a name included, is split by the same rules, which tokenizing the pieces between
the names one by one would not ensure (the first piece of a text is treated by rules of its own).

Only conversations that hold such a name come here at all.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import Counter
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import tokenizers

from runtime.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from server.text.chat_template import Message

# Searching holds the interpreter; a slice takes up to 5 ms.
_SLICE = 100_000
# Each takes a rendering of its own.
_MOST_TRIED = 8
# Private use, planes 15 and 16.
_PRIVATE_RUN = re.compile("[\U000f0000-\U000ffffd\U00100000-\U0010fffd]+")
_PRIVATE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))
_OTHERWISE = (
    "start the server with --allow-special-in-content to let names of control tokens be these"
)


class SpecialNames:
    """Tells names of special tokens in a conversation apart by who wrote them.

    Args: backend: the tokenizer. ids: of its special tokens, by name; not empty.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ids: Mapping[str, int]) -> None:
        self._original = backend
        self._ids = dict(ids)
        secret = secrets.token_hex(16)  # lower case letters and digits stay under any normalizer
        self._secret_names = {name: f"<{secret}.{i}>" for name, i in ids.items()}
        self._pattern = re.compile(_any_of(ids))
        self._longest = max(map(len, ids))

    @cached_property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of secret names, for texts that `tell_apart` gave. Made when first asked
        for, in about as long as reading the model's takes.

        Raises: ModelError: it cannot be made of this tokenizer.
        """
        try:
            copy = _renamed(self._original, self._secret_names)
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer cannot be copied ({error}); {_OTHERWISE}") from None
        if any(copy.token_to_id(self._secret_names[name]) != i for name, i in self._ids.items()):
            raise ModelError(
                f"the tokenizer's special tokens have no ids of their own; {_OTHERWISE}"
            )
        return copy

    def tell_apart(
        self,
        text: str,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        render: Callable[..., str],
    ) -> str | None:
        """The text for `backend`; None: no client wrote a name, so that the usual one serves.

        Args:
            text: the conversation as rendered.
            options: it was rendered with. Tools and further variables among them are the client's.
            render: renders messages with options.

        Raises: InvalidRequest: the template changes a name so that it cannot be placed.
        """
        given = {name: options.get(name) for name in ("tools", "kwargs")}
        written = list(_strings([*_not_said_by_the_model(messages), *given.values()]))
        named = [one for one in written if self._holds_name(one)]
        if not named:
            return None
        names = sorted({name for one in named for name in self._pattern.findall(one)})
        cover = _Cover(self._pattern, names, chain([text], written))

        def rendered(hidden: Sequence[str]) -> str:
            def hide(one: str) -> str:
                return cover.hide(one, hidden)

            shown = [m if m["role"] == "assistant" else _mapped(m, hide) for m in messages]
            return render(shown, **{**options, **_mapped(given, hide)})

        without = rendered(names)
        if cover.show(without) == text:
            return cover.show(self._pattern.sub(self._secret, without))
        unseen: list[str] = []  # names that the template does not act on
        for name in names if len(names) <= _MOST_TRIED else ():
            if cover.show(rendered([*unseen, name])) == text:
                unseen.append(name)
        partly = rendered(unseen) if unseen else text
        parts = [cover.hide(one, unseen) for one in named]
        return cover.show(self._by_place(partly, parts, Counter(self._pattern.findall(without))))

    def _holds_name(self, text: str) -> bool:
        starts = range(0, len(text), _SLICE)
        ends = (start + _SLICE + self._longest for start in starts)
        found = (self._pattern.search(text, *ends) for ends in zip(starts, ends, strict=True))
        return any(found)

    def _secret(self, match: re.Match[str]) -> str:
        return self._secret_names[match[0]]

    def _by_place(self, text: str, named: Iterable[str], expected: Mapping[str, int]) -> str:
        """The text with secret names, where the template acts on names in what a client wrote.

        Args: named: what clients wrote. expected: how often the template itself writes each name.
        """
        own: set[int] = set()
        for one in named:
            whole = one.strip()
            for part in [whole] if whole in text else map(str.strip, one.splitlines()):
                if self._holds_name(part):
                    own.update(self._places(text, part))
        found = Counter(m[0] for m in self._pattern.finditer(text) if m.start() not in own)
        for name in {name for one in named for name in self._pattern.findall(one)}:
            if found[name] > expected[name]:
                raise InvalidRequest(
                    f"messages: hold {name!r}, the name of a control token, which the model's chat"
                    f" template changes; {_OTHERWISE}",
                    param="messages",
                )
        return self._pattern.sub(
            lambda match: match[0] if match.start() in own else self._secret(match), text
        )

    def _places(self, text: str, part: str) -> Iterator[int]:
        """Where names start that stand in this part of a text, wherever the part stands."""
        at = text.find(part)
        while at >= 0:
            yield from (m.start() for m in self._pattern.finditer(text, at, at + len(part)))
            at = text.find(part, at + len(part))


class _Cover:
    """Code points that stand for the characters of names.

    Args:
        pattern: finds names. names: those to be hidden.
        texts: of the conversation; what is hidden must be none of their code points.

    Raises: InvalidRequest: the texts use so many that too few are left.
    """

    def __init__(
        self, pattern: re.Pattern[str], names: Iterable[str], texts: Iterable[str]
    ) -> None:
        used = {code for text in texts for run in _PRIVATE_RUN.findall(text) for code in run}
        free = (code for code in map(chr, _PRIVATE) if code not in used)
        self._pattern = pattern
        self._covers = {name: "".join(islice(free, len(name))) for name in names}
        if any(len(cover) < len(name) for name, cover in self._covers.items()):
            raise InvalidRequest(
                "messages: use nearly all private code points, and name control tokens",
                param="messages",
            )
        self._letters = {
            ord(code): letter
            for name, cover in self._covers.items()
            for code, letter in zip(cover, name, strict=True)
        }

    def hide(self, text: str, names: Iterable[str]) -> str:
        """The text with these names hidden."""
        covers = {name: self._covers[name] for name in names}
        return self._pattern.sub(lambda match: covers.get(match[0], match[0]), text)

    def show(self, text: str) -> str:
        """The text with whatever is left of hidden names shown again."""
        return _PRIVATE_RUN.sub(lambda run: run[0].translate(self._letters), text)


def _not_said_by_the_model(messages: Iterable[Message]) -> Iterator[Message]:
    return (message for message in messages if message["role"] != "assistant")


def _strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _any_of(names: Iterable[str]) -> str:
    """A pattern for the longest of these names, in time that does not depend on how many they are
    (a plain alternation would try each at every place: there may be thousands)."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for character in name:
            node = node.setdefault(character, {})
        node[""] = {}
    return _branches(root)


def _branches(node: dict[str, Any]) -> str:
    found = []
    for character, following in node.items():
        if character == "":
            continue
        text = re.escape(character)
        while len(following) == 1 and "" not in following:
            ((character, following),) = following.items()
            text += re.escape(character)
        found.append(text + _branches(following))
    if not found:
        return ""
    return f"(?:{'|'.join(found)})" + ("?" if "" in node else "")


def _renamed(backend: tokenizers.Tokenizer, new_names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """A copy whose tokens of these names have the new ones, with the same ids."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        token["content"] = new_names.get(token["content"], token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {new_names.get(name, name): i for name, i in model["vocab"].items()}
    else:
        model["vocab"] = [[new_names.get(name, name), score] for name, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = new_names.get(model["unk_token"], model["unk_token"])
    # These name tokens too, and nobody here asks them.
    state["post_processor"] = state["decoder"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(state))
