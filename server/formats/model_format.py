"""How the served model writes tool calls and reasoning, and grammars over its vocabulary."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runtime.errors import InvalidRequest
from server.formats.conversation import fit
from server.formats.events import CallStart, Reasoning, Text
from server.formats.reasoning import ReasoningParser, reasoning_family
from server.formats.template_traits import TemplateTraits, find_traits
from server.formats.thinking_budget import ThinkingBudget, ThinkingLimit
from server.formats.tool_families import answer_source, tool_family
from server.formats.tool_parser import mistral_call_id
from server.formats.volatile_lines import VolatileLines
from server.grammars import sources
from server.grammars.compiler import GrammarCompiler, check_length, hugging_face_tokenizer
from server.grammars.output_rules import source_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from llguidance import LLTokenizer

    from server.formats.events import Event
    from server.formats.tool_parser import ToolCallParser
    from server.formats.tools import ToolRequest
    from server.generation.params import GenerationParams
    from server.grammars.output_rules import OutputRule
    from server.grammars.sources import Source
    from server.text.chat_template import Message
    from server.text.tokenizer import Tokenizer

# The tail of a prompt that shows whether it has begun the reasoning.
_TAIL_TOKENS = 16
# Up to here a grammar is looked through in the time of some requests (1 ms).
_INLINE_CHARACTERS = 4000


class AnswerParser:
    """Reads one choice's text, in pieces of any size.

    Args:
        reasoning, tools: None where the text holds no such thing.
        only_calls: beside its reasoning the text is calls by its grammar; what is none is the
            beginning of one that was cut short, and told to nobody.
        one_call: what comes after the first call is told to nobody.
    Attributes: plain: all text is said to the reader, as it comes.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolCallParser | None = None,
        *,
        only_calls: bool = False,
        one_call: bool = False,
    ) -> None:
        self._only_calls = only_calls
        self._one_call = one_call
        self._over = False
        self._reasoning = reasoning
        self._tools = tools
        self.plain = reasoning is None and tools is None

    @property
    def called_tools(self) -> bool:
        """Whether a tool was called so far."""
        return self._tools is not None and self._tools.calls > 0

    def read(self, text: str, *, ended: bool) -> list[Event]:
        """The events that this text completes; with the end also what was held back."""
        events = self._read(text, ended)
        if self._only_calls:
            events = [event for event in events if not isinstance(event, Text)]
        return self._up_to_second_call(events) if self._one_call else events

    def _up_to_second_call(self, events: list[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            self._over = self._over or (isinstance(event, CallStart) and event.index > 0)
            if not self._over:
                told.append(event)
        return told

    def _read(self, text: str, ended: bool) -> list[Event]:
        events = self._events(*self._reasoning.feed(text)) if self._reasoning else self._said(text)
        if not ended:
            return events
        if self._reasoning is not None:
            events += self._events(*self._reasoning.finish())
        if self._tools is not None:
            events += self._tools.finish()
        return events

    def _events(self, reasoning: str, text: str) -> list[Event]:
        said = self._said(text)
        return [Reasoning(reasoning), *said] if reasoning else said

    def _said(self, text: str) -> list[Event]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Text(text)] if text else []


class ModelFormat:
    """What handlers need to know of the model's way to write.

    Args:
        vocab_size: ids that the model can sample.
        eos_ids: ids that end an answer.
        tool_call_parser, reasoning_parser: values of the options; None for the former derives it
            from the chat template, None for the latter leaves reasoning in the content.
        volatile_lines: expressions of lines that are told behind the conversation.

    Raises: ConfigError: an option names no family, or holds a wrong expression.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_ids: Iterable[int],
        *,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        volatile_lines: Sequence[str] = (),
    ) -> None:
        template = tokenizer.chat_template
        texts = [] if template is None else list(template.sources.values())
        self.tool_family = tool_family(tool_call_parser, "\n".join(texts))
        self.reasoning_family = reasoning_family(reasoning_parser)
        # By whether the conversation has tools, since a model may have a template for either.
        self._traits = {
            tools: TemplateTraits() if template is None else find_traits(template, tools=tools)
            for tools in (False, True)
        }
        self.special_tokens = tokenizer.special_tokens()
        marks = [*self.tool_family.parser.markers]
        if self.reasoning_family is not None:
            marks += [self.reasoning_family.start, self.reasoning_family.end]
        # What the parsers look for must be in the text, also where it is a special token.
        tokenizer.show_special(marks)
        self._volatile_lines = VolatileLines(volatile_lines)
        self._tokenizer = tokenizer
        self._vocab_size = max(vocab_size, tokenizer.vocab_size)
        self._eos_ids = sorted(eos_ids)
        self._compiler = GrammarCompiler(self._grammar_tokenizer, self._eos_ids)

    def _grammar_tokenizer(self) -> LLTokenizer:
        return hugging_face_tokenizer(self._tokenizer.to_json(), self._vocab_size, self._eos_ids)

    def conversation(
        self, messages: Sequence[Message], tools: ToolRequest | None
    ) -> tuple[list[Message], dict[str, Any]]:
        """Messages as the chat template can show them, and the options of rendering tools."""
        messages = self._volatile_lines.moved(messages)
        allowed = () if tools is None else tools.allowed
        return fit(messages, allowed, self._traits[bool(allowed)], self.tool_family)

    def parser_factory(
        self, prompt_ids: Sequence[int], tools: ToolRequest | None, begun: str = ""
    ) -> Callable[[], AnswerParser]:
        """Makes the parser of one choice's text.

        Args: begun: the message that the answer goes on from, if it goes on from one.
        """
        family = self.reasoning_family
        if family is None and tools is None:
            return AnswerParser
        tail = self._tail(prompt_ids)
        new_id = mistral_call_id if self._traits[True].nine_character_ids else None
        return lambda: AnswerParser(
            None if family is None else ReasoningParser(family, tail, begun),
            None if tools is None else self.tool_family.read(tools, new_id),
            only_calls=tools is not None and tools.required,
            one_call=tools is not None and not tools.parallel,
        )

    async def constrained(
        self,
        params: GenerationParams,
        rules: Sequence[OutputRule],
        *,
        tools: ToolRequest | None = None,
        prompt_ids: Sequence[int] | None = None,
        begun: str = "",
        thinking: ThinkingLimit | None = None,
        client: str = "",
    ) -> GenerationParams:
        """The parameters with the grammar that the request asks for; it is compiled while the
        request waits in the queue.

        Args:
            rules: what the request asks the output to look like.
            prompt_ids, begun: of a chat; where these have begun the reasoning, the grammar rules
                what follows it.
            thinking: a bound on the reasoning; None: that of the answer.
            client: who asks: clients take turns at the compiler.

        Raises: InvalidRequest: a grammar that is seen to be wrong without compiling it, or
            reasoning that cannot be bounded. QueueFull: the client has too many waiting.
        """
        found = await self._source(rules, tools) if rules or tools is not None else None
        if found is not None:
            params = self._with_grammar(params, *found, prompt_ids, begun, client)
        if thinking is None or self.reasoning_family is None:
            return params
        return self._bounded(params, thinking, self._begins_inside(prompt_ids or (), begun))

    def _bounded(
        self, params: GenerationParams, limit: ThinkingLimit, inside: bool
    ) -> GenerationParams:
        """The parameters with a bound on the reasoning."""
        assert self.reasoning_family is not None
        start = self._tokenizer.special_id(self.reasoning_family.start)
        end = self._tokenizer.special_id(self.reasoning_family.end)
        if end is None or end >= self._vocab_size:
            raise InvalidRequest(
                f"{limit.param}: cannot be kept, since the mark that ends the reasoning,"
                f" {self.reasoning_family.end}, is no token of this model",
                param=limit.param,
            )
        new_inner = params.new_matcher

        def new_matcher() -> ThinkingBudget:
            inner = None if new_inner is None else new_inner()
            return ThinkingBudget(limit.tokens, start, end, inside=inside, inner=inner)

        return replace(params, new_matcher=new_matcher)

    def _with_grammar(
        self,
        params: GenerationParams,
        source: Source,
        param: str,
        prompt_ids: Sequence[int] | None,
        begun: str,
        client: str,
    ) -> GenerationParams:
        if prompt_ids is not None:
            source = self._after_reasoning(source, prompt_ids, begun)
        grammar = self._compiler.grammar(source, param, client)
        sampling = params.sampling
        stops = sampling.stop_token_ids
        return replace(
            params,
            new_matcher=lambda: grammar.matcher(sampling.min_tokens, stops),
            # The matcher holds the end back itself, and only where the grammar leaves a choice.
            sampling=replace(sampling, min_tokens=0),
        )

    async def _source(
        self, rules: Sequence[OutputRule], tools: ToolRequest | None
    ) -> tuple[Source, str] | None:
        """What the answer must look like, and the field that says so; None: anything.

        A long grammar takes a second to look through: that must not hold up others.
        """

        def build() -> tuple[Source, str] | None:
            found = source_of(rules, self.special_tokens)
            if tools is None:
                return found
            source, param = found if found is not None else (None, "tools")
            source = answer_source(tools, self.tool_family, source, self.special_tokens)
            return None if source is None else (source, param)

        parts = [(rule.name, rule.value) for rule in rules]
        if tools is not None and (rules or tools.enforced or not tools.parallel):
            parts += [("tools", tool.parameters) for tool in tools.allowed]
        size = 0
        for name, part in parts:
            size += len(part) if isinstance(part, str) else len(json.dumps(part))
            check_length(size, name)
        return build() if size <= _INLINE_CHARACTERS else await asyncio.to_thread(build)

    def _after_reasoning(self, source: Source, prompt_ids: Sequence[int], begun: str) -> Source:
        family = self.reasoning_family
        if family is None or not self._begins_inside(prompt_ids, begun):
            return source
        return sources.after_text(family.end, source, self.special_tokens)

    def _begins_inside(self, prompt_ids: Sequence[int], begun: str) -> bool:
        """Whether the answer begins within the reasoning."""
        assert self.reasoning_family is not None
        return ReasoningParser(self.reasoning_family, self._tail(prompt_ids), begun).starts_inside

    def _tail(self, prompt_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(prompt_ids[-_TAIL_TOKENS:], skip_special_tokens=False)

    def prepare(self) -> None:
        """Makes ready what would hold up others if it were made for the first that asks."""
        self._compiler.prepare()

    def close(self) -> None:
        """Ends the compiler's threads."""
        self._compiler.close()
