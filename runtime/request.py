"""A request: what it asks for (`SamplingParams`), its state while it is served (`Request`), and
what the scheduler notes of it (`RequestRecord`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from runtime.scheduling.radix_tree import Place

if TYPE_CHECKING:
    from runtime.scheduling.radix_tree import Node, SavedState


class RequestState(Enum):
    WAITING = "waiting"
    # Its prompt is being cut into chunks (one request at most), or its step is tried again.
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finish:
    """How a request ended.

    Args:
        matched: the stop token id or the stop text that ended it.
        message: for ABORT, TIMEOUT and ERROR, a sentence for the client.
        retry_after_s: of a waiting request that had to make room: when a retry has a chance.
    """

    reason: FinishReason
    matched: int | str | None = None
    message: str | None = None
    retry_after_s: float | None = None


class Grammar(Protocol):
    """A structured-output constraint as the scheduler sees it: it may still be compiling."""

    @property
    def ready(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens. The defaults pick from the model's plain distribution.

    Args:
        max_new_tokens: None lets the scheduler give what context and pool allow.
        top_k: 0 means off. min_p: 0 means off. temperature: 0 means greedy.
        seed: None draws one per request (the server does; the runner needs an int).
        logit_bias: (token id, added value) pairs.
        stop_token_ids: end the request beside the model's EOS ids, also under ignore_eos.
        ignore_eos: the model's own EOS ids do not end the request.
        min_tokens: EOS and stop_token_ids cannot be sampled before that many output tokens.
        logprobs: alternatives per output token; 0 gives the chosen token's only; None: off.
        prompt_logprobs: the same for prompt tokens.
    """

    max_new_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class PromptPin:
    """A beginning of a prompt that its client asks to be kept in the prefix cache.

    Args:
        tokens: its length.
        ttl_s: from the prompt's last chunk on, or that of a later one that asks for the same.
        key: a client's name for prompts of which only the newest is kept; "": each is.
    """

    tokens: int
    ttl_s: float
    key: str = ""


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The scheduler's own per-request data.

    Args:
        seq: order of arrival; kept over retractions. -1: not taken yet.
        stop_ids: tokens that end it, EOS ids included unless it ignores them.
        key: bytes of the token ids to prefill, input and committed outputs.
        arrival_clocks: totals of the wait clocks when it began to wait.
        arrival_tokens: tokens the server had computed when it arrived (hrrn).
        waiting_since_s: when it arrived or was retracted; started_s: when it was last admitted.
        place: how far it is cached, as of the last look.
        node: end of its locked prefix in the radix cache.
        tree_tokens: leading tokens whose pages belong to the radix cache.
        matched_tokens: leading tokens whose KV it found in the cache and did not compute itself.
        borrows: it has read, or will read, KV that was in the cache before it computed any.
        isolated: until it has a token it takes nothing from the cache and puts nothing there, since
            its logits held a NaN when it did (nan_recovery.py).
        target: tokens to have KV before it can sample: input and outputs at admission.
        synced_pages: leading entries of its table row that the device has or will get.
        last_step: last launched step that names it.
        admissions: times it was admitted; a retracted one is admitted again.
        prefix_tokens: cached tokens that it was admitted with.
        verified: it has given a token since it was admitted, so that its KV is known to be finite.
        load_tried: its prefix was to be loaded from the tier since it began to wait.
        passed_over_s: when a later arrival was first admitted before it.
        waited: seconds waited per blocking term, of waits that are over.
        saved: recurrent states that its steps have saved since it was admitted.
        own_term: its blocking term in the last pass where that was not the whole queue's.
    """

    seq: int = -1
    stop_ids: frozenset[int] = frozenset()
    key: bytes = b""
    arrival_clocks: tuple[float, ...] = ()
    arrival_tokens: int = 0
    waiting_since_s: float = 0.0
    started_s: float | None = None
    place: Place = field(default_factory=Place)
    node: Node | None = None
    tree_tokens: int = 0
    matched_tokens: int = 0
    borrows: bool = False
    isolated: bool = False
    target: int = 0
    synced_pages: int = 0
    last_step: int = -1
    passed_over_s: float | None = None
    waited: list[float] = field(default_factory=list)
    own_term: str = ""
    admissions: int = 0
    prefix_tokens: int = 0
    verified: bool = False
    load_tried: bool = False
    saved: list[SavedState] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Request:
    """One sequence to generate; `n` choices are `n` requests. From `Scheduler.add` on, the
    scheduler alone changes it.

    Args:
        request_id: unique among live requests, never given by a client.
        namespace: requests of different namespaces never share cached KV (cache_salt).
        priority: larger is served first.
        deadline_s: on the scheduler's clock; the request ends with TIMEOUT after it.
        pins: what of its prompt is to stay cached, the shortest first.
    """

    request_id: str
    input_ids: array[int]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    namespace: str = ""
    deadline_s: float | None = None
    grammar: Grammar | None = None
    pins: tuple[PromptPin, ...] = ()

    state: RequestState = RequestState.WAITING
    output_ids: array[int] = field(default_factory=lambda: array("i"))  # committed tokens
    max_new_tokens: int = 0  # resolved at intake
    row: int = -1  # of the block table, -1 while it has none
    pages: array[int] = field(default_factory=lambda: array("i"))  # page of every page index
    length: int = 0  # tokens whose KV has a slot (launched, perhaps not yet committed)
    launched_tokens: int = 0  # output tokens sampled by launched steps, committed or not
    cached_tokens: int = 0  # prompt tokens found in the cache when first admitted
    pinned_tokens: int = 0  # prompt tokens that are kept for its sake
    retractions: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # gathered, until they are given out
    ending: Finish | None = None  # recorded, to be applied by the next pass
    finish: Finish | None = None
    scheduling: RequestRecord = field(default_factory=RequestRecord)

    @property
    def remaining_tokens(self) -> int:
        """Output tokens that no launched step has sampled yet."""
        return self.max_new_tokens - self.launched_tokens

    @property
    def new_tokens(self) -> int:
        """Output tokens since it was last admitted."""
        return len(self.input_ids) + len(self.output_ids) - self.scheduling.target

    def tokens_to_prefill(self) -> array[int]:
        """Input and committed outputs: what a (re)started request computes before it samples."""
        return self.input_ids + self.output_ids if self.output_ids else self.input_ids

    def tokens_between(self, first: int, last: int) -> array[int]:
        """`tokens_to_prefill()[first:last]`, at the cost of those alone."""
        inputs = self.input_ids
        if last <= len(inputs):
            return inputs[first:last]
        outputs = self.output_ids[max(first - len(inputs), 0) : last - len(inputs)]
        return inputs[first:] + outputs if first < len(inputs) else outputs


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's raw distribution.

    Args:
        token_id, logprob: the token that stands there.
        top: (token id, logprob) pairs, most likely first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """News of one request, in the order of its tokens.

    Args:
        token_ids: new tokens, in order; empty when only `finish` is news.
        logprobs: parallel to token_ids when the request asked for them.
        prompt_logprobs: for prompt positions, complete, with the first output; entry 0 is None.
        finish: set once, on the last output of the request.
    """

    request: Request
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish: Finish | None = None
