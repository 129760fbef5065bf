"""`python -m recom_jax doctor`, `... explain module:function --args ...` and `... tf-library`.

The exit status is 0 if all is well, 1 if something is wrong with the installation or (`--check`) a column is not
fused, and 2 if the command line cannot be understood.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from recom_jax import argspec, doctor
from recom_jax.errors import RecomError

EPILOG = """examples:
  python -m recom_jax explain models:forward --args "{'user': f32[1000,8]}" "i32[256]"
  python -m recom_jax explain models:forward --args-from models:example_arguments --html page.html

an argument is an array (f32[1000,8], bf16[64,16], i32[256], bool[8]; numpy's names work too), or a dict, list or
tuple of such, or a plain value (3, 'name', None)
"""


class UsageError(Exception):
    """What was asked for is not there: status 2."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recom_jax", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="doctor | explain | tf-library"
    )
    look = commands.add_parser(
        "doctor", help="versions, devices, targets, cache; what is missing and what to do"
    )
    look.set_defaults(run=lambda _: doctor.main())
    explain = commands.add_parser(
        "explain", help="what is fused of a function, and why the rest is not", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    explain.add_argument("function", metavar="module:function", help="optimized already, or not")
    given = explain.add_mutually_exclusive_group(required=True)
    given.add_argument("--args", nargs="+", metavar="SPEC", help="the arguments' types, see below")
    given.add_argument("--args-from", metavar="module:callable",
                       help="returns the arguments: a tuple of them, or the only one")  # fmt: skip
    explain.add_argument("--html", metavar="FILE", help="write a page to search as well")
    explain.add_argument(
        "--all", action="store_true", help="print every column on a line of its own"
    )
    explain.add_argument("--check", action="store_true", help="status 1 if a column is not fused")
    explain.set_defaults(run=_explain)
    library = commands.add_parser(
        "tf-library", help="path of the library for TensorFlow (tf.load_library); builds it, once"
    )
    library.add_argument("--out", metavar="FILE", help="copy it there, for another machine")
    library.set_defaults(run=_tf_library)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except UsageError as why:
        print(f"error: {why}", file=sys.stderr)
        return 2
    except RecomError as why:
        print(f"error: {why}", file=sys.stderr)
        return 1


def _explain(args: argparse.Namespace) -> int:
    import recom_jax

    fn = _import(args.function)
    if args.args_from is not None:
        made = _call(args.args_from)
        values = made if isinstance(made, tuple) else (made,)
    else:
        try:
            values = tuple(argspec.parse(text) for text in args.args)
        except argspec.SpecError as why:
            raise UsageError(f"{why}; see python -m recom_jax explain --help") from why
    optimized = fn if hasattr(fn, "explain") else recom_jax.optimize(fn)
    report = optimized.explain(*values)
    print(report.to_text(limit=None) if args.all else report)
    if args.html:
        try:
            report.to_html(args.html)
        except OSError as why:
            raise UsageError(f"cannot write {args.html}: {why.strerror or why}") from why
        print(f"wrote {args.html}")
    return 1 if args.check and report.num_fused < report.num_columns else 0


def _tf_library(args: argparse.Namespace) -> int:
    from recom_jax.tensorflow_library import find_tensorflow, kept_library, tensorflow_library

    if kept_library(find_tensorflow()) is None:
        print("compiling, once: about a minute", file=sys.stderr)
    path = tensorflow_library()
    if args.out:
        try:
            path = pathlib.Path(shutil.copy(path, args.out))
        except OSError as why:
            raise UsageError(f"cannot write {args.out}: {why.strerror or why}") from why
    print(path)
    return 0


def _import(where: str) -> Any:
    module, colon, path = where.partition(":")
    if not colon or not module or not path:
        raise UsageError(f"{where!r} is not module:function, as in models.dlrm:forward")
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as why:
        if why.name and (module == why.name or module.startswith(why.name + ".")):
            raise UsageError(
                f"there is no module {module!r} on Python's path (the current folder is on it)"
            ) from why
        raise UsageError(_failed(f"module {module!r} cannot be imported", why)) from why
    except Exception as why:
        raise UsageError(_failed(f"module {module!r} cannot be imported", why)) from why
    for part in path.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{getattr(value, '__name__', value)!r} has nothing named {part!r}")
        value = getattr(value, part)
    if not callable(value):
        raise UsageError(f"{where} is a {type(value).__name__}, not a function")
    return value


def _call(where: str) -> Any:
    fn = _import(where)
    try:
        return fn()
    except Exception as why:
        raise UsageError(_failed(f"{where}() failed", why)) from why


def _failed(what: str, why: Exception) -> str:
    """The reason with the last line of the user's code."""
    frames = traceback.extract_tb(why.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{what}: {type(why).__name__}: {why}{at}"


__all__ = ["main"]
