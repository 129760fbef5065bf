"""`python -m benchmarks.compare OLD.json NEW.json`: names what got slower or bigger beyond noise.

A row is worse when its new median is above the old p90, its old median below the new p10, and the median
has grown by more than 5 % (25 % where there are fewer than five measurements). Two folders are compared
case by case. Rows that only the old file has are named too. The exit status is 1 if something got worse, 2 if nothing
can be compared.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record
from benchmarks.record import Row

GROWTH, GROWTH_FEW, FEW = 1.05, 1.25, 5


@dataclasses.dataclass(frozen=True)
class Change:
    """One row of both files whose median moved beyond noise."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        return self.new.median / self.old.median if self.old.median else float("inf")

    @property
    def worse(self) -> bool:
        return self.new.median > self.old.median

    def __str__(self) -> str:
        return (f"{self.old.group}: {self.old.contestant}, {self.old.inputs}: {self.old.median:.4g} -> "
                f"{self.new.median:.4g} {self.old.unit} ({self.ratio:.2f} x)")  # fmt: skip


def beyond_noise(low: Row, high: Row) -> bool:
    """Whether `high` is above `low` by more than both spread."""
    growth = GROWTH_FEW if min(low.count, high.count) < FEW else GROWTH
    apart = high.median > low.p90 and high.p10 > low.median
    return apart and high.median > growth * low.median


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Rows that got worse or better beyond noise, the worst first."""
    rows = {r.key: r for r in record.rows_of(new)}
    found = [
        Change(r, rows[r.key])
        for r in record.rows_of(old)
        if r.key in rows and (beyond_noise(r, rows[r.key]) or beyond_noise(rows[r.key], r))
    ]
    return sorted(found, key=lambda c: -c.ratio)


def broken(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Targets that were met and now are not."""
    met = {t.name for t in record.targets_of(old) if t.passed}
    return [t.name for t in record.targets_of(new) if t.name in met and not t.passed]


def gone(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Row]:
    """Rows that were measured and now are not: nothing can be said of them."""
    keys = {r.key for r in record.rows_of(new)}
    return [r for r in record.rows_of(old) if r.key not in keys]


def pairs(old: pathlib.Path, new: pathlib.Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The results to compare: two files, or the newest of each case in two folders."""
    if old.is_file() and new.is_file():
        return [(record.read(old), record.read(new))]

    def newest(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
        found = [record.read(p) for p in sorted(folder.glob("*.json"))]
        return {d["case"]: d for d in sorted(found, key=lambda d: str(d["date"]))}

    a, b = newest(old), newest(new)
    return [(a[case], b[case]) for case in a if case in b]


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("old", type=pathlib.Path)
    p.add_argument("new", type=pathlib.Path)
    args = p.parse_args(argv)
    try:
        found = pairs(args.old, args.new)
    except (OSError, ValueError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    compared, worse = 0, 0
    for old, new in found:
        for name in ("machine", "versions", "settings"):
            if old[name] != new[name]:
                differ = [k for k in old[name] | new[name] if old[name].get(k) != new[name].get(k)]
                print(f"note: {old['case']}: the files differ in {name}: {', '.join(differ)}")
        compared += len({r.key for r in record.rows_of(old)} & {r.key for r in record.rows_of(new)})
        for change in changes(old, new):
            print(("WORSE   " if change.worse else "better  ") + str(change))
            worse += change.worse
        for row in gone(old, new):
            print(f"GONE    {row.group}: {row.contestant}, {row.inputs}: is not in the new file")
        for name in broken(old, new):
            print(f"MISSED  {name}: was met before")
            worse += 1
    if not compared:
        print("error: the files have no row in common", file=sys.stderr)
        return 2
    print(f"{compared} rows compared, {worse} worse beyond noise")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
