"""What clients ask for, and what each must get: requests whose right answers are known beforehand."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.fakes import IM_END, IM_START
from tests.world import faults
from tests.world.device import FAILS, SPOILS, alone

CONTEXT = 512
MODEL = "fake"
ROUTES = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "generate": "/generate",
}
# What each field is called: most tokens, texts that end the answer.
MOST = {
    "chat": "max_tokens",
    "completions": "max_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
    "generate": "max_new_tokens",
}


@dataclass
class Asked:
    """A request and its right answer.

    Args:
        form: which of ROUTES; "" for what asks for no text.
        text, tokens, finish: of each choice; every choice of a greedy request is the same.
        unstopped: the text if it went on behind its stop.
        statuses: what may be answered if nothing but the request itself is at work.
        fault: what in it makes it fail, told in the table.
        rid: the name by which it can be aborted.
    """

    path: str
    body: Any
    method: str = "POST"
    form: str = ""
    stream: bool = False
    n: int = 1
    text: str = ""
    unstopped: str = ""
    tokens: int = 0
    prompt: tuple[int, ...] = ()
    finish: str = ""
    json_text: bool = False
    statuses: frozenset[int] = frozenset({200})
    fault: str = ""
    rid: str = ""
    timeout_s: float = 0.0

    @property
    def innocent(self) -> bool:
        """Its answer is known to the letter."""
        return bool(self.form) and not self.fault


@dataclass
class Author:
    """Writes requests. Args: usable: tokens that a request may need in all."""

    rng: random.Random
    usable: int
    grammars: bool = True
    timeouts: bool = False
    prefixes: list[str] = field(default_factory=list)
    written: int = 0

    def __post_init__(self) -> None:
        lengths = (0, 5, 20, 70, 150)
        self.prefixes = [self._letters(n) for n in lengths if n < self.usable // 3]

    def _letters(self, count: int) -> str:
        return "".join(self.rng.choices("abcdefgh ijklmno", k=count))

    def write(self) -> Asked:
        """The next request."""
        self.written += 1
        draw = self.rng.random()
        if draw < 0.07:
            return self._odd()
        if draw < 0.13:
            return self._wrong()
        return self._generating()

    def _generating(self) -> Asked:
        rng = self.rng
        form = rng.choice([*ROUTES, "chat", "completions"])
        prompt = rng.choice(self.prefixes) + self._letters(rng.choice((1, 3, 10, 25)))
        fault = ""
        if rng.random() < 0.09:
            fault, mark = rng.choice(
                (
                    ("failing row", chr(FAILS)),
                    ("NaN", chr(SPOILS)),
                    ("unreadable", faults.UNREADABLE),
                    ("unspeakable", faults.UNSPEAKABLE),
                )
            )
            prompt += mark
        asked = Asked(ROUTES[form], {}, form=form, stream=rng.random() < 0.6, fault=fault)
        asked.rid = f"r{self.written}"
        ids, body = self._prompt(form, prompt)
        most = max(1, min(rng.choice((1, 4, 12, 30, 60)), self.usable - len(ids) - 8))
        body |= {
            "stream": asked.stream,
            "request_id": asked.rid,
            "priority": rng.choice((0, 0, 0, 5, 20)),
        }
        if asked.stream and form in ("chat", "completions", "responses") and rng.random() < 0.3:
            body["stream_options"] = {"include_progress": True}
        sampling: dict[str, Any] = {"temperature": 0, MOST[form]: most}
        if form in ("chat", "completions", "generate") and rng.random() < 0.25:
            asked.n = rng.choice((2, 3))
            sampling["n"] = asked.n
        if rng.random() < 0.2:
            body["cache_salt"] = rng.choice("xy")
        body |= self._kept(form)
        if self.timeouts and rng.random() < 0.3:
            asked.timeout_s = body["timeout"] = rng.choice((0.05, 0.3, 5.0))
        self._rule(asked, ids, most, sampling)
        if form == "generate":
            body["sampling_params"] = sampling
        else:
            body |= sampling
        if fault == "unreadable":
            asked.statuses = (
                frozenset({400})
                if asked.path != "/generate" or "text" in body
                else frozenset({200})
            )
        if "input_ids" in body or isinstance(body.get("prompt"), list):
            asked.fault = "" if fault == "unreadable" else asked.fault
        asked.body = body
        return asked

    def _kept(self, form: str) -> dict[str, Any]:
        """Whether the prompt is to stay cached."""
        rng = random.Random(self.written)
        if form == "messages" and rng.random() < 0.4:
            return {"cache_control": {"type": "ephemeral", "ttl": rng.choice(("5m", "1h"))}}
        if form in ("chat", "responses") and rng.random() < 0.4:
            return {"prompt_cache_key": rng.choice(("one", "other"))}
        return {}

    def _prompt(self, form: str, text: str) -> tuple[list[int], dict[str, Any]]:
        """Token ids, and the fields that say so."""
        plain = [*text.encode()]
        as_ids = self.rng.random() < 0.3
        chat = [IM_START, *b"user\n", *plain, IM_END, *b"\n", IM_START, *b"assistant\n"]
        said = [{"role": "user", "content": text}]
        match form:
            case "completions":
                return plain, {"prompt": plain if as_ids else text}
            case "generate":
                return plain, {"input_ids": plain} if as_ids else {"text": text}
            case "responses":
                return chat, {"input": text}
            case _:
                return chat, {"messages": said}

    def _rule(self, asked: Asked, ids: list[int], most: int, sampling: dict[str, Any]) -> None:
        """Draws what rules the answer, and says what it then must be."""
        rng = self.rng
        options: dict[str, Any] = {}
        allowed: Callable[[list[int]], Callable[[int], bool] | None] = lambda _: None  # noqa: E731
        ended: Callable[[list[int]], bool] = lambda _: False  # noqa: E731
        draw = rng.random()
        if draw < 0.12:
            sampling["ignore_eos"] = options["ignore_eos"] = True
        elif draw < 0.2:
            least = rng.randint(1, most)
            name = "min_new_tokens" if asked.form == "generate" else "min_tokens"
            sampling[name] = options["min_tokens"] = least
        elif draw < 0.28:
            word = rng.choice("abcde")
            sampling["bad_words"] = [word]
            allowed = lambda _: lambda token: token != ord(word)  # noqa: E731
        elif draw < 0.42 and self.grammars:
            allowed, ended = self._grammar(asked, sampling)
        stop = ""
        found = alone(ids, most, allowed=allowed, ended=ended, **options)
        text = asked.unstopped = _text(found)
        if 0.42 < draw < 0.6 and len(text) > 3:
            at = rng.randrange(len(text) - 1)
            stop = text[at : at + 2]
            sampling["stop_sequences" if asked.form == "messages" else "stop"] = [stop, "~~"]
        if stop:
            length = next(i for i in range(len(found) + 1) if stop in _text(found[:i]))
            asked.text, asked.tokens = text[: text.index(stop)], length
            asked.finish = "stop sequence"
        else:
            asked.text, asked.tokens = text, len(found)
            over = ended(found) or (found[-1] == IM_END and not options.get("ignore_eos"))
            asked.finish = "stop" if over else "length"
        asked.prompt = tuple(ids)

    def _grammar(self, asked: Asked, sampling: dict[str, Any]) -> Any:
        rng = self.rng
        draw = rng.random()
        if draw < 0.25:
            asked.fault, part = rng.choice(
                (
                    ("grammar compiler", faults.NOT_COMPILED),
                    ("grammar mask", faults.NO_MASK),
                    ("grammar token", faults.NOT_ACCEPTED),
                    ("bad grammar", "("),
                )
            )
            sampling["regex"] = f"{part}[abc]{{9}}"
            return lambda _: None, lambda _: False
        if draw < 0.5:
            asked.json_text = True
            sampling["json_schema"] = json.dumps(
                {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
            )
            return lambda _: None, lambda _: False
        if draw < 0.75:
            choices = ["abc", "abde", "xyz", "x yz"]
            sampling["guided_choice"] = choices
            return _choice(choices)
        low = rng.randint(1, 6)
        high = low + rng.randint(0, 8)
        letters = rng.choice(("abc", "mnop", "z"))
        sampling["guided_regex"] = f"[{letters}]{{{low},{high}}}"
        return _repeated(letters, low, high)

    def _odd(self) -> Asked:
        rng = self.rng
        path = rng.choice(
            (
                "/health",
                "/ready",
                "/metrics",
                "/server_info",
                "/debug/requests",
                "/debug/steps",
                "/v1/models",
                "/health_generate",
            )
        )
        if rng.random() < 0.6:
            probe = (0,) if path == "/health_generate" else ()
            return Asked(path, None, method="GET", prompt=probe)
        draw = rng.random()
        if draw < 0.3:
            return Asked("/flush_cache", {}, statuses=frozenset({200, 409}))
        if draw < 0.5:
            return Asked("/tokenize", {"prompt": self._letters(9)})
        if draw < 0.6:
            return Asked("/abort_request", {"abort_all": True})
        return Asked("/abort_request", {"rid": f"r{rng.randint(0, self.written)}"})

    def _wrong(self) -> Asked:
        rng = self.rng
        long = "a" * (CONTEXT + 5)
        choices: list[tuple[str, Any, int]] = [
            ("/v1/completions", b"{not json", 400),
            ("/v1/completions", {"prompt": 5}, 400),
            ("/v1/completions", {"prompt": long, "max_tokens": 4}, 400),
            ("/v1/chat/completions", {"messages": "no"}, 400),
            ("/v1/chat/completions", {"messages": [], "model": "other"}, 400),
            ("/v1/completions", {"prompt": "a", "model": "other"}, 404),
            ("/v1/messages", {"messages": [{"role": "user", "content": 1}]}, 400),
            ("/v1/responses", {"input": [{"role": "no"}]}, 400),
            ("/generate", {"text": "a", "sampling_params": {"n": 0}}, 400),
            ("/nowhere", {}, 404),
            ("/v1/completions", {"prompt": "b" * 70_000, "max_tokens": 1}, 413),
        ]
        path, body, status = rng.choice(choices)
        return Asked(path, body, statuses=frozenset({status}), fault="bad body")


def _text(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


def _repeated(letters: str, low: int, high: int) -> Any:
    ids = set(letters.encode())

    def allowed(found: list[int]) -> Callable[[int], bool]:
        may_end = len(found) >= low
        return lambda token: token in ids or (may_end and token == IM_END)

    return allowed, lambda found: len(found) >= high


def _choice(choices: list[str]) -> Any:
    texts = [text.encode() for text in choices]

    def allowed(found: list[int]) -> Callable[[int], bool]:
        begun = bytes(token for token in found if token < 256)
        going = {text[len(begun)] for text in texts if text.startswith(begun) and text != begun}
        return lambda token: token in going or (begun in texts and token == IM_END)

    def ended(found: list[int]) -> bool:
        begun = bytes(token for token in found if token < 256)
        return begun in texts and not any(t.startswith(begun) and t != begun for t in texts)

    return allowed, ended
