"""Code that a model wrote runs, keeps its variables and files, and gets nowhere else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tools.sandbox import (
    MIB,
    CellLimits,
    CellResult,
    Found,
    Moment,
    Sandbox,
    Tier,
    Workspace,
    Write,
    find_sandbox,
    ground,
    python_session,
)

LIMITS = CellLimits(
    cell_s=1.5,
    grace_s=0.5,
    memory_bytes=512 * MIB,
    data_bytes=4 * MIB,
    files=50,
    log_bytes=20_000,
    processes=24,
)
MOMENT = Moment(1e9, "s")
FILES = {"in.txt": ("hello", 5)}


class Box:
    """A sandbox with one container, whose outcomes are kept."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.sandbox = sandbox
        self.space = Workspace("c1", "owner", files=FILES)
        self.fetched = 0

    async def run(self, code: str, *, keep: bool = True, moment: Moment = MOMENT) -> CellResult:
        async def fetch(digest: str, write: Write) -> None:
            self.fetched += 1
            write(digest.encode())

        async def load() -> Workspace:
            return self.space

        outcome = await self.sandbox.run(code, self.space.key, self.space.owner, load, moment, fetch)
        if keep:
            state = outcome.result.state
            version = self.space.version + 1
            self.space = replace(self.space, version=version, state=state, cells=self.space.cells + 1)
            outcome.keep(version, {path: digest for path, (digest, _) in self.space.files.items()})
        else:
            outcome.let_go()
        return outcome.result


FOUND: dict[Tier, Found] = {}
"""What a trial of a tier has come to, so that there is one trial of each."""


@asynccontextmanager
async def box(tier: Tier, limits: CellLimits = LIMITS) -> AsyncIterator[Box]:
    if tier not in FOUND:
        found = await find_sandbox(tier, LIMITS)
        if found.sandbox is None and "cannot read" in found.told:  # a Python in the home folder of root
            found = await find_sandbox(tier, LIMITS, python=Path("/usr/bin/python3"))
        FOUND[tier] = found
    found = FOUND[tier]
    if found.sandbox is None:
        pytest.skip(f"this machine cannot have it: {found.told}")
    sandbox = Sandbox(tier, limits, found.sandbox.confinement)
    try:
        yield Box(sandbox)
    finally:
        await sandbox.close()


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock", "monty"])
async def test_variables_and_files_are_kept_from_cell_to_cell(tier: Tier) -> None:
    async with box(tier) as kept:
        first = await kept.run("x = 41\nprint(open('in.txt').read())\nx + 1")
        assert (first.logs, first.ok, first.changed) == ("hello\n42\n", True, ())
        second = await kept.run("open('/mnt/data/out.txt', 'w').write(str(x))\nNone")
        assert (second.logs, second.changed, second.removed) == ("", ("out.txt",), ())
        wrong = await kept.run("x = 5\n1 / 0")
        assert not wrong.ok and "ZeroDivisionError: division by zero" in wrong.logs
        last = await kept.run("from pathlib import Path\nPath('out.txt').unlink()\nx")
        assert (last.logs, last.removed, kept.fetched) == ("5\n", ("out.txt",), 1)
        bad = await kept.run("def f(:")
        assert not bad.ok and "SyntaxError" in bad.logs and "worker" not in bad.logs


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock", "monty"])
async def test_what_storage_does_not_have_is_undone(tier: Tier) -> None:
    async with box(tier) as kept:
        await kept.run("x = 1\nopen('a.txt', 'w').write('a')")
        kept.space = replace(kept.space, files={**FILES, "a.txt": ("a", 1)})
        await kept.run("x = 2\nopen('a.txt', 'w').write('b')\nopen('c.txt', 'w').write('c')", keep=False)
        after = await kept.run("import os\nprint(sorted(os.listdir('/mnt/data')), open('a.txt').read())")
        assert "['a.txt', 'in.txt'] a\n" in after.logs
        if tier == "monty":
            assert (await kept.run("x")).logs == "1\n"
        else:
            assert "the session has ended since the last cell" in after.logs


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock", "monty"])
async def test_files_that_a_client_changes_between_cells_leave_the_variables(tier: Tier) -> None:
    async with box(tier) as kept:
        await kept.run("x = 1\nopen('in.txt').read()")
        kept.space = replace(kept.space, version=7, files={"new.txt": ("new", 3)})
        after = await kept.run("import os\nprint(x, os.listdir('/mnt/data'), open('new.txt').read())")
        assert after.logs == "1 ['new.txt'] new\n"
        await kept.run("open('new.txt', 'a').write('!')\nNone")
        kept.space = replace(kept.space, version=20, files={"new.txt": ("newer", 5)})
        assert (await kept.run("print(open('new.txt').read(), x)")).logs == "newer 1\n"


async def test_a_link_in_the_place_of_a_clients_file_is_not_written_through(tmp_path: Path) -> None:
    async with box("bubblewrap") as kept:
        await kept.run("import os\nos.symlink('/tmp', 'sub')\nos.symlink('/etc/hostname', 'new.txt')")
        kept.space = replace(kept.space, version=7, files={"new.txt": ("new", 3)})
        after = await kept.run("print(os.path.islink('new.txt'), open('new.txt').read())")
        assert after.logs == "False new\n"


async def test_a_cell_of_monty_that_runs_again_comes_out_the_same() -> None:
    code = "import random, datetime\n[random.random(), datetime.datetime.now().isoformat(), x]"
    async with box("monty") as kept:
        assert kept.sandbox.exact
        await kept.run("x = [1, 2]")
        one = await kept.run(code, keep=False, moment=Moment(1e9, "a"))
        two = await kept.run(code, keep=False, moment=Moment(1e9, "a"))
        other = await kept.run(code, moment=Moment(2e9, "b"))
    assert one.logs == two.logs != other.logs and "2001-09-09T01:46:40" in one.logs


async def test_a_stopped_cell_of_monty_leaves_the_variables_of_the_one_before() -> None:
    async with box("monty", replace(LIMITS, cell_s=0.3, memory_bytes=32 * MIB)) as kept:
        await kept.run("x = 1")
        stopped = await kept.run("x = 2\nwhile True: pass")
        assert not stopped.ok and "time limit" in stopped.logs
        large = await kept.run("x = 3\ny = [0] * 10**8")
        assert not large.ok and "MemoryError" in large.logs
        flood = await kept.run("while True: print('a' * 1000)")
        assert not flood.ok and len(flood.logs) < LIMITS.log_bytes + 1000
        assert (await kept.run("x")).logs == "1\n"


ESCAPES = {
    "write outside": """
for path in ("/usr/x", "/x", "/dev/x", "/etc/x", "/proc/sys/kernel/hostname"):
    try:
        open(path, "w").write("x")
        print("OPEN", path)
    except OSError:
        pass
""",
    "read outside": """
import os
for path in ("/etc/shadow", "/etc/passwd", "/proc/1/environ", "/proc/1/root/etc/passwd", SECRET):
    try:
        print("OPEN", open(path).read())
    except OSError:
        pass
try:
    os.chmod(SECRET, 0o777)
    print("OPEN chmod")
except OSError:
    pass
""",
    "sockets": """
import socket
for family, kind in ((2, 1), (10, 1), (2, 3), (16, 3), (17, 3), (40, 1)):
    try:
        found = socket.socket(family, kind)
        found.settimeout(1)
        found.connect(("127.0.0.1" if family == 2 else "::1", PORT))
        print("OPEN", family, kind)
    except (OSError, TypeError):
        pass
for kind in (1, 2):
    try:
        a, b = socket.socketpair(socket.AF_UNIX, kind)
        a.sendto(b"x", UNIX)
        print("OPEN sendto")
    except OSError:
        pass
    try:
        socket.socket(socket.AF_UNIX, kind).connect(UNIX)
        print("OPEN connect")
    except OSError:
        pass
""",
    "system calls": """
import ctypes
libc = ctypes.CDLL(None)
calls = {"ptrace": (16, 1, 0, 0), "unshare": (0x10000000,), "setuid": (0,), "chroot": (b"/tmp",)}
for name, given in {**calls, "mount": (b"none", b"/tmp", b"tmpfs", 0, 0)}.items():
    if getattr(libc, name)(*given) == 0:
        print("OPEN", name)
""",
    "memory of nobody": """
import ctypes
libc = ctypes.CDLL(None)
calls = {"memfd_create": (b"x", 0), "shmget": (7, 4096, 0o1600), "msgget": (7, 0o1600)}
for name, given in calls.items():
    if getattr(libc, name)(*given) >= 0:
        print("OPEN", name)
""",
    "end the server": """
import os
for process in (1, os.getppid(), PID):
    try:
        os.kill(process, 9)
        print("OPEN", process)
    except OSError:
        pass
import resource
try:
    resource.prlimit(PID, resource.RLIMIT_NOFILE, (64, 64))
    print("OPEN limits")
except OSError:
    pass
""",
    "other processes": """
import os
try:
    found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
except OSError:
    found = []
if PID in found or len(found) > 3:
    print("OPEN", found)
""",
    "links and pipes": """
import os
os.symlink("/etc/passwd", "link")
os.symlink("/", "root")
os.mkfifo("pipe")
os.mkdir("shut", 0)
""",
}


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_there_is_no_way_out(tier: Tier, tmp_path: Path) -> None:
    secret, path = tmp_path / "secret", tmp_path / "unix"
    secret.write_text("secret")
    tmp_path.chmod(0o711)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix,
    ):
        unix.bind(str(path))
        path.chmod(0o777)
        told = f"PORT, PID, SECRET = {server.getsockname()[1]}, {os.getpid()}, {str(secret)!r}\n"
        told += f"UNIX = {str(path)!r}\n"
        async with box(tier) as kept:
            for name, code in ESCAPES.items():
                result = await kept.run(told + code)
                assert result.ok and "OPEN" not in result.logs, (name, result.logs)
                assert result.changed == (), name
            assert (await kept.run("6 * 7")).logs == "42\n"


FLOODS = {
    "processes": (
        """
import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    print("fewer than 30:", count < 30)
""",
        "fewer than 30: True",
    ),
    "memory": ("x = [0] * 10**9", "MemoryError"),
    "a large file": ("open('big', 'wb').write(b'a' * 10**7)", "4194304 can be kept"),
    "many files": ("for n in range(100): open(str(n), 'w').close()", "50 can be kept"),
    "deep folders": ("import os\nfor n in range(40): os.mkdir('d'); os.chdir('d')", "more than 16 deep"),
    "scratch": ("for n in range(40): open(f'/tmp/{n}', 'wb').write(b'a' * 4 * 10**6)", "No space left"),
    "files without a name": (
        "import os\nheld = []\nfor n in range(9):\n"
        "    held.append(open('x', 'wb', 0)); os.unlink('x'); held[-1].write(b'a' * MIB)",
        "No space left",
    ),
    "files that cannot be named": (
        "for n in range(9): open(f'\\x01{n}', 'wb').write(b'a' * MIB)",
        "No space left",
    ),
    "files in a folder that is shut": (
        "import os\nos.mkdir('d')\nheld = [open(f'd/{n}', 'wb', 0) for n in range(9)]\nos.chmod('d', 0)\n"
        "for file in held: file.write(b'a' * MIB)",
        "No space left",
    ),
    "entries": (
        "import os\nfor n in range(10**7): os.mknod(f'\\x01{n}')",
        "more than 20000 files",
    ),
    "memory of many processes": (
        "import os, time\nfor n in range(4):\n    if os.fork() == 0:\n"
        "        held = b'a' * (60 * MIB)\n        time.sleep(60)\ntime.sleep(60)",
        "may be taken",
    ),
    "output": ("while True: print('a' * 1000)", "and was stopped"),
    "time": ("while True: pass", "KeyboardInterrupt"),
    "time, and deaf": (
        "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass",
        "The session was ended",
    ),
    "its own end": ("import os\nos._exit(1)", "The session was ended"),
    "lies": (
        """
import os
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b'[]\\n' + b'x' * 200000)
    except OSError:
        pass
""",
        "",
    ),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_what_code_may_use_is_bounded(name: str) -> None:
    await _bounded("bubblewrap", name, *FLOODS[name])


async def test_code_is_interrupted_in_a_server_that_ignores_interrupts() -> None:
    """As one does that a script has started in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        await _bounded("bubblewrap", "time", *FLOODS["time"])
    finally:
        signal.signal(signal.SIGINT, before)


HELD = "import os, time\nheld = []\nfor n in range(9):\n    held.append(open('x', 'wb', 0)); os.unlink('x')\n"
ON_DISK = {
    "processes": FLOODS["processes"],
    "memory of many processes": FLOODS["memory of many processes"],
    "files without a name": (f"{HELD}    held[-1].write(b'a' * MIB)\ntime.sleep(60)", "The files took"),
    "time, and deaf": FLOODS["time, and deaf"],
}


@pytest.mark.parametrize("name", ON_DISK)
async def test_what_code_may_use_is_bounded_by_landlock(name: str) -> None:
    await _bounded("landlock", name, *ON_DISK[name])


async def _bounded(tier: Tier, name: str, code: str, told: str) -> None:
    limits = replace(LIMITS, scratch_bytes=MIB) if tier == "landlock" else LIMITS
    if name == "time":
        limits = replace(limits, grace_s=20)  # on a busy machine an interrupt takes its time to come through
    if name in ("entries", "memory of many processes"):
        limits = replace(limits, cell_s=20, memory_bytes=160 * MIB)
    begun = time.monotonic()
    async with box(tier, limits) as kept:
        result = await kept.run(f"MIB = 1 << 20\n{code}")
        assert told in result.logs and len(result.logs) < LIMITS.log_bytes + 2000
        after = await kept.run("print(open('in.txt').read())")
        assert after.logs.endswith("hello\n"), "the container is as good as new"
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_nothing_goes_on_between_cells(tier: Tier) -> None:
    """A thread of a cell is stopped for as long as no cell runs; a process is ended, however it was kept."""
    watch = """
import os, threading, time
os.kill = lambda *_: None
if os.fork() == 0:
    time.sleep(60)
gaps = []
def tick():
    last = time.monotonic()
    while True:
        time.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last += gaps[-1]
threading.Thread(target=tick, daemon=True).start()
"""
    async with box(tier) as kept:
        assert (await kept.run(watch)).ok
        await asyncio.sleep(0.5)
        after = await kept.run("time.sleep(0.05)\nprint(max(gaps) > 0.45, os.waitpid(-1, 0)[1])")
        assert after.logs == "True 9\n"


async def test_cells_of_monty_take_turns_and_end_with_whoever_asked() -> None:
    async with box("monty", replace(LIMITS, cell_s=60, per_owner=1)) as one:
        same, other = Box(one.sandbox), Box(one.sandbox)
        same.space, other.space = replace(one.space, key="c2"), replace(one.space, key="c3", owner="other")
        endless = asyncio.create_task(one.run("while True: pass"))
        monty = one.sandbox._monty
        assert monty is not None
        while not (turns := monty._turns.get(one.space.owner)) or not turns.locked():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(same.run("1 + 1"))
        assert (await other.run("2 + 2")).logs == "4\n"
        assert not waiting.done()
        endless.cancel()
        assert (await asyncio.wait_for(waiting, 20)).logs == "2\n"
        assert endless.cancelled()


async def test_the_end_of_a_session_is_not_waited_for_beyond_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(python_session, "CLOSE_S", 0.3)
    command = "sh -c 'sleep 300 & setsid sleep 8 & exec \"$@\"' sh"
    begun = time.monotonic()
    found = await find_sandbox("command", LIMITS, command=command)
    assert found.sandbox is not None, found.told
    assert (await Box(found.sandbox).run("6 * 7")).logs == "42\n"
    await found.sandbox.close()
    assert time.monotonic() - begun < 8


def test_folders_of_processes_that_have_ended_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a lock, because the number of a process says nothing in another namespace."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, dead = ground.Ground.claim(), ground.Ground.claim()
    (dead.root / "left").mkdir(mode=0)
    os.close(dead.held)
    new = ground.Ground.claim()
    assert {*tmp_path.iterdir()} == {living.root, new.root}
    living.leave()
    new.leave()
    assert not [*tmp_path.iterdir()]


async def test_plots_are_files_of_the_container() -> None:
    async with box("bubblewrap", replace(LIMITS, cell_s=60, memory_bytes=1024 * MIB)) as kept:
        if "matplotlib" not in kept.sandbox.about:
            pytest.skip("matplotlib is not installed")
        result = await kept.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        assert (result.images, result.changed) == (("image-1.png",), ("image-1.png",)), result.logs


async def test_sessions_end_where_an_owner_has_enough() -> None:
    async with box("bubblewrap", replace(LIMITS, per_owner=1)) as one:
        other = Box(one.sandbox)
        other.space = replace(other.space, key="c2")
        await one.run("x = 1")
        await other.run("x = 2")
        assert one.sandbox.num_live == 1
        assert "its variables are gone" in (await one.run("'x' in dir()")).logs
        assert (await one.run("import os\nopen('last', 'w').close()\nos._exit(1)")).changed == ("last",)
        assert one.sandbox.num_live == 0


@pytest.mark.parametrize("wanted", ["off", "command"])
async def test_no_sandbox_says_why(wanted: str) -> None:
    found = await find_sandbox(wanted, LIMITS)
    assert found.sandbox is None and "sandbox" in found.told


async def test_an_operators_own_command_is_taken() -> None:
    found = await find_sandbox("command", LIMITS, command="env ANTIPHON_FOLDER={data}")
    assert found.sandbox is not None, found.told
    try:
        code = "print(os.environ['ANTIPHON_FOLDER'] == os.getcwd(), os.getcwd(), os.listdir('/mnt/data'))"
        told = await Box(found.sandbox).run(f"import os\n{code}")
        assert told.logs == "True /mnt/data ['in.txt']\n"
    finally:
        await found.sandbox.close()


async def test_auto_passes_over_what_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: Creating new namespace failed' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = await find_sandbox("auto", LIMITS)
    assert found.sandbox is not None and found.sandbox.tier == "monty"
    assert "Creating new namespace failed" in found.passed_over[0]
    await found.sandbox.close()
