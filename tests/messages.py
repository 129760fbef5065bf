"""Every text of ours that a user can meet, read from the source: errors, warnings, reasons in the report."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

PACKAGE = pathlib.Path(__file__).parent.parent / "recom_jax"
# Commands' own usage errors say all there is; the CUDA target has a page of its own.
LEFT_OUT = ("cli.py", "argspec.py", "doctor.py", "verify.py", "cuda")
RAISED = (
    "ArgumentError", "BatchError", "BatchTypeError", "BindError", "BindTypeError", "DeletedError", "EncodeError",
    "BucketError", "LeaseError", "OptionError", "PipelineError", "PlatformError", "PreprocessError",
    "PreprocessTypeError", "Refuse", "Unsafe", "MismatchError", "StringError", "ExportError", "TensorFlowError",
    "SparseError",
)  # fmt: skip
WARNED = ("warn_once", "warn")


def fragments(node: ast.expr) -> list[str]:
    """The literal pieces of a string expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [v.value for v in node.values if isinstance(v, ast.Constant)]
    if isinstance(node, ast.IfExp):
        return [*fragments(node.body), *fragments(node.orelse)]
    return []


def messages() -> Iterator[tuple[str, str, str]]:
    """(file:line, what is called, the longest literal piece of its text)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        if where.parts[0] in LEFT_OUT:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in RAISED or name in WARNED:
                pieces = [p for a in node.args for p in fragments(a)]
                if pieces:
                    yield f"{where}:{node.lineno}", name, max(pieces, key=len).strip(" :;,.({")


if __name__ == "__main__":
    for line in messages():
        print(*line, sep=" | ")
