"""Fields by which clients say what of a prompt is to stay cached, and for how long.

What they ask for becomes pins of the prefix cache (`server.api.prompt_pins`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from server.api.fields.bodies import Body, Record, ignored, refused, required, served
from server.api.fields.kinds import Choice, Form

if TYPE_CHECKING:
    from collections.abc import Mapping

# Seconds for which something stays cached after it was last asked for.
TTL_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0, "24h": 86400.0}
MOST_KEY = 512


class CacheControl(Body):
    """Anthropic's breakpoint; other servers take it in OpenAI's messages."""

    type = required(Choice("ephemeral"), "the prompt up to here is to stay cached")
    ttl = served(Choice("5m", "1h"), "so long after it was last asked for", default="5m")
    unserved = ignored("cache_salt keeps prefixes apart", "scope")


class CacheBreakpoint(Body):
    """OpenAI's breakpoint."""

    mode = required(Choice("explicit"), "the prompt up to here is to stay cached")
    ttl = served(
        Choice("30m", "12h"), "so long after it was last asked for; else as the request's options"
    )


CACHE_CONTROL = served(Record(CacheControl), "the prompt is to stay cached up to here")
CACHE_BREAKPOINT = served(
    Record(CacheBreakpoint), "the prompt is to stay cached up to here, in OpenAI's form"
)


@dataclass(frozen=True, slots=True)
class Caching:
    """What a request asks for beside the breakpoints in it.

    Args:
        whole_s: all of its prompt is to stay cached for so long; 0: that is not asked.
        key: of whose prompts only the newest is.
        point_s: for how long a breakpoint of OpenAI's form keeps that says nothing itself.
    """

    whole_s: float = 0.0
    key: str = ""
    point_s: float = TTL_S["30m"]


class CacheOptions(Body):
    mode = served(
        Choice("implicit", "explicit"),
        "the whole prompt stays cached, or what stands before breakpoints alone",
        default="implicit",
    )
    ttl = served(Choice("30m", "12h"), "so long after it was last asked for", default="30m")
    unserved = (
        *refused("every request is answered; ask for one token", "prewarm"),
        *ignored("nothing is stored to compare with", "comparison_response_id"),
    )


class PromptCacheFields(Body):
    """What OpenAI's conversations have."""

    prompt_cache_key = served(
        Form(rf"[\s\S]{{0,{MOST_KEY}}}", f"a string of at most {MOST_KEY} characters"),
        "the newest prompt of this key stays cached for a time",
    )
    prompt_cache_options = served(
        Record(CacheOptions), "whether the whole prompt stays cached, and for how long"
    )
    prompt_cache_retention = served(
        Choice("in_memory", "in-memory", "24h"),
        "5 minutes or a day, for which prompts of a prompt_cache_key stay cached",
    )

    def caching(self) -> Caching:
        """What these fields ask for."""
        key, options = self.prompt_cache_key or "", self.prompt_cache_options
        if options is not None:
            ttl_s = TTL_S[options.ttl]
            return Caching(ttl_s if options.mode == "implicit" else 0.0, key, ttl_s)
        keyed = TTL_S["24h" if self.prompt_cache_retention == "24h" else "5m"]
        return Caching(keyed if key else 0.0, key)


def asked_s(holder: Mapping[str, Any], point_s: float) -> float:
    """For how many seconds a message, a part of one or a tool asks the prompt up to it to be kept,
    as JSON that was read by the declarations above; 0: it does not. Args: as `Caching` has it."""
    control, point = holder.get("cache_control"), holder.get("prompt_cache_breakpoint")
    asked = [TTL_S[control.get("ttl") or "5m"]] if control else []
    asked += [TTL_S.get(point.get("ttl"), point_s)] if point else []
    return max(asked, default=0.0)
