"""A model's reasoning, told apart from its answer while both stream by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from runtime.errors import ConfigError
from server.formats.scanning import Held
from server.text.marks import Marks


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """How a family of models marks its reasoning.

    Args:
        start, end: the marks around it.
        always: the answer begins inside the reasoning even where the prompt does not end with
            `start` (templates that leave the mark to the model, which often forgets it).
    """

    start: str
    end: str
    always: bool = False


REASONING_FAMILIES = {
    "deepseek_r1": ReasoningFamily("<think>", "</think>", always=True),
    "qwen3": ReasoningFamily("<think>", "</think>"),
    "think": ReasoningFamily("<think>", "</think>"),
    "mistral": ReasoningFamily("[THINK]", "[/THINK]"),
    "kimi": ReasoningFamily("◁think▷", "◁/think▷"),
    "seed_oss": ReasoningFamily("<seed:think>", "</seed:think>"),
}


def reasoning_family(name: str | None) -> ReasoningFamily | None:
    """The family of an option's value. Raises: ConfigError: there is no such family."""
    if name is None or name in REASONING_FAMILIES:
        return REASONING_FAMILIES[name] if name else None
    raise ConfigError(f"reasoning_parser {name!r}: must be one of {', '.join(REASONING_FAMILIES)}")


class _Where(Enum):
    BEFORE = "before"  # nothing but blanks so far: a start mark may come
    REASONING = "reasoning"
    GAP = "gap"  # between reasoning and answer, where blanks belong to neither
    ANSWER = "answer"


class ReasoningParser:
    """Splits one answer, fed in pieces of any size.

    Args:
        prompt: the prompt's text, or its end. One that ends with the start mark has begun the
            reasoning; one that ends with the end mark has closed it, so that the answer comes.
        begun: the message that the answer goes on from, if it goes on from one.

    Attributes: starts_inside: the text begins within the reasoning.
    """

    def __init__(self, family: ReasoningFamily, prompt: str = "", begun: str = "") -> None:
        self.family = family
        self._end = Marks((family.end,))
        self._blanks = Held()  # before what is pending: of the reasoning only if more of it comes
        self._pending = ""
        self._begun = False  # something of the reasoning but blanks has come
        self._where = _Where.BEFORE
        if begun:
            self._go_on(begun)
            self.starts_inside = self._where is _Where.REASONING
        elif prompt.rstrip().endswith(family.end):
            self._where = _Where.GAP
            self.starts_inside = False
        else:
            self.starts_inside = family.always or prompt.rstrip().endswith(family.start)

    def _go_on(self, begun: str) -> None:
        """Stands where this beginning of the answer ends."""
        start, end = begun.rfind(self.family.start), begun.rfind(self.family.end)
        if start > end:
            self._where = _Where.REASONING
            self._begun = bool(begun[start + len(self.family.start) :].strip())
        else:
            closed = begun.rstrip().endswith(self.family.end)
            self._where = _Where.GAP if closed else _Where.ANSWER

    def feed(self, text: str) -> tuple[str, str]:
        """Further reasoning and further answer, as far as they are decided."""
        self._pending += text
        return self._advance(final=False)

    def finish(self) -> tuple[str, str]:
        """What was held back, once the text has ended."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> tuple[str, str]:
        reasoning = ""
        if self._where is _Where.BEFORE and not self._begin(final):
            return "", ""
        if self._where is _Where.REASONING:
            reasoning = self._reasoning(final)
        if self._where is _Where.GAP:
            self._pending = self._pending.lstrip()
            if self._pending:
                self._where = _Where.ANSWER
        answer = ""
        if self._where is _Where.ANSWER:
            answer, self._pending = self._pending, ""
        return reasoning, answer

    def _begin(self, final: bool) -> bool:
        """Decides where the text begins; False while that is open."""
        text, start = self._pending.lstrip(), self.family.start
        self._blanks.add(self._pending[: len(self._pending) - len(text)])
        self._pending = text
        if not final and start.startswith(text) and text != start:
            return False
        if text.startswith(start):
            self._blanks.take()
            self._pending = text[len(start) :]
            self._where = _Where.REASONING
        elif self.starts_inside:
            self._blanks.take()
            self._where = _Where.REASONING
        else:
            self._pending = self._blanks.take() + text
            self._where = _Where.ANSWER
        return True

    def _reasoning(self, final: bool) -> str:
        text, end = self._pending, self.family.end
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        at = text.find(end)
        if at >= 0:
            self._where = _Where.GAP
            self._pending = text[at + len(end) :]
            said = text[:at].rstrip()
            blanks = self._blanks.take()
            return blanks + said if said else ""
        kept = len(text) - (0 if final else self._end.undecided(text))
        # Blanks before the end mark are not part of the reasoning.
        said = text[:kept].rstrip()
        blanks = self._blanks.take() if said else ""
        self._blanks.add(text[len(said) : kept])
        self._pending = text[kept:]
        return blanks + said
