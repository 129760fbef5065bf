"""Plots of results: which there are and what they show is computed here, and kept inside each SVG.

A plot belongs to a case. Cases whose groups differ in one number alone (columns, batch size) become lines over it;
calls a second become lines over threads; all others bars. What has no result has no plot. matplotlib draws them; it is
not needed to tell whether those in docs/plots are up to date: an SVG's description is the JSON of its data.
"""

import dataclasses
import html
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks import record
from benchmarks.record import Row, Target

Data = Mapping[str, Any]
OURS = (
    "recom_jax",
    "fused kernel",
    "co-run",
    "all rewrites",
)  # how the names of our contestants begin
NOT_DRAWN = (
    "idioms",
    "gpu_idioms",
    "strings",
    "gpu_profile",
)  # many rows of one kind: their tables say it better
MEMORY = ("memory before the call", "memory after the call")
SHARES = ("stages",)  # parts of a whole: only a linear axis shows what they take of it
WIDE = 30.0  # largest over smallest value: from here on, a logarithmic axis
NUMBER = re.compile(r"\d[\d,]*")


@dataclasses.dataclass(frozen=True)
class Bar:
    """One bar: the value with its range; `limit` is what was promised of it."""

    label: str
    value: float
    low: float
    high: float
    ours: bool = False
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
    """Bars under one heading. `floor` is what no contestant can fall below."""

    title: str
    bars: tuple[Bar, ...]
    floor: float | None = None


@dataclasses.dataclass(frozen=True)
class Line:
    label: str
    points: tuple[tuple[float, float], ...]
    ours: bool = False


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture: panels of bars, or lines over `x`."""

    name: str
    title: str
    unit: str
    panels: tuple[Panel, ...] = ()
    lines: tuple[Line, ...] = ()
    x: str = ""
    logarithmic: bool = False

    @property
    def file(self) -> str:
        return f"{self.name}.svg"

    def json(self) -> str:
        """The data, as it is kept in the SVG."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"), sort_keys=True)


def charts(groups: Sequence[Sequence[Data]]) -> dict[tuple[str, str], list[Chart]]:
    """All charts, by case and date of its result."""
    found: dict[tuple[str, str], list[Chart]] = {}
    used: set[str] = set()
    for data in (d for cases in groups for d in cases):
        made = []
        for chart in case_charts(data):
            name, n = chart.name, 2
            while name in used:  # the same case on another machine that is called the same
                name, n = f"{chart.name}-{n}", n + 1
            used.add(name)
            made.append(dataclasses.replace(chart, name=name))
        found[key_of(data)] = made
    return found


def key_of(data: Data) -> tuple[str, str]:
    return str(data["case"]), str(data["date"])


def case_charts(data: Data) -> Iterator[Chart]:
    """The charts of one result: one of each unit, or one of each kind of groups where all of them become lines."""
    if data["case"] in NOT_DRAWN or data["settings"]["quick"]:
        return
    rows = [r for r in record.rows_of(data) if not r.group.endswith(MEMORY)]
    targets = record.targets_of(data)
    m = data["machine"]
    place = re.sub(r"[^a-z0-9]+", "-", str(m.get("gpu", m["cpu"])).lower()).strip("-")
    for unit in dict.fromkeys(r.unit for r in rows):
        mine = [r for r in rows if r.unit == unit]
        name = f"{data['case']}.{place}" + ("" if unit == rows[0].unit else f".{_plain(unit)}")
        title = f"{data['title']}, {m.get('gpu', m['cpu'])}"
        if unit == "calls/s":
            lines = _lines(mine, lambda r: _first_number(r.inputs), _without_number)
            yield Chart(name, title, unit, (), lines, "calling threads", _wide(mine))
            continue
        kinds = _kinds(mine)
        for k, rows_of_kind in enumerate(kinds if len(kinds) > 1 else ()):
            x = _over(rows_of_kind)
            more = f".{_plain(x)}" if k else ""
            yield _line_chart(f"{name}{more}", f"{title}: by {x}", unit, rows_of_kind)
        if len(kinds) > 1:
            continue
        if _varying(mine) is None:
            panels = tuple(_panels(mine, targets, data["facts"]))
            logarithmic = _wide(mine) and data["case"] not in SHARES
            yield Chart(name, title, unit, panels, logarithmic=logarithmic)
        else:
            yield _line_chart(name, title, unit, mine)


def _line_chart(name: str, title: str, unit: str, rows: Sequence[Row]) -> Chart:
    """Lines over the number that varies in the groups of `rows`."""
    over = _varying(rows)
    assert over is not None
    at, x = over
    lines = _lines(rows, lambda r: _numbers(r.group)[at], _contestant)
    return Chart(name, title, unit, (), lines, x, _wide(rows))


def _kinds(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by what their groups are called but for numbers, if each kind becomes lines; else one kind."""
    kinds: dict[str, list[Row]] = {}
    for r in rows:
        kinds.setdefault(NUMBER.sub("#", r.group), []).append(r)
    return list(kinds.values()) if all(map(_varying, kinds.values())) else [list(rows)]


def _over(rows: Sequence[Row]) -> str:
    """What varies in the groups of rows that become lines."""
    over = _varying(rows)
    return over[1] if over else ""


def _wide(rows: Sequence[Row]) -> bool:
    values = [r.median for r in rows if r.median > 0]
    return bool(values) and max(values) > WIDE * min(values)


def _plain(unit: str) -> str:
    return re.sub(r"[^a-z]+", "-", unit.lower()).strip("-")


def _numbers(text: str) -> list[float]:
    return [float(n.replace(",", "")) for n in NUMBER.findall(text)]


def _first_number(text: str) -> float:
    return _numbers(text)[0]


def _contestant(r: Row) -> str:
    return f"{r.contestant}, {r.inputs}" if r.inputs else r.contestant


def _without_number(r: Row) -> str:
    return r.contestant


def _varying(rows: Sequence[Row]) -> tuple[int, str] | None:
    """Which of the numbers in the groups' names alone varies, and what it counts; None unless there are three."""
    groups = list(dict.fromkeys(r.group for r in rows))
    if len(groups) < 3 or len({NUMBER.sub("#", g) for g in groups}) > 1:
        return None
    columns = list(zip(*map(_numbers, groups), strict=True))
    varying = [k for k, values in enumerate(columns) if len(set(values)) > 1]
    if len(varying) != 1:
        return None
    (at,) = varying
    before = NUMBER.split(groups[0])[at].rstrip()
    return at, "batch size" if before.endswith("batch") else _noun(NUMBER.split(groups[0])[at + 1])


def _noun(after: str) -> str:
    return re.split(r"[,:]", after)[0].strip() or "number"


def _lines(rows: Sequence[Row], x_of: Any, label_of: Any) -> tuple[Line, ...]:
    points: dict[str, list[tuple[float, float]]] = {}
    for r in rows:
        points.setdefault(label_of(r), []).append((x_of(r), _short(r.median)))
    return tuple(Line(k, tuple(sorted(v)), k.startswith(OURS)) for k, v in points.items())


def _panels(rows: Sequence[Row], targets: Sequence[Target], facts: Data) -> Iterator[Panel]:
    jaxs = facts.get("jax's own")  # of the stages, by name: the others are ours
    for group in dict.fromkeys(r.group for r in rows):
        bars = [
            Bar(_contestant(r), _short(r.median), _short(r.p10), _short(r.p90),
                r.contestant not in jaxs if jaxs else r.contestant.startswith(OURS), _limit(r, targets))
            for r in rows
            if r.group == group
        ]  # fmt: skip
        yield Panel(group, tuple(bars), _floor(group, facts))


def _limit(r: Row, targets: Sequence[Target]) -> float | None:
    """What was promised of a row: the target that has its value."""
    for t in targets:
        if (
            t.name.startswith(r.group)
            and t.unit == r.unit
            and abs(t.value - r.median) <= 1e-9 * r.median
        ):
            return t.limit
    return None


def _floor(group: str, facts: Data) -> float | None:
    """The least time of a group, as its case worked it out: in `floors_us`, or of a RecFlex model by its letter."""
    floor = facts.get("floors_us", {}).get(group)
    if floor is None and group.startswith("RecFlex "):
        floor = facts.get(f"recflex_{group.split()[1].rstrip(',')}_floor_us")
    return None if floor is None else float(floor)


def _short(x: float) -> float:
    """Five digits: a picture shows no more."""
    return float(f"{x:.5g}")


# ---- files -------------------------------------------------------------------------------------------------------


def described(path: pathlib.Path) -> str:
    """The data that an SVG was drawn from; "" if it is none of ours."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", path.read_text(), re.DOTALL)
    return html.unescape(found.group(1)) if found else ""


def stale(made: Sequence[Chart], folder: pathlib.Path) -> list[str]:
    """Names of files that are missing, drawn from other data, or of no chart."""
    there = {p.name: p for p in folder.glob("*.svg")}
    wanted = {c.file: c for c in made}
    wrong = [n for n, c in wanted.items() if n not in there or described(there[n]) != c.json()]
    return sorted([*wrong, *(n for n in there if n not in wanted)])


def write(made: Sequence[Chart], folder: pathlib.Path) -> None:
    """Draws what is stale, and removes what belongs to no chart.

    Raises:
      ImportError: something must be drawn and matplotlib is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {c.file: c for c in made}
    for name in stale(made, folder):
        if name not in wanted:
            (folder / name).unlink()
            continue
        from benchmarks.draw import draw

        draw(wanted[name], folder / name)
