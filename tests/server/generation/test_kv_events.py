"""KV events as a subscriber that knows vLLM's structures reads them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from runtime.errors import ConfigError
from tests.fakes import fake_server, make_fake_service


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """vLLM's KVCacheEvent."""


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


read = msgspec.msgpack.Decoder(Batch).decode


class Endpoints:
    """Sockets in a folder of the test's own."""

    def __init__(self, folder):
        self.options = {
            "kv_events": f"ipc://{folder}/events",
            "kv_events_replay": f"ipc://{folder}/replay",
            "kv_events_topic": "kv@here@fake",
        }
        self.context = zmq.asyncio.Context()

    async def replay(self, first=0):
        """(sequence number, batch) of everything from `first` on."""
        dealer = self.context.socket(zmq.DEALER)
        dealer.connect(self.options["kv_events_replay"])
        await dealer.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        async with asyncio.timeout(30):
            while True:
                _, number, batch = await dealer.recv_multipart()
                if int.from_bytes(number, "big", signed=True) == -1:
                    assert batch == b""
                    break
                found.append((int.from_bytes(number, "big"), read(batch)))
        dealer.close(linger=0)
        return found


@pytest.fixture
def endpoints(tmp_path):
    made = Endpoints(tmp_path)
    yield made
    made.context.destroy(linger=0)


async def test_events_are_vllm_s_and_can_be_replayed(endpoints):
    async with fake_server(**endpoints.options) as server:
        ids = list(range(40))
        first = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}
        assert (await server.post("/generate", first))[0] == 200
        salted = {"prompt": ids, "max_tokens": 1, "cache_salt": "mine"}
        assert (await server.post("/v1/completions", salted))[0] == 200
        await server.wait_idle()
        assert (await server.post("/flush_cache", {}))[0] == 200
        batches = await endpoints.replay()
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert all(batch.data_parallel_rank == 0 for _, batch in batches)
        one, other, last = [event for _, batch in batches for event in batch.events]
        assert (one.token_ids, one.block_size, one.medium) == (ids[:32], 16, "GPU")
        assert (one.parent_block_hash, one.extra_keys, len(one.block_hashes)) == (None, None, 2)
        assert other.token_ids == ids[:32]
        assert other.extra_keys == [("mine",), None]
        assert not set(one.block_hashes) & set(other.block_hashes)
        assert isinstance(last, AllBlocksCleared)
        assert await endpoints.replay(len(batches) - 1) == batches[-1:]


async def test_a_subscriber_gets_what_happens_as_it_happens(endpoints):
    async with fake_server(**endpoints.options) as server:
        subscriber = endpoints.context.socket(zmq.SUB)
        subscriber.connect(endpoints.options["kv_events"])
        subscriber.setsockopt(zmq.SUBSCRIBE, b"kv@")
        got = asyncio.ensure_future(subscriber.recv_multipart())
        async with asyncio.timeout(30):
            # Nothing says that a subscription has arrived; each prompt is another.
            for number in range(10_000):
                body = {"input_ids": [number] * 20, "sampling_params": {"max_new_tokens": 1}}
                await server.post("/generate", body)
                if got.done():
                    break
        topic, number, batch = got.result()
        assert topic == b"kv@here@fake"
        assert len(number) == 8
        assert (await endpoints.replay(int.from_bytes(number, "big")))[0][1] == read(batch)
        subscriber.close(linger=0)


async def test_a_damaged_request_for_a_replay_is_left_unanswered(endpoints):
    async with fake_server(**endpoints.options):
        dealer = endpoints.context.socket(zmq.DEALER)
        dealer.connect(endpoints.options["kv_events_replay"])
        await dealer.send_multipart((b"", b"x"))
        await dealer.send_multipart((b"x",))
        assert await endpoints.replay() == []
        dealer.close(linger=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kv_events": "nonsense"}, "kv_events 'nonsense'"),
        ({"kv_events": "inproc://a", "kv_events_replay": "tcp://*:x"}, "kv_events_replay"),
        ({"kv_events_topic": "a"}, "need kv_events"),
    ],
)
def test_endpoints_that_cannot_be_used_are_named(options, told):
    with pytest.raises(ConfigError, match=told):
        make_fake_service(**options)
