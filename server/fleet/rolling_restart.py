"""A restart that nobody who asks the router notices: one replica after the other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from server.console import progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.fleet.replica import Replica
    from server.fleet.router import RouterClient


async def restart_in_turn(
    replicas: Sequence[Replica], router: RouterClient, patience_s: float
) -> None:
    """Each is taken out of the router, drains, and is back before the next one goes. Whoever keeps
    the replicas starts again what ends here. patience_s: after which one is ended by force."""
    if len(replicas) < 2:
        progress("one replica alone is not restarted: nobody would answer meanwhile")
        return
    for replica in replicas:
        others = [one for one in replicas if one is not replica]
        await asyncio.gather(*(one.ready.wait() for one in others))
        progress(f"{replica.name} is restarted")
        await router.deregister(replica.url)
        replica.ready.clear()
        await replica.end(patience_s)
        await replica.ready.wait()
    progress("all replicas were restarted")
