"""What may be said of each answer that a client got."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from server.api.admin import HEALTH_GENERATE_SECONDS
from tests.world.checks import Said, read_stream, read_whole
from tests.world.clients import SLOW_S

if TYPE_CHECKING:
    from tests.world.clients import Call, Client
    from tests.world.traffic import Asked


@dataclass
class Excuses:
    """What, beside the request itself, may have changed an answer.

    Args:
        drained_s, dead_s: since when the server drains, or its engine is dead.
        aborts: (from, to, name or None for all) of every order to abort.
        struck: prompts whose row was alone in a step that failed: that is taken for their fault.
    """

    drained_s: float = float("inf")
    dead_s: float = float("inf")
    queue_bound: bool = False
    time_bound: bool = False
    aborts: list[tuple[float, float, str | None]] = field(default_factory=list)
    struck: set[tuple[int, ...]] = field(default_factory=set)

    def of(self, call: Call) -> set[str]:
        found = set()
        if call.ended_s >= self.drained_s:
            found.add("drain")
        if call.ended_s >= self.dead_s:
            found.add("dead")
        if self.queue_bound:
            found.add("queue")
        if self.time_bound or call.asked.timeout_s:
            found.add("time")
        if call.asked.prompt in self.struck:
            found.add("struck")
        for first, last, name in self.aborts:
            if first <= call.ended_s and call.sent_s <= last and name in (None, call.asked.rid):
                found.add("abort")
        return found


def judge(client: Client, excuses: Excuses) -> list[str]:
    """What is wrong with what a client got."""
    problems = list(client.problems)
    closed = False
    for number, call in enumerate(client.calls):
        last = number == len(client.calls) - 1
        given = excuses.of(call)
        if call.hung and not (last and client.manners.stays):
            problems.append(f"{call.asked.path}: no answer")
        elif call.answer.complete:
            if last and client.manners.garbage:
                if call.answer.status != 400:
                    problems.append(f"garbage was answered {call.answer.status}")
            elif client.refused or closed:
                problems.append(f"{call.asked.path}: an answer after the last one")
            else:
                problems += _judge_answer(call, given)
        else:
            problems += _judge_part(call, given, client, last=last, closed=closed)
        closed |= call.answer.closes or not call.answer.complete
    return problems


def _judge_part(
    call: Call, given: set[str], client: Client, *, last: bool, closed: bool
) -> list[str]:
    """Of an answer that did not come to its end."""
    if client.refused:
        return [] if "drain" in given else ["the connection was refused"]
    # Who pipelines and leaves, leaves before all of its answers.
    leaves = not client.manners.patient and (last or client.manners.pipelines)
    # Whose bytes take longer than the server waits for them.
    late = client.manners.pieces and call.ended_s - call.sent_s >= SLOW_S
    # Between two answers the server may end a connection, and does where it is idle for long: it is
    # so too while its client has not read the last answer, or everybody is held up.
    slow = client.manners.read_pause_s or client.held_up
    idle = bool(slow) and call is not client.calls[0] and not call.answer.status
    excused = closed or "drain" in given or leaves or late or idle
    problems = [] if excused else [f"{call.asked.path}: the answer was cut off"]
    asked, answer = call.asked, call.answer
    if asked.form and asked.stream and answer.status == 200:
        try:
            said = read_stream(asked.form, answer.body, complete=False)
        except AssertionError as error:
            return [*problems, f"{asked.path}: a part of a stream: {error}"]
        problems += _judge_texts(asked, said, whole=False)
    return problems


def _judge_answer(call: Call, given: set[str]) -> list[str]:
    asked, answer = call.asked, call.answer
    where = f"{asked.path} {json.dumps(asked.body) if not isinstance(asked.body, bytes) else ''}"[
        :300
    ]
    problems = []
    if "x-request-id" not in answer.headers:
        problems.append("no X-Request-Id")
    if "x-loomserve-ignored" in answer.headers:
        problems.append(f"ignored: {answer.headers['x-loomserve-ignored']}")
    if answer.status != 200 or not asked.form:
        problems += _judge_status(call, given)
        return [f"{where}: {problem}" for problem in problems]
    try:
        if asked.stream:
            assert answer.headers["content-type"].startswith("text/event-stream")
            said = read_stream(asked.form, answer.body, complete=True)
        else:
            said = read_whole(asked.form, answer.body)
    except (AssertionError, KeyError, ValueError) as error:
        return [f"{where}: {type(error).__name__}: {error}: {answer.body[-300:]!r}"]
    if said.error:
        if not asked.fault and not given:
            problems.append(f"an error for no reason: {said.error}")
    else:
        answered = {"stop", "length"} & set(said.finishes.values())
        if asked.fault in ("failing row", "NaN") and answered:
            problems.append(f"{asked.fault}: an answer")
        if sorted(said.finishes) != list(range(asked.n)):
            problems.append(f"choices {sorted(said.finishes)} of {asked.n} have ended")
    problems += _judge_texts(asked, said, whole=not said.error)
    if asked.innocent and not said.error:
        problems += _judge_finishes(asked, said, given)
    return [f"{where}: {problem}" for problem in problems]


def _judge_status(call: Call, given: set[str]) -> list[str]:
    asked, answer = call.asked, call.answer
    status = answer.status
    problems = []
    if status >= 400 and asked.path != "/flush_cache":
        error = json.loads(answer.body)["error"]
        if not error["message"]:
            problems.append("an error without a message")
    excused = {
        503: {"drain", "dead", "queue"},
        504: {"time"},
        500: {"struck"},
    }.get(status, set())
    own = asked.fault and asked.form and status in (400, 500)
    took_s = call.ended_s - call.sent_s
    if status == 408 and took_s >= SLOW_S:
        excused = given = {"late"}
    if asked.path == "/health_generate" and took_s >= HEALTH_GENERATE_SECONDS:
        excused = given = {"late"}
    if status not in asked.statuses and not own and not excused & given:
        problems.append(f"status {status}: {answer.body[:200]!r}")
    if status == 200 and asked.form:
        problems.append("no text")
    return problems


def _judge_texts(asked: Asked, said: Said, *, whole: bool) -> list[str]:
    """Nobody's text is anything but its own, however it ended."""
    if not asked.innocent or asked.json_text:
        return []
    problems = []
    for index, text in said.texts.items():
        ended = whole and said.finishes.get(index) not in (None, "abort")
        # What is held back as the beginning of a stop is given out where there is no more.
        if text != asked.text if ended else not asked.unstopped.startswith(text):
            problems.append(f"choice {index} says {text!r}, not {asked.text!r}")
    return problems


def _judge_finishes(asked: Asked, said: Said, given: set[str]) -> list[str]:
    problems = []
    wanted = "stop" if asked.finish == "stop sequence" else asked.finish
    for index, finish in said.finishes.items():
        if asked.json_text:
            if finish == "stop":
                found = json.loads(said.texts[index])
                if not isinstance(found["a"], bool):
                    problems.append(f"{found} is not by its schema")
        elif finish == "abort":
            if not given & {"abort", "drain"}:
                problems.append("aborted by nobody")
        elif finish != wanted:
            problems.append(f"choice {index} ended by {finish}, not {wanted}")
    ends = set(said.finishes.values())
    if said.usage is not None and not asked.json_text and ends <= {"stop", "length"}:
        usage: tuple[Any, Any] = (len(asked.prompt), asked.tokens * asked.n)
        if said.usage != usage:
            problems.append(f"usage {said.usage}, not {usage}")
    return problems
