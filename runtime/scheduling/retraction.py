"""Which requests give KV back so that others can go on. A request is retracted for want of pages,
so that the other running rows get their next token, or preempted for a much higher priority.

In both cases it goes back into the queue with its outputs. NewTokenRatio is how much is kept in
reserve, so that this happens seldom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.request import Finish, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from runtime.request import Request, RequestOutput
    from runtime.scheduling.kv_memory import KVMemory
    from runtime.scheduling.lifecycle import Lifecycle
    from runtime.scheduling.radix_tree import Node

INITIAL = 0.7
FLOOR = 0.14  # of the initial ratio
DECAY_STEPS = 600
HEADROOM_TOKENS = 20  # per running request, after a retraction


def next_tokens_fit(running: Sequence[Request], memory: KVMemory) -> bool:
    """Whether the pages of these rows' next step are free or can be evicted."""
    return memory.new_page_tokens(running) <= memory.available_tokens


def retract_until_fit(life: Lifecycle, usable_tokens: int, now: float) -> list[RequestOutput]:
    """Retracts as few requests as make the running rows' next step fit, no step being in flight.

    Args:
        usable_tokens: of the pool, for the message.

    Returns: the last output of the one left, which ends if not even it can get its page.
    """
    victims, hopeless = choose_victims(life.running, life.chunked, life.memory)
    for request in victims:
        life.retract(request, now)
    life.counters.retractions += len(victims)
    if hopeless is None:
        return []
    message = (
        f"The KV cache of {usable_tokens} tokens has no page left for this"
        f" request alone, which holds {hopeless.length} tokens."
    )
    ended = life.end(hopeless, Finish(FinishReason.ERROR, message=message))
    life.drop_ended()
    return [ended]


def choose_victims(
    running: Sequence[Request], chunked: Request | None, memory: KVMemory
) -> tuple[list[Request], Request | None]:
    """As few requests as make the running rows' next step fit without them, one at least. Changes
    nothing.

    Args:
        chunked: the pending chunk, which may be a victim and needs no page yet.

    Returns: those, in order, and the one to end with an error: the last one left, if not even it
        can get its page.
    """
    staying = list(running)
    victims: list[Request] = []
    released = Releasable(memory)
    for victim in retraction_order([*running, chunked] if chunked else running):
        victims.append(victim)
        staying = [request for request in staying if request is not victim]
        room = memory.available_tokens + released.add(victim)
        if memory.new_page_tokens(staying) <= room:
            return victims, None
    return victims, staying[0] if staying else None


def retraction_order(admitted: Sequence[Request]) -> list[Request]:
    """Requests in the order in which they are retracted; the oldest is left out.

    Fewest output tokens first (least work lost), then the longest input (most KV back), then the
    newest. The oldest by arrival is never among them, so that somebody always gets done: with
    victims taken freely, short outputs are thrown back again and again.
    """
    if not admitted:
        return []
    oldest = min(admitted, key=_seq)
    others = [request for request in admitted if request is not oldest]
    others.sort(key=lambda r: (r.launched_tokens, -len(r.input_ids), -_seq(r)))
    return others


class Releasable:
    """Tokens that would become available if requests were released, the one after the other.

    Args:
        memory: who holds what; not changed.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._unlocked: dict[Node, int] = {}
        self.tokens = 0

    def add(self, request: Request) -> int:
        """Counts one more in; returns the tokens of all."""
        memory, unlocked = self._memory, self._unlocked
        self.tokens += memory.private_tokens(request)
        node = request.scheduling.node
        while node is not None and node.parent is not None:
            unlocked[node] = unlocked.get(node, 0) + 1
            if unlocked[node] < node.locks:
                break
            self.tokens += len(node.pages) * memory.page_size
            node = node.parent
        return self.tokens


class NewTokenRatio:
    """Which share of the running requests' remaining output is reserved when others are admitted:
    starts cautious, decays while decoding goes well, jumps after a retraction.

    Args:
        conservativeness: scales the start; larger reserves more.
    """

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(INITIAL * conservativeness, 1.0)
        self.floor = FLOOR * self.initial
        self.value = self.initial

    def decay(self) -> None:
        """A step with decode rows went by without a retraction."""
        step = (self.initial - self.floor) / DECAY_STEPS
        self.value = max(self.value - step, self.floor)

    def reset(self) -> None:
        """Nothing is left to do."""
        self.value = self.initial

    def after_retraction(self, staying: Iterable[Request]) -> None:
        """What the requests that stay have really used so far, with some headroom."""
        decoded = allowed = count = 0
        for request in staying:
            count += 1
            decoded += request.launched_tokens
            allowed += request.max_new_tokens
        estimate = min(1.0, (decoded + HEADROOM_TOKENS * count) / (allowed + 1))
        self.value = max(self.value, estimate)


# Preemption: the victims are found by trying. The rules of admission are asked whether the
# candidate would get in if some of the others were gone.


def preemption_order(admitted: Sequence[Request], priority: int, threshold: int) -> list[Request]:
    """Requests that one of `priority` may push out: lowest priority first, then newest."""
    below = [request for request in admitted if priority - request.priority > threshold]
    below.sort(key=lambda r: (r.priority, -_seq(r)))
    return below


class WithoutVictims:
    """The pool as a `PrefillAdder` would see it, had some requests been released.

    Args:
        memory: the pool as it is; changed by locks alone.
        left: tokens of theirs that the candidate would then find in the cache, and keep there.
    """

    def __init__(self, memory: KVMemory, victims: Sequence[Request], left: int) -> None:
        self._memory = memory
        self._victims = victims
        self._left = left
        self._count()

    def _count(self) -> None:
        # Anew with every lock: what a victim shares with the candidate does not become available.
        released = Releasable(self._memory)
        for victim in self._victims:
            released.add(victim)
        self.available_tokens = self._memory.available_tokens + released.tokens - self._left

    def lock(self, node: Node | None) -> None:
        """Keeps a matched prefix."""
        self._memory.lock(node)
        self._count()

    def unlock(self, node: Node | None) -> None:
        self._memory.unlock(node)
        self._count()


def fewest_victims(
    order: Sequence[Request], least: int, admits: Callable[[Sequence[Request]], bool]
) -> list[Request]:
    """The shortest beginning of `order` that lets the candidate in; none where even all of it
    would not do.

    Args:
        order: candidates for release, the first to go first.
        least: victims that are needed at any rate, one or more.
        admits: whether the candidate would be admitted without these; more of them never hurt.
    """
    if least > len(order) or not admits(order):
        return []
    low, high = least, len(order)
    while low < high:
        middle = (low + high) // 2
        if admits(order[:middle]):
            high = middle
        else:
            low = middle + 1
    return list(order[:high])


def _seq(request: Request) -> int:
    return request.scheduling.seq
