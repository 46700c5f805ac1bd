"""The grammar library over a vocabulary of bytes, asked for whole texts."""

from __future__ import annotations

import json
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from server.grammars.compiler import hugging_face_tokenizer
from tests.fakes import IM_END, byte_tokenizer


@cache
def tokenizer() -> LLTokenizer:
    return hugging_face_tokenizer(byte_tokenizer().to_json(), 258, [IM_END])


def compiled(source) -> LLMatcher:
    """A matcher of the source. Raises: ValueError: the library refuses it."""
    limits = LLParserLimits(verbose_errors=False)
    text = json.dumps({"grammars": source})
    matcher = LLMatcher(tokenizer(), text, log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    """Whether this is a whole text of the grammar."""
    copy = matcher.deep_copy()
    return bool(copy.consume_tokens(list(text.encode())) and copy.is_accepting())
