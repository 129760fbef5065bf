"""What a case hands back, and its JSON (README.md documents the schema)."""

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.timing import Contestant, Samples

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured number. `group` is its table in the report; (group, contestant, inputs) is unique."""

    group: str
    contestant: str
    inputs: str
    unit: str
    median: float
    p10: float
    p90: float
    count: int
    first_s: float | None = None
    max_difference: float | None = None
    note: str = ""

    @property
    def key(self) -> str:
        return f"{self.group} | {self.contestant} | {self.inputs} | {self.unit}"

    @classmethod
    def of(cls, group: str, contestant: Contestant, samples: Samples, **more: Any) -> "Row":
        """A latency row from the times of `interleave`."""
        return cls(
            group,
            contestant.name,
            contestant.inputs,
            "ms",
            samples.median,
            samples.percentile(10),
            samples.percentile(90),
            len(samples.flat),
            note=contestant.note,
            **more,
        )

    @classmethod
    def single(cls, group: str, contestant: str, inputs: str, unit: str, values: Sequence[float],
               note: str = "") -> "Row":  # fmt: skip
        """A row from a few values, each measured on its own (a process each, say)."""
        samples = Samples((tuple(values),))
        return cls(group, contestant, inputs, unit, samples.median, min(values), max(values),
                   len(values), note=note)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Target:
    """One promise: `value relation limit` must hold. `measured` says where the value comes from."""

    name: str
    value: float
    relation: str
    limit: float
    unit: str = ""
    measured: str = ""

    @property
    def passed(self) -> bool:
        return {"<=": self.value <= self.limit, "<": self.value < self.limit,
                "==": self.value == self.limit}[self.relation]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Result:
    """Everything a case found. `facts` are counts and texts that no table of times holds."""

    rows: tuple[Row, ...] = ()
    targets: tuple[Target, ...] = ()
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def to_json(result: Result) -> dict[str, Any]:
    """The case's own part of the JSON."""
    return {
        "rows": [dataclasses.asdict(r) for r in result.rows],
        "targets": [dataclasses.asdict(t) | {"passed": t.passed} for t in result.targets],
        "facts": dict(result.facts),
    }


def write(path: pathlib.Path, data: Mapping[str, Any]) -> None:
    """Writes JSON so that a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n")
    part.replace(path)


def read(path: pathlib.Path) -> dict[str, Any]:
    """A result file.

    Raises:
      ValueError: it is no result file, or of another schema.
    """
    data = json.loads(path.read_text())
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or "rows" not in data:
        raise ValueError(f"{path}: not a benchmark result of schema {SCHEMA}")
    return data


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a result file."""
    return [Row(**r) for r in data["rows"]]


def targets_of(data: Mapping[str, Any]) -> list[Target]:
    """The targets of a result file."""
    return [Target(**{k: v for k, v in t.items() if k != "passed"}) for t in data["targets"]]


def commit_of(data: Mapping[str, Any]) -> str:
    """What was measured: the commit, shortened, and whether sources differed from it."""
    git = data["git"]
    return (git["commit"] or "unknown")[:10] + (" with changes" if git["modified"] else "")
