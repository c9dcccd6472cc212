"""The diagram in docs/states.md, made from tasklib/states.py. `python3 dev.py states` writes it; a test compares."""

from __future__ import annotations

from pathlib import Path

from tasklib.states import TRANSITIONS, State

PAGE = Path(__file__).resolve().parents[1] / "docs" / "states.md"
BEGIN, END = "<!-- made from tasklib/states.py -->\n", "<!-- end -->\n"


def diagram() -> str:
    """A Mermaid state diagram; changes with the same ends share an arrow."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for verb, (sources, target) in TRANSITIONS.items():
        for source in sorted(sources):
            arrows.setdefault((source, target), []).append(verb)
    lines = [f"    {source} --> {target}: {', '.join(verbs)}" for (source, target), verbs in arrows.items()]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> pending: submit", *lines, "```", ""])


def table() -> str:
    rows = [
        f"| {verb} | {', '.join(f'`{source}`' for source in sorted(sources))} | `{target}` |"
        for verb, (sources, target) in TRANSITIONS.items()
    ]
    return "\n".join(["| verb | from | to |", "|---|---|---|", *rows, ""])


def made() -> str:
    return f"{BEGIN}\n{diagram()}\n{table()}\n{END}"


def page_with(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    return before + made() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
