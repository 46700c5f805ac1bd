"""SavedStates: the recurrent states that are kept beside cached prefixes.

A model with a recurrent state can go on from a cached prefix only where the state at its end is
there too. A row's own state is in the slot of its table row and is overwritten by every step. So
steps also copy it out: at every multiple of an interval, at the last page border of a prompt, and
at the ends that clients asked to be kept; no step is cut for that. Of what a request generates the
newest one alone is kept, until its tokens come into the cache as it ends. A saved state belongs to
the node of the radix tree that ends at its position, goes with it, and may go before it: a match
ends at the deepest one that is left.

A slot can be taken while a launched step still reads it, since steps run one after the other on
the device. Where that step fails, the rows that are tried again do not go on from the slot: the
device computes their states anew (`ScheduleBatch.restore`). What the failed step was to save is
given up with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.scheduling.radix_tree import SavedState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from runtime.request import Request
    from runtime.scheduling.radix_tree import Node


class SavedStates:
    """All saved states and the slots for more.

    Args:
        first: the first slot. count: of them.
        interval: see the module's docstring. page_size: states are saved at page borders alone.
    """

    def __init__(
        self, first: int = 1, count: int = 0, *, interval: int = 1, page_size: int = 1
    ) -> None:
        self.slots = range(first, first + count)
        self._interval = interval
        self._page_size = page_size
        self._free = list(reversed(self.slots))
        # That may make way: with a node, or of generated tokens. The longest unused is the first.
        self._kept: dict[SavedState, None] = {}
        self._unsure: list[SavedState] = []  # of steps not committed, oldest first

    def free_slots(self) -> list[int]:
        """Slots that hold nothing."""
        return list(self._free)

    def __iter__(self) -> Iterator[SavedState]:
        """Those that a match may end at."""
        return (state for state in self._kept if state.node is not None)

    def save(self, request: Request, step: int, start: int, end: int) -> list[SavedState]:
        """Finds slots for the states that a step is to save while it computes the tokens of a
        prompt from `start` to `end`; where there are too few, for the deepest."""
        record, made = request.scheduling, []
        if record.isolated:
            return []
        for position in reversed(self.positions(request, start, end)):
            slot = self._take(step)
            if not slot:
                break
            made.append(SavedState(slot, position, step))
        made.reverse()
        self._note(request, made)
        return made

    def save_generated(self, request: Request, step: int) -> SavedState | None:
        """Finds a slot for the state of a decode row, where it is to be saved behind this step."""
        record = request.scheduling
        if request.length % self._interval or record.isolated:
            return None
        self.give_up_all(s for s in record.saved if s.node is None and s in self._kept)
        slot = self._take(step)
        if not slot:
            return None
        state = SavedState(slot, request.length, step)
        self._kept[state] = None
        self._note(request, [state])
        return state

    def _note(self, request: Request, made: list[SavedState]) -> None:
        self._unsure += made
        record = request.scheduling
        record.saved = [state for state in record.saved if state.slot] + made

    def positions(self, request: Request, start: int, end: int) -> list[int]:
        """Where the states of a prompt are saved, behind `start` and up to `end`."""
        size, every = self._page_size, self._interval
        found = set(range(start // every * every + every, end + 1, every))
        found.add((request.scheduling.target - 1) // size * size)
        found.update(wish.tokens // size * size for wish in request.pins)
        return sorted(position for position in found if start < position <= end)

    def _take(self, step: int) -> int:
        """A free slot, or that of the state unused for longest, but not of one that the same step
        saves; 0: there is none. Pinned prefixes lose theirs last."""
        if not self._free:
            older = [state for state in self._kept if state.step < step]
            unpinned = (state for state in older if not (state.node and state.node.pins))
            self.give_up(next(unpinned, older[0] if older else None))
        return self._free.pop() if self._free else 0

    def attach(self, request: Request, above: Callable[[Node | None, int], Node | None]) -> None:
        """The request's tokens have come into the cache: their states are theirs from now on. One
        that was there before stays.

        Args: above: `RadixCache.above`.
        """
        record = request.scheduling
        for state in record.saved:
            if state.node is not None or not state.slot or state.position > record.tree_tokens:
                continue
            node = above(record.node, state.position)
            assert node is not None
            if node.state is not None:
                self.give_up(state)
                continue
            node.state, state.node = state, node
            self._kept[state] = None

    def deepest(self, node: Node | None, position: int) -> Node | None:
        """What ends with the longest prefix of the first `position` tokens on the path to `node`
        that has a state; notes its use."""
        while node is not None and (node.end > position or node.state is None):
            node = node.parent
        if node is not None:
            assert node.state is not None
            del self._kept[node.state]
            self._kept[node.state] = None
        return node

    def give_up(self, state: SavedState | None) -> None:
        """A state is of no use any more, or never was."""
        if state is None or not state.slot:
            return
        if state.node is not None:
            state.node.state = None
            state.node = None
        self._kept.pop(state, None)
        self._free.append(state.slot)
        state.slot = 0

    def give_up_all(self, states: Iterable[SavedState]) -> None:
        for state in [*states]:
            self.give_up(state)

    def give_up_path(self, node: Node | None, position: int) -> None:
        """Those of the prefix that ends in `node`, behind its first `position` tokens."""
        while node is not None and node.end > position:
            self.give_up(node.state)
            node = node.parent

    def release(self, request: Request) -> None:
        """A request has left its row: what has not come into the cache goes."""
        self.give_up_all(state for state in request.scheduling.saved if state.node is None)
        request.scheduling.saved = []

    def step_done(self, step: int) -> None:
        """A step is committed: what it has saved is there."""
        if self._unsure:
            self._unsure = [state for state in self._unsure if state.step > step]

    def take_back(self, step: int) -> None:
        """A launched step has failed, and the later ones with it."""
        self.give_up_all(state for state in self._unsure if state.step >= step)
        self._unsure = [state for state in self._unsure if state.slot]
