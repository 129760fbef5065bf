"""The disk cache: it gives back what was kept or nothing, whatever happens to its folder, and never raises."""

from __future__ import annotations

import collections
import errno
import fcntl
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import recom_jax
from recom_jax import cache
from recom_jax.cache import Cache, key_of
from recom_jax.options import Options

pytestmark = pytest.mark.once
ROOT = pathlib.Path(__file__).parent.parent
HEAD = 48  # bytes of an entry that are not data
# A process of its own imports the module without the package: seconds each, and the cache needs none of it.
ALONE = """
import os, pathlib, signal, sys, time, types
sys.modules["recom_jax"] = package = types.ModuleType("recom_jax")
package.__path__ = ["recom_jax"]
from recom_jax.cache import Cache
"""


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_WARNED", set())


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "a" / "cache"


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(p for p in folder.iterdir() if cache._ENTRY.fullmatch(p.name))


def unfinished(folder: pathlib.Path) -> list[pathlib.Path]:
    return [p for p in folder.iterdir() if p.name.startswith(".new")]


def run(code: str, *args: Any, **keywords: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", ALONE + code, *map(str, args)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **keywords)  # fmt: skip


def output(process: subprocess.Popen[str], status: int = 0) -> str:
    out = process.communicate(timeout=120)[0]
    assert process.returncode == status, out
    return out


# ---- what was kept comes back --------------------------------------------------------------------------------------


def test_get_gives_what_was_put(folder: pathlib.Path) -> None:
    c = Cache(folder)
    assert c.get("ptx", "k") is None
    assert not folder.exists()  # a look-up makes nothing
    for kind in cache.KINDS:
        for data in (b"", b"x", bytes(range(256)) * 5000):
            assert c.put(kind, "k", data)
            assert Cache(folder).get(kind, "k") == data
    assert c.get("ptx", "other") is None
    assert len(entries(folder)) == len(cache.KINDS)
    assert not unfinished(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(p.stat().st_mode) for p in folder.iterdir()} == {0o600}
    state = c.state()
    many = len(cache.KINDS)
    assert (state.entries, state.size, state.problem) == (many, many * (HEAD + 1280000), "")


def test_kinds_are_apart(folder: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"text")
    assert c.get("cubin", "k") is None
    with pytest.raises(ValueError, match="no kind 'exe'"):
        c.put("exe", "k", b"")


def test_off_keeps_nothing() -> None:
    c = Cache(None)
    assert not c.put("ptx", "k", b"data")
    assert c.get("ptx", "k") is None
    assert c.state() == cache.State(None, 0, 0, c.limit, "")


PART = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(), st.booleans())
PARTS = st.lists(PART, max_size=4)


@given(PARTS, PARTS)
def test_keys_are_equal_only_if_their_parts_are(a: list[Any], b: list[Any]) -> None:
    def typed(parts: list[Any]) -> list[Any]:
        return [(type(p), p) for p in parts]

    assert (key_of(*a) == key_of(*b)) == (typed(a) == typed(b))


def test_keys() -> None:
    assert key_of("ab", "c") != key_of("a", "bc")
    assert key_of(b"True") != key_of(True)
    assert len(key_of()) == 64
    with pytest.raises(TypeError, match="not float"):
        key_of(1.5)  # type: ignore[arg-type]


# ---- limit ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "drop"]), st.integers(0, 5), st.integers(0, 60)), max_size=40),
       st.integers(HEAD, 400))  # fmt: skip
def test_the_least_recently_used_go(steps: list[tuple[str, int, int]], limit: int) -> None:
    """Against a model: an ordered dict that forgets from the front."""
    model: collections.OrderedDict[int, bytes] = collections.OrderedDict()
    with tempfile.TemporaryDirectory() as name:
        c = Cache(pathlib.Path(name), limit)
        for serial, (what, k, size) in enumerate(steps):
            if what == "put":
                data = bytes([serial % 256]) * size
                assert c.put("ptx", str(k), data) == (HEAD + size <= limit)
                if HEAD + size <= limit:
                    model[k] = data
                    model.move_to_end(k)
                while sum(HEAD + len(v) for v in model.values()) > limit:
                    model.popitem(last=False)
            elif what == "get":
                assert c.get("ptx", str(k)) == model.get(k)
                if k in model:
                    model.move_to_end(k)
            else:
                pathlib.Path(name, cache._name("ptx", str(k))).unlink(missing_ok=True)
                model.pop(k, None)
            assert c.state().size == sum(HEAD + len(v) for v in model.values()) <= limit


def test_only_its_own_files_are_removed(folder: pathlib.Path) -> None:
    """Somebody may name a folder that holds other things."""
    folder.mkdir(parents=True)
    (folder / "program-notes.txt").write_text("keep")
    (folder / ".new-idea").write_text("keep")
    old = folder / f".new-1-{'0' * 32}"
    old.write_text("left by a process that died")
    os.utime(old, (0, 0))
    c = Cache(folder, 2 * (HEAD + 10))
    for k in range(5):
        c.put("program", str(k), bytes(10))
    assert len(entries(folder)) == 2
    assert not old.exists()
    assert (folder / "program-notes.txt").exists() and (folder / ".new-idea").exists()


# ---- entries that are not whole ------------------------------------------------------------------------------------


def test_every_changed_byte_is_noticed(folder: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"some text")
    (path,) = entries(folder)
    whole = path.read_bytes()
    changed = [whole[:n] for n in range(len(whole))] + [whole + b"\0"]
    changed += [whole[:n] + bytes([whole[n] ^ 1]) + whole[n + 1 :] for n in range(len(whole))]
    for bad in changed:
        path.write_bytes(bad)
        assert c.get("ptx", "k") is None
        assert not path.exists()
    path.write_bytes(whole)
    path.chmod(0o600)
    assert c.get("ptx", "k") == b"some text"


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_any_bytes_as_an_entry(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as name:
        c = Cache(pathlib.Path(name))
        pathlib.Path(name, cache._name("cubin", "k")).write_bytes(data)
        assert c.get("cubin", "k") is None
        assert c.put("cubin", "k", data) and c.get("cubin", "k") == data


def test_an_entry_under_anothers_name(folder: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "a", b"text")
    (path,) = entries(folder)
    for kind, key in (("ptx", "b"), ("cubin", "a")):
        shutil.copy(path, folder / cache._name(kind, key))
        assert c.get(kind, key) is None
    assert c.get("ptx", "a") == b"text"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_something_else_under_an_entrys_name(folder: pathlib.Path, make: Any) -> None:
    c = Cache(folder)
    c.put("ptx", "a", b"text")
    make(folder / cache._name("ptx", "b"), 0o700)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            assert c.get("ptx", "b") is None
        for _ in range(5):  # a pipe is gone by now, a folder is not
            assert c.put("ptx", "b", b"more") == (make is os.mkfifo)
    assert len(caught) == (make is os.mkdir)
    assert not before or len(os.listdir("/proc/self/fd")) == before  # nothing stays open


# ---- who may have written it ---------------------------------------------------------------------------------------


def refuses(c: Cache, words: str) -> None:
    """Nothing is loaded, and it is said once."""
    with pytest.warns(RuntimeWarning, match=words) as caught:
        assert [c.get("ptx", "k") for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    assert "RECOM_CACHE_DIR" in str(caught[0].message)


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write(folder: pathlib.Path, mode: int) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"text")
    folder.chmod(mode)
    refuses(c, "other users may write")
    assert not c.put("ptx", "new", b"text")
    assert "other users may write" in c.state().problem
    folder.chmod(0o755)
    assert c.get("ptx", "k") == b"text"


def test_a_file_that_others_may_write(folder: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"text")
    entries(folder)[0].chmod(0o620)
    refuses(c, "other users may write")
    assert c.put("ptx", "k", b"again")  # a new file takes its place
    assert c.get("ptx", "k") == b"again"


def test_links_are_not_followed(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"text")
    (path,) = entries(folder)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refuses(c, "symbolic links")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_belongs_to_another_user(folder: pathlib.Path) -> None:
    c = Cache(folder)
    c.put("ptx", "k", b"text")
    os.chown(entries(folder)[0], 65534, -1)
    refuses(c, "belongs to user 65534")
    os.chown(entries(folder)[0], 0, -1)
    os.chown(folder, 65534, -1)
    assert c.get("ptx", "k") is None
    assert not c.put("ptx", "k", b"text")
    assert "belongs to user 65534" in c.state().problem


# ---- faults --------------------------------------------------------------------------------------------------------

CALLS = ["open", "fstat", "utime", "rename", "unlink", "scandir", "close", "mkdir"]
ERRORS = [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOENT]


@pytest.mark.parametrize("code", ERRORS, ids=lambda e: errno.errorcode[e])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("nth", range(3))
def test_a_failing_system_call(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, nth: int
) -> None:
    """Each call that the cache makes fails once: a miss, at most one warning, and the next time all is well."""
    c = Cache(folder, 10 * HEAD)
    for k in range(4):
        c.put("ptx", str(k), bytes(HEAD))
    real, calls = getattr(os, call), iter(range(1000))

    def failing(*args: Any, **keywords: Any) -> Any:
        if next(calls) == nth:
            if call == "close":
                real(*args)
            raise OSError(code, os.strerror(code))
        return real(*args, **keywords)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as m:
            m.setattr(os, call, failing)
            for k in range(3):
                assert c.put("ptx", f"new{k}", bytes(HEAD)) in (True, False)
                assert c.get("ptx", "3") in (None, bytes(HEAD))
                c.state()
    assert len(caught) <= 1, [str(w.message) for w in caught]
    assert c.put("ptx", "after", b"fine") and c.get("ptx", "after") == b"fine"
    if call != "unlink":
        assert not unfinished(folder)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def no_lock(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", no_lock)
    assert Cache(folder).put("ptx", "k", b"text")
    assert Cache(folder).get("ptx", "k") == b"text"


def test_a_folder_deleted_while_it_is_used(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    c = Cache(folder)
    for _ in range(3):
        assert c.put("ptx", "k", b"text") and c.get("ptx", "k") == b"text"
        shutil.rmtree(folder)
        assert c.get("ptx", "k") is None
    real = os.rename

    def pulled_away(*args: Any, **keywords: Any) -> None:
        shutil.rmtree(folder)
        real(*args, **keywords)

    monkeypatch.setattr(os, "rename", pulled_away)
    with pytest.warns(RuntimeWarning, match="No such file"):
        assert not c.put("ptx", "k", b"text")
    monkeypatch.undo()
    assert c.put("ptx", "k", b"text") and c.get("ptx", "k") == b"text"


def test_a_file_where_the_folder_should_be(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    c = Cache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning) as caught:
        assert not c.put("ptx", "k", b"") and c.get("ptx", "k") is None
    assert len(caught) == 1


def test_a_read_only_folder() -> None:
    """Entries in it are used; new ones cost one warning. As another user: root may write everywhere."""
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        c = Cache(folder)
        c.put("ptx", "k", b"text")
        if os.geteuid() == 0:
            for p in (folder, *folder.iterdir()):
                os.chown(p, 65534, 65534)
        folder.chmod(0o500)
        out = output(run(
            "if os.geteuid() == 0:\n    os.setgroups([])\n    os.setgid(65534)\n    os.setuid(65534)\n"
            "c = Cache(pathlib.Path(sys.argv[1]))\n"
            "print([c.get('ptx', 'k'), c.put('ptx', 'a', b''), c.put('ptx', 'b', b''), c.state().problem])",
            folder))  # fmt: skip
        assert "[b'text', False, False, 'the folder is read-only']" in out
        assert out.count("RuntimeWarning") == 1 and "Permission denied" in out
    finally:
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_a_full_disk(tmp_path: pathlib.Path) -> None:
    """A real one: a small file system that only the subprocess sees."""
    folder = tmp_path / "disk"
    folder.mkdir()
    script = f'mount -t tmpfs -o size=64k,mode=700 none {folder} || exit 77; exec "$@"'
    code = (
        "c = Cache(pathlib.Path(sys.argv[1]))\n"
        "print([c.put('ptx', str(k), bytes(20000)) for k in range(6)], [c.get('ptx', str(k)) is not None for k in"
        " range(6)], len([n for n in os.listdir(sys.argv[1]) if n.startswith('.new')]))"
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    command += [sys.executable, "-c", ALONE + code, str(folder)]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip("may not mount a file system here")
    kept = "[True, True, True, False, False, False]"
    assert done.stdout == f"{kept} {kept} 0\n", done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "No space left" in done.stderr


def test_a_quota_of_the_process(folder: pathlib.Path) -> None:
    out = output(run(
        "import resource\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\nc = Cache(pathlib.Path(sys.argv[1]))\n"
        "print(c.put('ptx', 'a', bytes(100)), c.put('ptx', 'b', bytes(5000)), c.get('ptx', 'b'))", folder))  # fmt: skip
    assert "True False None" in out and out.count("RuntimeWarning") == 1
    assert not unfinished(folder)


# ---- several at once -----------------------------------------------------------------------------------------------

WORKER = """
from recom_jax import cache
cache.LOCK_WAIT_S = 60  # on a busy machine too
c = Cache(pathlib.Path(sys.argv[1]), 12_000)
me, hits = int(sys.argv[2]), 0
for n in range(300):
    key = str((n * 7 + me) % 12)
    if n % 3 == 0:
        c.put("ptx", key, key.encode() * (500 + n))
    found = c.get("ptx", key)
    assert found is None or found == key.encode() * (len(found) // len(key)), "torn"
    hits += found is not None
print("hits", hits)
"""


def test_processes_at_once(folder: pathlib.Path) -> None:
    for out in [output(p) for p in [run(WORKER, folder, k) for k in range(4)]]:
        assert "Warning" not in out
        assert int(out.split()[-1]) > 50
    assert not unfinished(folder)
    assert Cache(folder).state().size <= 12_000


def test_threads_at_once(folder: pathlib.Path) -> None:
    c, wrong = Cache(folder, 4000), []

    def work(me: int) -> None:
        for n in range(100):
            key = str((n + me) % 6)
            c.put("cubin", key, key.encode() * 600)
            if c.get("cubin", key) not in (None, key.encode() * 600):
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert c.state().size <= 4000


def test_processes_killed_while_they_write(folder: pathlib.Path) -> None:
    """Whatever is there afterwards is whole, and the lock is free."""
    code = "c = Cache(pathlib.Path(sys.argv[1]))\nprint('go', flush=True)\nn = 0\n"
    code += "while True:\n    c.put('ptx', str(n % 5), str(n % 5).encode() * 300_000)\n    n += 1\n"
    for k in range(6):
        p = run(code, folder)
        assert p.stdout is not None and p.stdout.readline() == "go\n"
        time.sleep(0.02 + 0.007 * k)
        p.send_signal(signal.SIGKILL)
        p.communicate()
    c = Cache(folder)
    assert entries(folder)
    for n in range(5):
        assert c.get("ptx", str(n)) in (None, str(n).encode() * 300_000)
    start = time.monotonic()
    assert c.put("ptx", "after", b"fine")
    assert time.monotonic() - start < cache.LOCK_WAIT_S


@pytest.fixture
def stuck(folder: pathlib.Path) -> Iterator[None]:
    """A process that holds the lock and does not let go."""
    Cache(folder).put("ptx", "k", b"text")
    p = run("import fcntl\nf = open(sys.argv[1], 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\nprint('go', flush=True)\n"
            "time.sleep(1000)", folder / cache.LOCK)  # fmt: skip
    assert p.stdout is not None and p.stdout.readline() == "go\n"
    yield
    p.kill()
    p.communicate()


@pytest.mark.usefixtures("stuck")
def test_a_stuck_process(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "LOCK_WAIT_S", 0.1)
    c = Cache(folder)
    with pytest.warns(RuntimeWarning, match="another process holds its lock"):
        assert not c.put("ptx", "new", b"text")
    assert c.get("ptx", "k") == b"text"  # reading waits for nobody


def test_a_fork_while_the_lock_is_held(folder: pathlib.Path) -> None:
    """The child has the lock's descriptor as well; it must not keep the lock when the parent lets go."""
    out = output(run(
        "from recom_jax import cache\nc = Cache(pathlib.Path(sys.argv[1]))\nreal = os.rename\n"
        "def forks(*a, **k):\n    global child\n    child = os.fork()\n    if not child:\n        time.sleep(60)\n"
        "        os._exit(0)\n    real(*a, **k)\n"
        "os.rename = forks\nassert c.put('ptx', 'a', b'')\nos.rename = real\nstart = time.monotonic()\n"
        "print(c.put('ptx', 'b', b''), time.monotonic() - start < 0.5)\nos.kill(child, 9)", folder))  # fmt: skip
    assert out.splitlines()[-1] == "True True"


# ---- options -------------------------------------------------------------------------------------------------------


def test_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RECOM_CACHE_DIR", "RECOM_CACHE_BYTES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert Options().caches_in == pathlib.Path("/home/me/.cache/recom_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert Options().caches_in == pathlib.Path("/home/me/.cache/recom_jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Options().caches_in == pathlib.Path("/caches/recom_jax")
    monkeypatch.setenv("RECOM_CACHE_DIR", "/mine")
    assert Cache.of(Options()).folder == pathlib.Path("/mine")
    assert Cache.of(Options(cache_dir="/other", cache_bytes=5)).folder == pathlib.Path("/other")
    for off in ("0", "off", "OFF"):
        assert Cache.of(Options(cache_dir=off)).folder is None
        monkeypatch.setenv("RECOM_CACHE_DIR", off)
        assert Cache.of(Options()).folder is None


def test_how_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECOM_CACHE_BYTES", raising=False)
    assert Options().cache_limit == 1 << 28
    monkeypatch.setenv("RECOM_CACHE_BYTES", "1000")
    assert Cache.of(Options()).limit == 1000
    assert Cache.of(Options(cache_bytes=5)).limit == 5
    monkeypatch.setenv("RECOM_CACHE_BYTES", "1G")
    with pytest.raises(recom_jax.OptionError, match="RECOM_CACHE_BYTES"):
        Cache.of(Options())
    with pytest.raises(recom_jax.OptionError, match="cache_bytes"):
        Options(cache_bytes=-1)
