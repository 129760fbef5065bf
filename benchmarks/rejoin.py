"""`python -m benchmarks.rejoin CASE ...`: joins kept pieces again, of every machine, without measuring anything.

For pieces that were measured elsewhere and brought here, or by a run that was ended.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import machine, pieces, record
from benchmarks.cases import CASES
from benchmarks.context import settings_from
from benchmarks.driver import RESULTS


def rejoin(name: str, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the results that the kept pieces of a case make: one a kind of machine, by its newest piece's settings."""
    case = CASES[name]
    kept: dict[str, list[dict[str, Any]]] = {}
    for path in sorted((out / "kept").glob(f"{name}.*.json")):
        data = record.read(path)
        kept.setdefault(machine.key(data["machine"], data["versions"]), []).append(data)
    written = []
    for key, every in kept.items():
        newest = max(every, key=lambda d: str(d["date"]))
        settings = settings_from(newest["settings"])
        assert case.pieces is not None
        wanted = case.pieces(settings)
        found = {
            d["piece"]: pieces.result_of(d)
            for d in every
            if d["piece"] in wanted and d["settings"] == newest["settings"]
        }
        if not found:
            continue
        result = pieces.joined(wanted, found, settings, case.finish, case.combine)
        same = ("schema", "case", "date", "settings", "machine", "versions", "git")
        path = out / f"{name}.{key}.json"
        record.write(path, {
            **{k: newest[k] for k in same},
            "title": case.title, "minutes": round(sum(d["minutes"] for d in every), 2),
            "load_before": [], "load_after": [], **record.to_json(result),
        })  # fmt: skip
        written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.rejoin", description=__doc__)
    p.add_argument("case", nargs="+", choices=[n for n, c in CASES.items() if c.pieces is not None])
    p.add_argument("--out", type=pathlib.Path, default=RESULTS, help="folder of the results")
    args = p.parse_args(argv)
    written = [path for name in args.case for path in rejoin(name, args.out)]
    for path in written:
        missing = record.read(path)["facts"].get("missing")
        print(f"wrote {path}" + (f", missing {missing}" if missing else ""))
    if not written:
        print(f"error: no piece is kept in {args.out / 'kept'}", file=sys.stderr)
    return 0 if written else 2


if __name__ == "__main__":
    sys.exit(main())
