"""The profile of a step, in windows too short to say anything of speed."""

from __future__ import annotations

import pytest

from scripts import profile_step
from scripts._profiled_server import PARTS


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_part_of_a_token_s_time_is_told_and_they_add_up(endpoint):
    found = profile_step.measure([3], endpoint, seconds=0.8, idle_seconds=0.5)
    row = found["streams"][3]
    assert all(row[part] > 0 for part in PARTS)
    assert row["all"] > row["floor"] > 0
    assert sum(row[part] for part in (*PARTS, "loop")) == pytest.approx(row["all"], abs=0.1)
    # Each token is an event of its own; windows cut some off at both ends.
    assert row["events_per_token"] == pytest.approx(1.0, abs=0.5)
    assert 0 <= found["idle_percent"] < 100
    assert f"| 3 | {row['floor']:.1f} | {row['all']:.1f} |" in profile_step.table(found)


@pytest.mark.parametrize("words", [["--streams", "0"], ["--streams", "x"], ["--seconds", "-1"]])
def test_words_that_cannot_be_are_refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        profile_step.parse(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err
