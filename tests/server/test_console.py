"""Progress: bars where a person looks on, few lines where a log is written."""

from __future__ import annotations

import io

import pytest

from server import console


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What is to be seen: each line as it was written last."""
        return [line.rpartition("\r\033[K")[2] for line in self.getvalue().split("\n")]


def test_on_a_terminal_what_is_counted_is_a_bar_that_gives_way_to_its_end(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = console.Progress()
    progress("converting the model (once)")
    for done in range(1, 5):
        progress(f"converting: {done} of 8 tensors")
        progress(f"compiling: {done} of 4 files of CPU kernels")
        if done == 2:
            assert terminal.screen()[-1] == (
                "loomserve: converting [#####...............] 2/8"
                "  compiling [##########..........] 2/4"
            )
    progress("loading it")
    assert terminal.screen() == [
        "loomserve: converting the model (once)",
        "loomserve: compiling: 4 of 4 files of CPU kernels",
        "loomserve: loading it",
        "",
    ]


def test_in_a_log_what_is_counted_is_told_now_and_then_and_at_its_end(monkeypatch, capsys):
    now = 0.0
    monkeypatch.setattr("server.console.time.monotonic", lambda: now)
    progress = console.Progress()
    for done in range(1, 101):
        now += 0.1
        progress(f"converting: {done} of 100 tensors")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "loomserve: converting: 1 of 100 tensors"
    assert lines[-1] == "loomserve: converting: 100 of 100 tensors"
    assert 5 <= len(lines) <= 7


@pytest.mark.parametrize("message", ["100% : done", "a: 1 of b things", "started in 3 s"])
def test_anything_else_is_a_line(monkeypatch, message):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    console.Progress()(message)
    assert terminal.screen() == [f"loomserve: {message}", ""]
