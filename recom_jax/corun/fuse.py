"""Horizontal fusion: operators -> segments, and how a segment is cut.

Operators of the same features run in one kernel row by row until one of them is a barrier, which needs whole results of
others; there a new level begins. Segments of one level share nothing but the device, so any of them, or row ranges of
them, fit in one kernel: which ones is for the search to decide, by what a stage leaves free.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from recom_jax.corun.plan import PrepOp, Segment, Work, total


def levels(ops: Sequence[PrepOp]) -> dict[str, int]:
    """Operator -> level: how many barriers, or joins of features, lie before it. `ops` in order of use."""
    found: dict[str, int] = {}
    features = {op.name: op.features for op in ops}
    for op in ops:
        steps = [found[n] + int(op.barrier or features[n] != op.features) for n in op.after]
        found[op.name] = max(steps, default=0)
    return found


def groups(ops: Sequence[PrepOp]) -> dict[str, int]:
    """Feature -> number of its group. Features that an operator reads together can't be parted."""
    parent: dict[str, str] = {}

    def root(x: str) -> str:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x]
        return x

    for op in ops:
        for feature in op.features:
            a, b = root(op.features[0]), root(feature)
            if a != b:
                parent[max(a, b)] = min(a, b)
    numbers: dict[str, int] = {}
    return {f: numbers.setdefault(root(f), len(numbers)) for f in parent}


def segments(ops: Sequence[PrepOp]) -> tuple[Segment, ...]:
    """The operators as segments, in order of level. What stays inside one costs no memory traffic."""
    level, by_name = levels(ops), {op.name: op for op in ops}
    readers: dict[str, set[tuple[tuple[str, ...], int]]] = collections.defaultdict(set)
    key = {op.name: (op.features, level[op.name]) for op in ops}
    members: dict[tuple[tuple[str, ...], int], list[PrepOp]] = collections.defaultdict(list)
    for op in ops:
        members[key[op.name]].append(op)
        for name in op.after:
            readers[name].add(key[op.name])
    names = {k: f"{_short(k[0])}/{k[1]}" for k in members}
    if len(set(names.values())) < len(names):
        names = {k: f"{_short(k[0])}/{k[1]}.{n}" for n, k in enumerate(members)}
    made = []
    for here, inside in members.items():
        outside = {n for op in inside for n in op.after if key[n] != here}
        written = [op.out_us for op in inside if op.kept or readers[op.name] - {here}]
        memory = (
            sum(op.raw_us for op in inside)
            + sum(by_name[n].out_us for n in sorted(outside))
            + sum(written)
        )
        made.append(
            Segment(
                names[here],
                here[0],
                here[1],
                tuple(op.name for op in inside),
                tuple(dict.fromkeys(names[key[n]] for n in sorted(outside))),
                Work(
                    sum(op.compute_us for op in inside),
                    memory,
                    sum(op.tiles for op in inside),
                    sum(op.latency_us for op in inside),
                    max(op.longest_us for op in inside),
                ),
            )
        )
    return tuple(sorted(made, key=lambda s: (s.level, s.name)))


def _short(features: tuple[str, ...]) -> str:
    return (
        features[0]
        if len(features) == 1
        else f"{features[0]}+{len(features) - 1}"
        if features
        else "constant"
    )


def whole(parts: Sequence[Segment]) -> Work:
    """All of them together."""
    return total(s.work for s in parts)
