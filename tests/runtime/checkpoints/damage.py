"""Values that files should not hold, and what may come of them: what they hold, or one sentence."""

from __future__ import annotations

import math
import time

from runtime.errors import ModelError

MISSING = object()
WRONG = [
    *(0, 1, -1, 3, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 10**400),
    *(0.0, -1.5, 0.3, math.nan, math.inf, 1e308, 1e-320),
    *(None, True, False, "", "0", "linear", "</s>", "\0"),
    *([], [1], [-1, 2.5], ["a"], [[]], ["a b c"] * 5, {}, {"a": 1}, {"rope_type": "yarn"}),
    MISSING,
]


def outcome(work) -> str | None:
    """What a ModelError says; None where all went well. Anything else goes through."""
    begin = time.process_time()
    try:
        work()
    except ModelError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 600
        return message
    finally:
        assert time.process_time() - begin < 5
    return None
