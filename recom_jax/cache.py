"""A disk cache of what takes long to make: programs, PTX, cubins, measured times. It may lose all, and breaks no call.

An entry is one file. Its name is a digest of the caller's key, its head holds a digest of kind, key and data, so an
entry that is cut short, changed or under another's name is removed and counts as a miss. Nothing is loaded from
a folder or file that another user owns or could have written. New entries appear by an atomic rename; a lock orders
the processes that write. When the entries exceed the limit, those used least recently go.

Whatever goes wrong (no space, no permission, a folder deleted while in use) is a miss and one warning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import pathlib
import re
import stat
import struct
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recom_jax.options import Options

KINDS = ("program", "ptx", "cubin", "probe", "schedule")
LOCK = ".lock"
LOCK_WAIT_S = 1.0  # then the entry is not kept: another process is stuck, or the disk is
STALE_S = 3600.0  # unfinished files older than this were left by a process that died

_MAGIC = b"RECOMC01"
_HEAD = struct.Struct("<8s32sQ")  # magic, digest, bytes of data
_ENTRY = re.compile(f"(?:{'|'.join(KINDS)})-[0-9a-f]{{64}}")
_NEW = re.compile(r"\.new-\d+-[0-9a-f]{32}")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WARNED: set[str] = set()
_WARNED_LOCK = threading.Lock()


def key_of(*parts: str | bytes | int) -> str:
    """A key made of everything the data depends on: program, versions, architecture, flags, headers.

    Parts are told apart by type and length: ``key_of("ab", "c")`` is not ``key_of("a", "bc")``.
    """
    made = hashlib.blake2b(digest_size=32)
    for p in parts:
        if not isinstance(p, (str, bytes, int)):
            raise TypeError(f"a key is made of str, bytes and int, not {type(p).__name__}")
        data = p if isinstance(p, bytes) else str(p).encode(errors="surrogatepass")
        made.update(f"{type(p).__name__}{len(data)}:".encode() + data)
    return made.hexdigest()


class Unsafe(OSError):
    """A folder or file that another user could have written."""


@dataclasses.dataclass(frozen=True)
class State:
    """What `Cache.state` finds.

    Attributes:
      folder: None if the cache is off.
      entries, size: how many entries there are, and their bytes.
      problem: why nothing can be read or kept, "" if all is well.
    """

    folder: pathlib.Path | None
    entries: int
    size: int
    limit: int
    problem: str


class Cache:
    """A folder of entries. Safe to use from threads and processes at once.

    Args:
      folder: made when the first entry is kept; None: nothing is kept.
      limit: bytes of all entries together.
    """

    def __init__(self, folder: pathlib.Path | None, limit: int = 1 << 28) -> None:
        self.folder, self.limit = folder, limit

    @classmethod
    def of(cls, options: Options) -> Cache:
        """The cache that options and environment ask for."""
        return cls(options.caches_in, options.cache_limit)

    def get(self, kind: str, key: str) -> bytes | None:
        """What was kept, or None."""
        name = _name(kind, key)
        if self.folder is None:
            return None
        try:
            with self._opened() as folder:
                return _read(folder, name, kind, key)
        except FileNotFoundError:
            return None
        except (OSError, MemoryError) as why:
            self._warn("read", why)
            return None

    def put(self, kind: str, key: str, data: bytes) -> bool:
        """Keeps an entry. Returns whether it was kept: one larger than the limit is not."""
        name = _name(kind, key)
        if self.folder is None or _HEAD.size + len(data) > self.limit:
            return False
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder, _locked(folder):
                _write(folder, name, _HEAD.pack(_MAGIC, _digest(kind, key, data), len(data)) + data)
                self._evict(folder, name)
            return True
        except (OSError, MemoryError) as why:
            self._warn("keep", why)
            return False

    def state(self) -> State:
        """For people: what is in the folder, and whether it can be used. Writes nothing."""
        if self.folder is None:
            return State(None, 0, 0, self.limit, "")
        try:
            with self._opened() as folder:
                files = [f for f in _listed(folder) if _ENTRY.fullmatch(f.name)]
                problem = "" if os.access(self.folder, os.W_OK) else "the folder is read-only"
        except FileNotFoundError:  # made when something is kept, if the folder above allows it
            above = next((p for p in self.folder.parents if p.exists()), self.folder)
            problem = "" if os.access(above, os.W_OK) else f"{above} is read-only"
            return State(self.folder, 0, 0, self.limit, problem)
        except OSError as why:
            return State(self.folder, 0, 0, self.limit, _text(why))
        return State(self.folder, len(files), sum(f.size for f in files), self.limit, problem)

    # ---- inside -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """The folder's descriptor, checked; every name below is resolved in it, whatever happens to the path."""
        assert self.folder is not None
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            check_private(os.fstat(fd), str(self.folder))
            yield fd
        finally:
            os.close(fd)

    def _evict(self, folder: int, newest: str) -> None:
        """Removes what was used least recently until the limit is kept, and what dead processes left."""
        files = _listed(folder)
        entries = [f for f in files if _ENTRY.fullmatch(f.name)]
        size = sum(f.size for f in entries)
        for f in sorted(entries, key=lambda f: (f.used, f.name)):
            if size <= self.limit:
                break
            if f.name != newest:
                _remove(folder, f.name)
                size -= f.size
        for f in files:
            if _NEW.fullmatch(f.name) and f.used < (time.time() - STALE_S) * 1e9:
                _remove(folder, f.name)

    def _warn(self, what: str, why: BaseException) -> None:
        """Once for each folder and process, whatever goes wrong with it and how often."""
        with _WARNED_LOCK:
            if str(self.folder) in _WARNED:
                return
            _WARNED.add(str(self.folder))
        warnings.warn(
            f"recom_jax: cannot {what} compiled code in the cache folder {self.folder}: {_text(why)}. It is compiled "
            "again where needed; RECOM_CACHE_DIR names another folder, RECOM_CACHE_DIR=0 turns the cache off",
            RuntimeWarning,
            stacklevel=3,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    name: str
    size: int
    used: int  # nanoseconds: the time of modification, which `get` moves too


def _name(kind: str, key: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"the cache knows no kind {kind!r}; there are {KINDS}")
    return f"{kind}-{key_of(key)}"


def _digest(kind: str, key: str, data: bytes) -> bytes:
    return bytes.fromhex(key_of(kind, key, data))


def _text(why: BaseException) -> str:
    return (why.strerror if isinstance(why, OSError) else None) or str(why) or type(why).__name__


def check_private(found: os.stat_result, what: str) -> None:
    """Raises Unsafe unless the file is ours and only we can write it."""
    if found.st_uid != os.geteuid():
        raise Unsafe(errno.EPERM, f"{what} belongs to user {found.st_uid}, not to {os.geteuid()}")
    if found.st_mode & _OTHERS_WRITE:
        raise Unsafe(
            errno.EPERM, f"other users may write {what} (chmod go-w makes it usable again)"
        )


def _read(folder: int, name: str, kind: str, key: str) -> bytes | None:
    """The entry's data; None if it is not whole, and then it is gone."""
    with _open(name, os.O_RDONLY | os.O_NONBLOCK, folder) as fd:
        found = os.fstat(fd)
        check_private(found, name)
        data = _data(fd, found, kind, key)
        if data is not None:
            with contextlib.suppress(OSError):  # a read-only folder: no order of use
                os.utime(fd, ns=(time.time_ns(),) * 2)
            return data
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
    return None


def _data(fd: int, found: os.stat_result, kind: str, key: str) -> bytes | None:
    if not stat.S_ISREG(found.st_mode):
        return None
    with open(fd, "rb", closefd=False) as file:
        head = file.read(_HEAD.size)
        if len(head) != _HEAD.size:
            return None
        magic, digest, n = _HEAD.unpack(head)
        if magic != _MAGIC or n != found.st_size - _HEAD.size:
            return None
        data = file.read(n)
        return data if _digest(kind, key, data) == digest else None


def _write(folder: int, name: str, data: bytes) -> None:
    """Puts a whole file under its name, or nothing."""
    new = f".new-{os.getpid()}-{uuid.uuid4().hex}"
    try:
        with _open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, folder) as fd:
            with open(fd, "wb", closefd=False) as file:
                file.write(data)
            os.utime(fd, ns=(time.time_ns(),) * 2)
        os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new, dir_fd=folder)
        raise


@contextlib.contextmanager
def _open(name: str, flags: int, folder: int) -> Iterator[int]:
    fd = os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Holds the folder's lock: between threads, and between processes. A file system without locks has none."""
    with _open(LOCK, os.O_RDWR | os.O_CREAT, folder) as fd:
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as why:
                if why.errno not in (errno.EAGAIN, errno.EACCES, errno.EINTR):
                    break
                if time.monotonic() > until:
                    raise OSError(errno.EBUSY, "another process holds its lock") from why
                time.sleep(0.005)
        try:
            yield
        finally:
            # Said aloud, as a child forked meanwhile has the descriptor too, and would keep the lock.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)


def _listed(folder: int) -> list[_File]:
    files = []
    with os.scandir(folder) as found:
        for f in found:
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                s = f.stat(follow_symlinks=False)
                files.append(_File(f.name, s.st_size, s.st_mtime_ns))
    return files


def _remove(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


__all__ = ["KINDS", "Cache", "State", "Unsafe", "key_of"]
