"""Mistakes in the engine, in streams, and in the parsers of what models write."""

from __future__ import annotations

from scripts.faults.plant import planted

IN_SERVING = [
    *planted(
        "engine",
        "server/generation/engine.py",
        (
            "if flight is not None and not await self._finish(flight, following):",
            "if flight is not None and await self._finish(flight, following) is None:",
        ),
        ("            await _drained(later.step)", "            pass"),
        ("if not (step.may_sample or step.done):", "if step.done:"),
        ("self._wake.clear()", "pass"),
        (
            "        if self.dead is not None:\n            raise self.dead",
            "        if False:\n            raise self.dead",
        ),
    ),
    *planted(
        "engine",
        "server/generation/delivery.py",
        ("self.masked -= choice.masked", "self.masked -= 0"),
        ("if finish is not output.finish:", "if False:"),
        ("choice.stream.fail(told)", "pass"),
    ),
    *planted(
        "engine",
        "server/generation/token_masks.py",
        ("row_bits.fill(-1)", "row_bits.fill(0)"),
        ("is not choice:", "is choice:"),
    ),
    *planted(
        "engine",
        "server/http/connections.py",
        ("del self._open[transport]", "pass"),
        ("return len(self) >= self.most", "return len(self) > self.most"),
        ("return self._received or self._unread", "return self._received"),
        ("if self._transport.get_write_buffer_size() < unsent:", "if True:"),
    ),
    *planted(
        "streams",
        "server/generation/output.py",
        ("self.logprobs += later.logprobs", "self.logprobs = later.logprobs"),
        ("self._unfinished -= 1", "self._unfinished -= 2"),
        (
            "cut = finish.reason is not FinishReason.STOP",
            "cut = finish.reason is FinishReason.STOP",
        ),
        (
            "self.completion_tokens < self._min_tokens:",
            "self.completion_tokens <= self._min_tokens:",
        ),
        ("delta.text += self._scanner.flush()", "pass"),
        ("if not ends_here or self._include_stop:", "if not ends_here:"),
        (
            "finish.reason is FinishReason.LENGTH) and matcher.is_terminated()",
            "False) and matcher.is_terminated()",
        ),
    ),
    *planted(
        "streams",
        "server/generation/stop_rules.py",
        (
            "end - automaton.depth[state] > best[0]:",
            "end - automaton.depth[state] >= best[0]:",
        ),
        (
            "(other[0], -other[1]) < (best[0], -best[1])",
            "(other[0], other[1]) < (best[0], best[1])",
        ),
        ("undecided[: end if self._include_stop else start]", "undecided[:start]"),
    ),
    *planted(
        "streams",
        "server/text/marks.py",
        ("self.length[state] or self.length[self._fallback[state]]", "self.length[state]"),
        (
            "while state and character not in self._next[state]:",
            "if state and character not in self._next[state]:",
        ),
    ),
    *planted(
        "streams",
        "server/text/detokenizer.py",
        ('return "" if cut else self._decode(b"", True)', 'return ""'),
        ('return text.removeprefix(" ")', "return text.lstrip()"),
    ),
    *planted(
        "streams",
        "server/generation/generator.py",
        ("timed_out=finish.reason is FinishReason.TIMEOUT", "timed_out=False"),
        ("sampling.seed + choice * SEED_STEP", "sampling.seed + SEED_STEP"),
    ),
    *planted(
        "streams",
        "server/generation/bad_words.py",
        ("head, token = word[:-1], word[-1]", "head, token = word[1:], word[-1]"),
    ),
    *planted(
        "parsers",
        "server/formats/tool_parser.py",
        ("self.calls = self.calls, self.calls + 1", "self.calls = self.calls, self.calls"),
        (
            "if final and not self.calls else text[:kept].rstrip()",
            "if not self.calls else text[:kept].rstrip()",
        ),
    ),
    *planted(
        "parsers",
        "server/formats/json_calls.py",
        ('return "{}" if text in ("", "null") else text', "return text"),
        ("self.broken = not self.name", "self.broken = False"),
        ("return name in self.known", "return True"),
        ('if first and first in ";,":', 'if first and first in ",":'),
    ),
    *planted(
        "parsers",
        "server/formats/pythonic_calls.py",
        ('None if value.startswith("*") else self._next_free()', "self._next_free()"),
        ("return -number", "return number"),
        ("if name not in self._valued), None)", "), None)"),
    ),
    *planted(
        "parsers",
        "server/formats/thinking_budget.py",
        ("self._left -= 1", "self._left -= 0"),
        ("self._left <= 0 and self.failed is None", "self._left < 0 and self.failed is None"),
    ),
    *planted(
        "parsers",
        "server/text/json_bounds.py",
        ("return items > MAX_ITEMS or nodes > MAX_NODES", "return items > MAX_ITEMS"),
    ),
    *planted(
        "parsers",
        "server/grammars/compiler.py",
        ("self._taken < self.min_tokens and", "self._taken <= self.min_tokens and"),
        ("self._left_s -= seconds", "self._left_s -= 0.0"),
    ),
    *planted(
        "parsers",
        "server/grammars/bits.py",
        ("1 << (token_ids & 31)", "1 << (token_ids & 15)"),
    ),
]
