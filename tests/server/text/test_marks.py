"""What of a text may yet become a mark, against the definition."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from server.text.marks import Marks

# Few letters, so that marks overlap, begin one another and repeat themselves.
LETTERS = "ab<"
MARKS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=5)
PIECES = st.lists(st.text(LETTERS, max_size=6), max_size=5)


def longest_beginning(text: str, marks: list[str]) -> int:
    """Characters of the longest end of a text with which a mark begins."""
    return max(
        size
        for size in range(len(text) + 1)
        if not size or any(mark.startswith(text[len(text) - size :]) for mark in marks)
    )


@settings(deadline=None)
@given(MARKS, PIECES)
def test_a_state_is_the_longest_beginning_and_knows_the_longest_whole_mark(marks, pieces):
    automaton = Marks(marks)
    text, state = "", 0
    for piece in pieces:
        for character in piece:
            text, state = text + character, automaton.step(state, character)
            assert automaton.depth[state] == longest_beginning(text, marks)
            whole = [len(mark) for mark in marks if text.endswith(mark)]
            assert automaton.length[state] == max(whole, default=0)


@settings(deadline=None)
@given(MARKS, st.text(LETTERS, max_size=30))
def test_what_is_undecided_is_the_longest_beginning_of_a_mark(marks, text):
    # Up to the first whole mark: those who ask look for whole ones first.
    ends = [at for at in range(len(text) + 1) if any(text[:at].endswith(mark) for mark in marks)]
    text = text[: min(ends) - 1] if ends else text
    assert Marks(marks).undecided(text) == longest_beginning(text, marks)


@settings(deadline=None)
@given(st.text(LETTERS, max_size=30))
def test_without_marks_everything_is_decided(text):
    assert Marks(()).undecided(text) == 0
