"""Publishes what enters and leaves the prefix cache, in the format of vLLM's KV events.

    PUB     [topic, sequence number, batch]      as it happens
    ROUTER  [sequence number] -> [sequence number, batch] ... [-1, nothing]   what was missed

A batch is a msgpack array [seconds, [event, ...], rank], an event an array that begins with its
name; sequence numbers are of 8 bytes, the first byte the highest. Needs the extra `kv-events`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from runtime.errors import ConfigError
from runtime.scheduling.cache_events import BlockRemoved, BlockStored

if TYPE_CHECKING:
    from runtime.scheduling.cache_events import CacheEvent, CacheEvents

log = logging.getLogger("loomserve.kv_events")

KEPT_BATCHES = 10_000  # for those who have missed some
SEND_BATCHES = 100_000  # of a subscriber that does not read; further ones it misses
MEDIUM = "GPU"  # vLLM's word for the pool that is attended over, on whatever device
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class KVEventPublisher:
    """Publishes from the engine's loop, which PUB sockets never block; replays on a thread.

    Args:
        endpoint: is bound where it has a wildcard or a path, connected to elsewhere, as in vLLM.
        replay: is bound; None: nothing is replayed.

    Raises: ConfigError: an endpoint cannot be used.
    """

    def __init__(
        self, events: CacheEvents, endpoint: str, replay: str | None = None, topic: str = ""
    ) -> None:
        self._events = events
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=KEPT_BATCHES)
        self._number = 0
        self._context = zmq.Context()
        self._publisher = _open(self._context, "kv_events", endpoint, replays=False)
        self._thread: threading.Thread | None = None
        if replay is not None:
            router = _open(self._context, "kv_events_replay", replay, replays=True)
            self._thread = threading.Thread(target=self._replay, args=(router,), daemon=True)
            self._thread.start()

    def publish(self) -> None:
        """Sends what has happened since the last time, if anything has."""
        events = self._events.take()
        if not events:
            return
        batch = self._encode([time.time(), [_fields(event) for event in events], 0])
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._sent.append((number, batch))
        self._publisher.send_multipart((self._topic, number, batch))

    def close(self) -> None:
        """Lets go of the endpoints, when what was published has had a second to leave."""
        self._publisher.close(linger=1000)
        self._context.term()  # the thread is told by it
        if self._thread is not None:
            self._thread.join()

    def _replay(self, router: Any) -> None:
        try:
            while True:
                self._answer(router, router.recv_multipart())
        except zmq.error.ContextTerminated:
            router.close(linger=0)

    def _answer(self, router: Any, asked: list[bytes]) -> None:
        client, first = asked[0], asked[-1]
        if len(asked) != 3 or len(first) != 8:
            log.warning("a replay was asked for in %d frames, not in 3", len(asked))
            return
        for number, batch in tuple(self._sent):
            if number >= first:
                router.send_multipart((client, b"", number, batch))
        router.send_multipart((client, b"", END_OF_REPLAY, b""))


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _fields(event: CacheEvent) -> list[Any]:
    """An event as vLLM's arrays have it; what comes behind has its default."""
    if isinstance(event, BlockStored):
        found: list[Any] = [
            "BlockStored",
            event.hashes,
            event.parent_hash,
            event.token_ids.tolist(),
            event.block_size,
            None,  # the adapter's id
            MEDIUM,
        ]
        if event.namespace and event.parent_hash is None:
            # The adapter's name, then what else makes each block another: the salt of the first.
            found += [None, [[event.namespace], *[None] * (len(event.hashes) - 1)]]
        return found
    if isinstance(event, BlockRemoved):
        return ["BlockRemoved", event.hashes, MEDIUM]
    return ["AllBlocksCleared"]


def check_endpoints(endpoint: str, replay: str | None) -> None:
    """Raises: ConfigError: a publisher could not use them."""
    context = zmq.Context()
    opened = [_open(context, "kv_events", endpoint, replays=False)]
    if replay is not None:
        opened.append(_open(context, "kv_events_replay", replay, replays=True))
    context.destroy(linger=0)  # with what was opened


def _open(context: zmq.Context[Any], option: str, endpoint: str, *, replays: bool) -> Any:
    """A socket to publish on, or to replay from. Ends the context where it cannot be opened."""
    socket = context.socket(zmq.ROUTER if replays else zmq.PUB)
    socket.set_hwm(SEND_BATCHES)
    try:
        (socket.bind if replays or _is_bound(endpoint) else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        context.destroy(linger=0)
        raise ConfigError(f"{option} {endpoint!r}: {error.strerror}") from None
    return socket
