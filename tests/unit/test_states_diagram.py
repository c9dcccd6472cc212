"""The page about states says what states.py says."""

from __future__ import annotations

from tools.states_diagram import PAGE, page_with


def test_the_page_is_made_from_the_states() -> None:
    """If this fails: python3 dev.py states."""
    text = PAGE.read_text(encoding="utf-8")
    assert text == page_with(text)
