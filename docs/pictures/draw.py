"""Draws the diagrams and charts of the explanation: ``python docs/pictures/draw.py``. It needs Graphviz.

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
svg { --ink: #1f2328; --paper: #ffffff; --box: #eef2f7; --soft: #59636e; --bad: #c0262d; --ours: #1f6feb; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6e8eb; --paper: #16181b; --box: #2a2f36; --soft: #9aa4af; --bad: #ff7b72; --ours: #58a6ff; }
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
.bar { fill: var(--soft); }
.ours { fill: var(--ours); }
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


def tables(page: str, heading: str) -> list[list[list[str]]]:
    """The tables below a heading of a page, as rows of cells. The first row of each is its head."""
    text = (HERE.parent / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[[cell.strip() for cell in line.strip("|").split("|")] for line in one.splitlines()] for one in found]
    return [[head, *body] for head, _, *body in rows]


def bars(title: str, page: str, heading: str) -> str:
    """A bar for each row of the table below a heading of a page: its first column, and the second in ms."""
    rows = [(name, value.removesuffix(" ms")) for name, value, *_ in tables(page, heading)[0][1:]]
    longest = max(float(value) for _, value in rows)
    width, height = 720, 20 + 24 * len(rows)
    drawn = []
    for number, (name, value) in enumerate(rows):
        y, kind, length = 12 + 24 * number, "ours" if name.startswith("**") else "bar", 320 * float(value) / longest
        plain = escape(name.replace("*", "").replace("`", ""))
        drawn += [
            f'<text x="300" y="{y + 13}" font-size="12" text-anchor="end">{plain}</text>',
            f'<rect class="{kind}" x="310" y="{y + 2}" width="{length:.0f}" height="15" rx="2"/>',
            f'<text x="{318 + length:.0f}" y="{y + 13}" font-size="12">{value} ms</text>',
        ]
    return _framed(title, width, height, drawn)


def matrix(title: str, page: str, heading: str) -> str:
    """A square for each mark of the table below a heading of a page: filled, empty, or a cross if the cell failed."""
    (_, *faults), *rows = tables(page, heading)[0]
    group, top, left = 76, 46, 200
    width, height = left + group * len(faults) + 10, top + 17 * len(rows) + 34
    drawn = []
    for number, fault in enumerate(faults):
        x = left + group * number
        drawn.append(
            f'<text class="part" x="{x + 30}" y="20" font-size="12" text-anchor="middle">{escape(fault)}</text>'
        )
        drawn += [
            f'<text x="{x + 15 * place + 6}" y="38" font-size="10" text-anchor="middle">{place + 1}</text>'
            for place in range(4)
        ]
    for line, (name, *cells) in enumerate(rows):
        y = top + 17 * line
        drawn.append(f'<text x="{left - 12}" y="{y + 10}" font-size="12" text-anchor="end">{escape(name)}</text>')
        for number, cell in enumerate(cells):
            for place, mark in enumerate(cell.split()):
                drawn.append(_mark(mark, left + group * number + 15 * place, y))
    y = top + 17 * len(rows) + 10
    for mark, meaning, x in (("✓", "passed", left), ("–", "makes no sense", left + 90), ("✗", "failed", left + 230)):
        drawn += [_mark(mark, x, y), f'<text x="{x + 18}" y="{y + 10}" font-size="12">{meaning}</text>']
    return _framed(title, width, height, drawn)


def _mark(mark: str, x: int, y: int) -> str:
    if mark == "✗":
        return f'<text class="bad" x="{x + 6}" y="{y + 11}" font-size="14" text-anchor="middle">✗</text>'
    kind = {"✓": 'class="ours"', "–": 'class="line" stroke-opacity="0.35"'}[mark]
    return f'<rect {kind} x="{x}" y="{y}" width="12" height="12" rx="2"/>'


def sizes() -> str:
    """For each number of records, what one of them takes in the table and in each index that isn't empty."""
    (_, *parts, _, _), *rows = tables("explanation/growth.md", "Size")[0]
    shown = [place for place in range(len(parts)) if _number(rows[-1][place + 1]) > 1]
    drawn, x = [], 130
    for place in shown:
        name = parts[place].replace("`", "")
        drawn += [
            f'<rect {_shade(place)} x="{x}" y="14" width="12" height="12" rx="2"/>',
            f'<text x="{x + 18}" y="25" font-size="12">{escape(name)}</text>',
        ]
        x += 40 + 7 * len(name)
    for line, (count, *cells) in enumerate(rows):
        y, end = 42 + 30 * line, 130.0
        drawn.append(f'<text x="118" y="{y + 14}" font-size="12" text-anchor="end">{count} records</text>')
        for place in shown:
            width = _number(cells[place]) * 1e6 / _number(count) * 0.35
            drawn.append(f'<rect {_shade(place)} x="{end:.1f}" y="{y}" width="{width:.1f}" height="20"/>')
            end += width
        drawn.append(f'<text x="{end + 8:.0f}" y="{y + 14}" font-size="12">{cells[-1]} a record, {cells[-2]}</text>')
    return _framed("What a record takes in tables of growing size", 720, 48 + 30 * len(rows), drawn)


def _shade(place: int) -> str:
    return f'class="ours" fill-opacity="{1 - 0.22 * min(place, 3):.2f}"'


def log_bytes() -> str:
    """For each number of records, the log of a first execution after so many operations since a checkpoint."""
    (_, *since), *rows = tables("explanation/growth.md", "What a request costs")[1]
    y, drawn = 12, []
    for count, *cells in rows:
        drawn.append(f'<text class="part" x="12" y="{y + 13}" font-size="12">{count} records</text>')
        for after, cell in zip(since, cells, strict=True):
            if cell == "–":
                continue
            length, value, name = _number(cell) / 20, cell.partition(" ")[0], f"after {_number(after):,.0f} operations"
            drawn += [
                f'<text x="300" y="{y + 13}" font-size="12" text-anchor="end">{name}</text>',
                f'<rect class="ours" x="310" y="{y + 2}" width="{length:.0f}" height="15" rx="2"/>',
                f'<text x="{318 + length:.0f}" y="{y + 13}" font-size="12">{value} B</text>',
            ]
            y += 22
        y += 10
    return _framed("Log of a first execution after a checkpoint", 760, y, drawn)


def _number(cell: str) -> float:
    """The number with which a cell begins."""
    return float(re.match(r"[\d.,]+", cell)[0].replace(",", ""))  # type: ignore[index]


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
        "first-execution.svg": bars("Median of a first execution", "explanation/benchmarks.md", "First execution"),
        **{
            f"crash-matrix-{database.lower()}.svg": matrix(
                f"The crash matrix on {database}", "explanation/crash-matrix.md", database
            )
            for database in ("PostgreSQL", "SQLite", "MariaDB")
        },
        "growth-size.svg": sizes(),
        "growth-log.svg": log_bytes(),
        "replay.svg": bars("Median of a replay", "explanation/benchmarks.md", "Replay"),
    }


if __name__ == "__main__":
    for name, svg in {**from_text(), "states.svg": states()}.items():
        (HERE / name).write_text(svg)
