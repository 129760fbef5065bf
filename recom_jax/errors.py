"""Every exception the package raises on purpose: one per stage.

Each derives from the builtin type plain JAX would raise in the same place, so code written against
``jax.jit`` keeps catching what it caught. A message names the argument or column, the source line where
there is one, what was expected and what to do.
"""

from __future__ import annotations


class RecomError(Exception):
    """Base of all exceptions of this package."""


class TraceError(RecomError):
    """The user's function could not be traced.

    Raised as a subclass that also derives from the original exception's type (see `trace_error`), with
    the original as ``__cause__``.
    """


class ArgumentError(RecomError, TypeError):
    """An argument has the wrong arity, type, dtype or structure."""


class OptionError(RecomError, ValueError):
    """An option or environment variable has a value that means nothing."""


class VerifyError(RecomError, AssertionError):
    """A stage produced a value that breaks the IR's rules: a defect of ours, never of the user's input."""


class EncodeError(RecomError, ValueError):
    """A column cannot be expressed in the program format; it stays in XLA and `explain` says why."""


class BindError(RecomError, ValueError):
    """Bound arguments do not match the function or, in `update`, what was bound before."""


class BatchError(RecomError, ValueError):
    """A batch does not match the lease it is served with, or was served before."""


class BatchTypeError(BatchError, TypeError):
    """A leaf of a batch is not an array, or has a dtype the model was not traced with."""


class LeaseError(RecomError, RuntimeError):
    """A lease was used twice, or none came free in time."""


class PlatformError(RecomError, RuntimeError):
    """The extension module is missing or does not match this installation."""


_DYNAMIC: dict[tuple[type, type], type] = {}


def trace_error(exc: Exception, where: str, base: type[RecomError] | None = None) -> Exception:
    """The same failure as ours: an instance of both `TraceError` and ``type(exc)``.

    Args:
      exc: what the user's function, or JAX inside it, raised.
      where: what was being traced and with which arguments, one line.
      base: the class of ours to derive from (default `TraceError`).

    Returns:
      The exception to raise ``from exc``. Where Python cannot build such a class (a type with its own
      memory layout or constructor), `exc` itself with `where` as a note.
    """
    ours: type[RecomError] = TraceError if base is None else base
    key = (ours, type(exc))
    try:
        if key not in _DYNAMIC:
            # ArgumentError is a TypeError already; another kind of failure must not be a TypeError too.
            bases = (ours,) if issubclass(ours, type(exc)) else (ours if base is None else RecomError, type(exc))
            _DYNAMIC[key] = type(ours.__name__, bases, {"__module__": __name__})
        made = _DYNAMIC[key].__new__(_DYNAMIC[key], *exc.args)
        # A constructor may want other arguments than it keeps: state is copied, not recomputed.
        made.__dict__.update(getattr(exc, "__dict__", {}))
        first = str(exc.args[0]) if exc.args else ""
        made.args = (f"{first}\n  recom_jax: {where}", *exc.args[1:])
    except TypeError:
        exc.add_note(f"recom_jax: {where}")
        return exc
    return made  # type: ignore[no-any-return]
