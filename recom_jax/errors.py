"""Every exception the package raises on purpose: one per stage.

Each derives from the builtin type plain JAX would raise in the same place, so code written against
``jax.jit`` keeps catching what it caught. A message names the argument or column, the source line where
there is one, what was expected and what to do.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import types


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


class BindTypeError(BindError, TypeError):
    """A bound argument is missing or superfluous, or is not an array."""


class DeletedError(RecomError, RuntimeError):
    """An array was deleted, or donated to an earlier call."""


class BatchError(RecomError, ValueError):
    """A batch does not match the lease it is served with, or was served before."""


class BatchTypeError(BatchError, TypeError):
    """A leaf of a batch is not an array, or has a dtype the model was not traced with."""


class BucketError(RecomError, ValueError):
    """`Options.batch_buckets` asks for what the function or its arguments do not allow."""


class LeaseError(RecomError, RuntimeError):
    """A lease was used twice, or none came free in time."""


class ExportError(RecomError, RuntimeError):
    """A model cannot be taken to TensorFlow: the library cannot be built, or is refused."""


class TensorFlowError(ExportError, ImportError):
    """TensorFlow is not installed, or is a version that the package does not work with."""


class StringError(RecomError, ValueError):
    """Strings that cannot be hashed as asked: nulls, lists that are too long, a bucket count out of range."""


class SparseError(RecomError, ValueError):
    """Tables, ids and gradients of a sparse update do not fit each other."""


class CudaError(RecomError, RuntimeError):
    """The CUDA target lacks a library, or its compiler refused the kernel."""


class PreprocessError(RecomError, ValueError):
    """A preprocessing operator was given a parameter or a column that it is not defined for."""


class PreprocessTypeError(PreprocessError, TypeError):
    """A preprocessing operator was given a column of a type that it is not defined for."""


class PipelineError(RecomError, RuntimeError):
    """A co-running pipeline cannot go on: its input, or how it is used, breaks what it promises."""


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
      The exception to raise ``from exc``: same arguments and attributes; its text goes on with `where`
      and the line of the user's code that failed. Where Python cannot build such a class (a type with
      its own memory layout or constructor), `exc` itself with that text as a note.
    """
    ours: type[RecomError] = TraceError if base is None else base
    line = user_line(exc)
    frames = _user_frames(exc) if _filters() else None
    text = f"recom_jax: {where}" + (f"\n  at {line}" if line else "")
    try:
        made_of = _class_of(ours, type(exc))
        made: Exception = made_of.__new__(made_of, *exc.args)
        # A constructor may want other arguments than it keeps: state is copied, not recomputed.
        for cls in type(exc).__mro__:
            for name, member in vars(cls).items():
                if isinstance(member, types.MemberDescriptorType) and hasattr(exc, name):
                    with contextlib.suppress(AttributeError, TypeError):  # read-only
                        setattr(made, name, getattr(exc, name))
        made.__dict__.update(getattr(exc, "__dict__", {}))
        made.args = exc.args
        made.__dict__["_recom_where"] = text
        str(made)
    except Exception:
        exc.add_note(text)
        return exc
    if (
        frames is not None
    ):  # the user's frames come last, next to the message; JAX's and ours are left out
        made.__traceback__ = exc.__traceback__ = frames
    return made


def _class_of(ours: type[RecomError], theirs: type[Exception]) -> type:
    key = (ours, theirs)
    if key not in _DYNAMIC:
        if issubclass(ours, theirs):
            bases: tuple[type, ...] = (ours,)
        elif ours is ArgumentError:  # a TypeError, which another kind of failure must not become
            bases = (RecomError, theirs)
        else:
            bases = (ours, theirs)

        def text(self: Exception) -> str:
            return f"{theirs.__str__(self)}\n  {self.__dict__['_recom_where']}"

        _DYNAMIC[key] = type(ours.__name__, bases, {"__module__": __name__, "__str__": text})
    return _DYNAMIC[key]


def user_line(exc: BaseException) -> str:
    """``file:line, in function: source`` of the innermost frame that is neither JAX's nor ours, or ""."""
    found = ""
    for step in _user_steps(exc):
        code = step.tb_frame.f_code
        source = linecache.getline(code.co_filename, step.tb_lineno).strip()
        found = f"{code.co_filename}:{step.tb_lineno}, in {code.co_name}" + (
            source and f": {source}"
        )
    return found


def _user_steps(exc: BaseException) -> list[types.TracebackType]:
    steps = []
    step: types.TracebackType | None = exc.__traceback__
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(("<", *_LIBRARIES)):
            steps.append(step)
        step = step.tb_next
    return steps


def _user_frames(exc: BaseException) -> types.TracebackType | None:
    """The traceback without frames of JAX's and ours; None if nothing is left."""
    made: types.TracebackType | None = None
    for step in reversed(_user_steps(exc)):
        made = types.TracebackType(made, step.tb_frame, step.tb_lasti, step.tb_lineno)
    return made


def _filters() -> bool:
    import jax

    return str(getattr(jax.config, "jax_traceback_filtering", "")) != "off"


def _libraries() -> tuple[str, ...]:
    import jax
    import jaxlib

    files = (jax.__file__, jaxlib.__file__, __file__, os.__file__)  # os: the standard library
    return tuple(os.path.dirname(os.path.abspath(f)) + os.sep for f in files)


_LIBRARIES = _libraries()
