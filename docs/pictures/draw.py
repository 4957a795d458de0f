"""Draws the diagrams of the explanation: ``python docs/pictures/draw.py``. It needs Graphviz.

The pictures follow the reader's light or dark mode. Each has a background of its own, so that it can be read on any
page.
"""

from __future__ import annotations

import re
import subprocess
from html import escape
from pathlib import Path

HERE = Path(__file__).parent

STYLE = """<style>
svg { --ink: #1f2328; --paper: #ffffff; --box: #eef2f7; --soft: #59636e; --bad: #c0262d; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8eb; --paper: #16181b; --box: #2a2f36; --soft: #9aa4af; --bad: #ff7b72; }
}
text { fill: var(--ink); font-family: Helvetica, Arial, sans-serif; }
.paper, .graph > polygon { fill: var(--paper); stroke: none; }
.box, .node path, .node polygon { fill: var(--box); stroke: var(--ink); }
.line, .edge path { fill: none; stroke: var(--ink); }
.edge polygon, .head { fill: var(--ink); stroke: var(--ink); }
.life { stroke: var(--soft); stroke-dasharray: 3 4; }
.note, .note text { fill: var(--soft); font-style: italic; }
.bad { fill: var(--bad); stroke: none; font-weight: bold; }
.part { font-weight: bold; }
.rule { stroke: var(--soft); stroke-width: 0.5; }
</style>"""

COLUMN, ROW, TOP = 180, 34, 62  # pixels

#: A step is (from, to, text), a note at a lifeline is (of, text), a heading is a text. "✗" begins what goes wrong.
Step = tuple[str, str, str] | tuple[str, str] | str

REQUEST: list[Step] = [
    "The first request",
    ("Client", "Worker A", "POST, key K"),
    ("Worker A", "Database", "INSERT the claim, attempt 1"),
    ("Worker A", "Database", "BEGIN, the handler's writes"),
    ("Worker A", "Database", "UPDATE: the outcome. COMMIT"),
    ("Worker A", "Client", "201"),
    "Its retry: a replay",
    ("Client", "Worker B", "the same, key K"),
    ("Worker B", "Database", "finds the outcome"),
    ("Worker B", "Client", "201, Idempotency-Replayed: true"),
    "Another request: a crash, and the take-over",
    ("Client", "Worker A", "POST, key L"),
    ("Worker A", "Database", "INSERT the claim, attempt 1"),
    ("Worker A", "Database", "BEGIN, the handler's writes"),
    ("Worker A", "✗ the process dies"),
    ("Database", "undoes writes, keeps the claim"),
    ("Client", "Worker B", "the same, key L"),
    ("Worker B", "Database", "finds a claim whose lease runs"),
    ("Worker B", "Client", "409, Retry-After"),
    ("Database", "the lease is over"),
    ("Client", "Worker B", "the same, key L"),
    ("Worker B", "Database", "UPDATE: take over, attempt 2"),
    ("Worker B", "Database", "writes, outcome, COMMIT"),
    ("Worker B", "Client", "201"),
]

MESSAGE: list[Step] = [
    "Published with the operation",
    ("Operation", "Database", "writes, message M, COMMIT"),
    "Sent at least once",
    ("Relay", "Database", "lease a batch with M"),
    ("Relay", "Broker", "M"),
    ("Broker", "Relay", "confirmed"),
    ("Relay", "✗ if it dies here, M is sent again"),
    ("Relay", "Database", "mark M as sent"),
    "Applied once",
    ("Broker", "Consumer", "M"),
    ("Consumer", "Database", "claim: trace and id of M"),
    ("Consumer", "Database", "effect, outcome, COMMIT"),
    ("Consumer", "✗ if it dies here, M is delivered again"),
    ("Broker", "Consumer", "M again"),
    ("Consumer", "Database", "finds the outcome"),
    ("Consumer", "no second effect"),
    ("Consumer", "Broker", "acknowledged"),
]


def sequence(title: str, lifelines: list[str], steps: list[Step]) -> str:
    """A sequence diagram, from the top down."""
    at = {name: COLUMN // 2 + COLUMN * number for number, name in enumerate(lifelines)}
    width, height = COLUMN * len(lifelines), TOP + ROW * len(steps) + 24
    drawn = []
    for name, x in at.items():
        drawn += [
            f'<line class="life" x1="{x}" y1="44" x2="{x}" y2="{height - 12}"/>',
            f'<rect class="box" x="{x - 62}" y="12" width="124" height="32" rx="5"/>',
            f'<text x="{x}" y="33" font-size="14" text-anchor="middle">{name}</text>',
        ]
    for number, step in enumerate(steps):
        drawn += _step(step, at, width, TOP + ROW * number + 22)
    return _framed(title, width, height, drawn)


def _step(step: Step, at: dict[str, int], width: int, y: int) -> list[str]:
    if isinstance(step, str):
        rule = f'<line class="rule" x1="8" y1="{y - 18}" x2="{width - 8}" y2="{y - 18}"/>'
        return [rule, _written(escape(step), 14 + _half(step), y, "part")]
    if len(step) == 2:
        x, kind = at[step[0]], "bad" if step[1].startswith("✗") else "note"
        return [_written(escape(step[1]), x, y, kind)]
    start, end = at[step[0]], at[step[1]]
    back = 8 if end > start else -8
    head = f"{end},{y} {end - back},{y - 4} {end - back},{y + 4}"
    return [
        _written(escape(step[2]), (start + end) // 2, y - 6),
        f'<line class="line" x1="{start}" y1="{y}" x2="{end}" y2="{y}"/><polygon class="head" points="{head}"/>',
    ]


def _written(text: str, x: int, y: int, kind: str = "text") -> str:
    """A text on a ground of its own, so that the lifelines behind it don't cross it."""
    half = _half(text)
    ground = f'<rect class="paper" x="{x - half}" y="{y - 11}" width="{2 * half}" height="14"/>'
    return f'{ground}<text class="{kind}" x="{x}" y="{y}" font-size="12" text-anchor="middle">{text}</text>'


def _half(text: str) -> int:
    """About half of the width of a text."""
    return 3 * len(text) + 4


def states() -> str:
    """The graph, with the style in the place of Graphviz' fixed colours."""
    command = ["dot", "-Tsvg", HERE / "states.dot"]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - a fixed command
    svg = ran.stdout[ran.stdout.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(width|height)="(\d+)pt"', r'\1="\2"', svg)
    return svg.replace(">\n", f">\n{STYLE}\n", 1)


def _framed(title: str, width: int, height: int, drawn: list[str]) -> str:
    label = f'role="img" aria-label="{escape(title)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {label}>'
    paper = f'<rect class="paper" width="{width}" height="{height}" rx="6"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, paper, *drawn, "</svg>", ""])


def from_text() -> dict[str, str]:
    """The pictures that need no Graphviz, by the name of their file."""
    request = "A first execution, a replay, and a crash with its take-over"
    message = "A message from the outbox over a broker to its consumer"
    return {
        "request.svg": sequence(request, ["Client", "Worker A", "Worker B", "Database"], REQUEST),
        "message.svg": sequence(message, ["Operation", "Relay", "Broker", "Consumer", "Database"], MESSAGE),
    }


if __name__ == "__main__":
    for name, svg in {**from_text(), "states.svg": states()}.items():
        (HERE / name).write_text(svg)
