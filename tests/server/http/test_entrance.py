"""A crowd of requests begins a few at a time, so that others are heard between."""

from __future__ import annotations

import asyncio

from server.http.entrance import A_TURN, Entrance


async def begun_by_turn(entrance: Entrance, clients: list[str]) -> list[list[str]]:
    """Who begins in each turn of the loop."""
    turns: list[list[str]] = [[]]

    async def begin(client: str) -> None:
        await entrance.begin(client)
        turns[-1].append(client)

    tasks = [asyncio.create_task(begin(client)) for client in clients]
    for _ in range(1000):
        await asyncio.sleep(0)
        turns.append([])
        if all(task.done() for task in tasks):
            break
    await asyncio.gather(*tasks)
    return [turn for turn in turns if turn]


async def test_a_crowd_begins_a_few_at_a_time_and_all_of_it():
    turns = await begun_by_turn(Entrance(), ["a"] * 1000)
    assert sum(map(len, turns)) == 1000
    assert max(map(len, turns)) <= 2 * A_TURN  # where two turns of theirs fall into one of ours
    assert len(turns) >= 1000 / (2 * A_TURN)


async def test_clients_take_turns():
    turns = await begun_by_turn(Entrance(), ["a"] * 500 + ["b"])
    first = [client for turn in turns for client in turn]
    assert first.index("b") <= 3 * A_TURN


async def test_who_comes_alone_begins_at_once_and_who_leaves_takes_no_turn():
    entrance = Entrance()
    await asyncio.wait_for(entrance.begin("a"), 5)
    left = [asyncio.create_task(entrance.begin("a")) for _ in range(200)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    turns = await begun_by_turn(entrance, ["b"])
    assert turns == [["b"]]
    for _ in range(20):
        await asyncio.sleep(0)
    assert entrance._next_turn is None  # nothing turns where nobody comes
