"""The code of a class for several elements at a time: what a thread waits for, it waits for once for all of them.

Kernels beside a training step get few warps of a processor. With one element a thread, such a warp waits for each load
and each product in turn; with several, whose code is interleaved, it waits less often. Values become arrays of U
elements (the kernel's text says what U, EACH and any are), and a block under a condition runs if any of its elements
wants it: there, what may not be computed for the others is guarded one by one.
"""

from __future__ import annotations

import re

_DECLARED = re.compile(r"(?:const )?(\w+(?: long)?) ([a-z]+\d+) = ([^=].*);")
_ASSIGNED = re.compile(r"([a-z]+\d+) = ([^=].*);")
_CONDITION = re.compile(r"if \((.*)\) \{")
_COUNTED = re.compile(r"for \(int \w+ = 0; \w+ < (.*); \+\+\w+\) \{")
_NAME = re.compile(r"\b([a-z]+\d+|e)\b")
_CALL = re.compile(r"\b([A-Za-z_]\w*)(?:<[\w ]+>)?\(")
# With any operands at all these come to an end, and read no memory: they need no guard.
PURE = frozenset({"sigrid_hash", "join", "immediate", "from_bits", "static_cast"}) | {
    f"x_{n}" for n in ("convert", "select", "add", "sub", "mul", "and", "or", "xor", "not", "max", "min",
                       "eq", "ne", "lt", "le", "gt", "ge")
}  # fmt: skip


def widened(body: str) -> str | None:
    """The body of a class's function for elements e[0] to e[U - 1], instead of e; None: it has code of other kinds.

    Declarations, assignments, conditions, loops of a fixed count, and stores in no block are known: a search, whose
    elements go their own ways, is not.
    """
    many = {"e"}  # names that have a value for each element
    made: list[str] = []
    masks: list[str] = []  # of the blocks around, innermost last; "" for a loop

    def each(text: str) -> str:
        return _NAME.sub(lambda m: f"{m[1]}[u]" if m[1] in many else m[1], text)

    for line in body.split("\n"):
        here = next((m for m in reversed(masks) if m), "")
        if line == "}" and masks:
            masks.pop()
            made.append(line)
        elif found := _CONDITION.fullmatch(line):
            name = f"m{len(made)}"
            outer = f"{here}[u] && " if here else ""
            made += [
                f"bool {name}[U];",
                f"EACH {name}[u] = {outer}({each(found[1])});",
                f"if (any({name})) {{",
            ]
            masks.append(name)
        elif found := _COUNTED.fullmatch(line):
            if many & set(_NAME.findall(found[1])):
                return None
            made.append(line)
            masks.append("")
        elif found := _DECLARED.fullmatch(line):
            kind, name, text = found.groups()
            value = each(text)
            if here and not pure(text):
                value = f"{here}[u] ? {value} : static_cast<{kind}>(0)"
            made += [f"{kind} {name}[U];", f"EACH {name}[u] = {value};"]
            many.add(name)
        elif (found := _ASSIGNED.fullmatch(line)) and found[1] in many:
            guard = f"if ({here}[u]) " if here else ""
            made.append(f"EACH {guard}{found[1]}[u] = {each(found[2])};")
        elif line.startswith("store<") and not masks:
            made.append(f"EACH {each(line)}")
        else:
            return None
    return None if masks else "\n".join(made)


def pure(text: str) -> bool:
    """Whether an expression may be computed for elements that don't want it."""
    return not re.search(r"[/%]", text) and set(_CALL.findall(text)) <= PURE
