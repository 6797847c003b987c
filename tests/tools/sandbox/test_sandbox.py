"""Code that a model wrote runs, keeps its variables and files, and gets nowhere else."""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from tests.support.sandboxes import FILES, LIMITS, SHORT, Box, box
from tools.priority import NICENESS, OOM_SCORE, let_stand_back
from tools.sandbox import (
    MIB,
    Moment,
    SandboxError,
    Tier,
    find_sandbox,
    ground,
    monty_session,
    python_session,
    starts,
)
from tools.sandbox import processes as processes_module
from tools.sandbox import sandbox as sandbox_module
from tools.sandbox.folder import open_file, remove
from tools.sandbox.monty_session import LACKS
from tools.sandbox.processes import lives

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_code_that_writes_to_where_its_orders_come_from_does_no_harm(
    tier: Tier, new_loop: Callable[[], asyncio.AbstractEventLoop], caplog: pytest.LogCaptureFixture
) -> None:
    code = """
import os, stat
x = 41
for each in range(3, 30):
    try:
        if stat.S_ISSOCK(os.fstat(each).st_mode):
            print(os.write(each, b"evil"))
            break
    except OSError:
        pass
"""

    async def run() -> list[str]:
        async with box(tier) as kept:
            return [(await kept.run(each)).logs for each in (code, "x + 1")]

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(run()) == ["4\n", "42\n"]
    assert not caplog.records


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_what_is_written_through_a_mapping_in_memory_is_kept(tier: Tier) -> None:
    """Neither the time nor the size of a file tells of it, whether it is still mapped at the end or not."""
    async with box(tier) as kept:
        await kept.run("import mmap\nfile = open('a', 'w+b')\nfile.write(bytes(4096))\nfile.flush()")
        assert (await kept.run("m = mmap.mmap(file.fileno(), 0)\nm[:1] = b'1'")).changed == ("a",)
        assert (await kept.run("m[:1] = b'2'")).changed == ("a",)
        assert (await kept.run("m[:1] = b'3'\nm.close()")).changed == ("a",)
        assert (await kept.run("x = 1")).changed == ()
        code = "with mmap.mmap(file.fileno(), 0) as m: m[:1] = b'4'"
        assert (await kept.run(code)).changed == ("a",)
        assert (await kept.run("mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)[:1]")).changed == ()


async def test_of_more_mappings_than_are_read_any_file_may_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list says the path of each, so code decides how long it is."""
    async with box("bubblewrap") as kept:
        await kept.run("open('a', 'w').write('a')")
        assert (await kept.run("x = 1")).changed == ()
        monkeypatch.setattr(processes_module, "MAX_MAPS", 100)
        assert set((await kept.run("x = 2")).changed) == {"a", "in.txt"}


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_a_cell_that_is_cancelled_leaves_no_descriptor_and_none_that_is_watched(tier: Tier) -> None:
    async with box(tier) as kept:
        await kept.run("x = 1")
        [room] = kept.sandbox._rooms.values()
        assert room.session is not None
        output, before = room.session._output, len(os.listdir("/proc/self/fd"))
        code = "import subprocess, time\nsubprocess.Popen(['sleep', '9'])\nprint('begun')\ntime.sleep(9)"
        cell = asyncio.create_task(kept.run(code))
        async with asyncio.timeout(10):
            while b"begun" not in room.session._logs:
                await asyncio.sleep(0.01)
        cell.cancel()
        await asyncio.wait({cell})
        assert not asyncio.get_running_loop().remove_reader(output)
        assert len(os.listdir("/proc/self/fd")) < before


async def test_a_file_is_another_one_also_where_code_sets_its_time_back() -> None:
    async with box("bubblewrap") as kept:
        await kept.run("import os\nopen('a', 'w').write('1')\ntold = os.stat('a')")
        code = "open('a', 'w').write('2')\nos.utime('a', ns=(told.st_atime_ns, told.st_mtime_ns))"
        assert (await kept.run(code)).changed == ("a",)


def test_a_file_that_lets_nobody_in_is_read_where_it_is_the_servers_own(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("shut")
    (tmp_path / "to").symlink_to("a")
    (tmp_path / "a").chmod(0)
    user, folder = os.geteuid(), os.open(tmp_path, os.O_RDONLY)
    if user == 0:  # whom no mode keeps out
        os.chown(tmp_path / "a", 65534, 65534)
        os.chown(tmp_path, 65534, 65534)
        os.seteuid(65534)
    try:
        with pytest.raises(OSError):
            os.close(open_file(folder, "to"))
        with open(open_file(folder, "a")) as file:
            assert file.read() == "shut"
    finally:
        os.seteuid(user)
        os.close(folder)


NOTEBOOK = """
%matplotlib inline
text = '''
% a comment
!echo told
'''
!echo run
%pip install x
print(text)
"""


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_lines_of_notebooks_are_read_outside_of_texts_alone(tier: Tier) -> None:
    async with box(tier) as kept:
        result = await kept.run(NOTEBOOK)
        assert result.ok and result.logs.startswith("run\n[not run: %pip install x. There are no"), (
            result.logs
        )
        assert result.logs.endswith("\n% a comment\n!echo told\n\n")
        assert (await kept.run("import sys\nsys.exit('no input')")).logs == "no input\n"
        assert "SyntaxError" in (await kept.run("!ls\ndef f(:")).logs


BAD_NAMES = r"""
import os
os.mkdir("bad\n")
for name in ("a\tb", "good", b"\xff", "bad\n/x"):
    open(name, "w").close()
1 + 1
"""


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_files_whose_names_cannot_be_kept_are_told_once(tier: Tier) -> None:
    async with box(tier) as kept:
        first = await kept.run(BAD_NAMES)
        assert first.changed == ("good",) and first.ok
        told = r"[not kept, because of their names: 'a\tb', 'bad\n/x', '\udcff'. Give them names of"
        assert first.logs.startswith(f"2\n{told}"), first.logs
        assert (await kept.run("3")).logs == "3\n"
        again = await kept.run(r"for number in range(6): open('n' * 150 + f'\v{number}', 'w').close()")
        assert again.logs.startswith(f"[not kept, because of their names: '{'n' * 99}, '")
        assert " and 1 more. Give them" in again.logs and len(again.logs) < 1000


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
        told = "[the code was stopped: it may run for 0.3 s]\nThe variables are those of the cell before."
        assert not stopped.ok and stopped.logs == told
        large = await kept.run("x = 3\ny = [0] * 10**8")
        assert not large.ok and "MemoryError" in large.logs
        flood = await kept.run("while True: print('a' * 1000)")
        assert not flood.ok and len(flood.logs) < LIMITS.log_bytes + 1000
        assert (await kept.run("x")).logs == "1\n"


async def test_what_a_cell_of_monty_shows_is_bounded_and_costs_it_nothing() -> None:
    """A value is told as text by the interpreter, which may refuse to; the cell has been run all the same."""
    async with box("monty") as kept:
        for code in ("'a' * 3_000_000", "[1] * 100_000", "raise ValueError('e' * 3_000_000)"):
            shown = await kept.run(f"x = 7\n{code}")
            assert len(shown.logs) < LIMITS.log_bytes + 100, code
            assert shown.logs.endswith(f"[cut: these are the first {LIMITS.log_bytes} bytes]"), code
        assert (await kept.run("x")).logs == "7\n"
        state = kept.space.state
        assert state is not None and len(state) < 100_000, "a value that was shown is not stored"
        untold = await kept.run("import math\nopen('r.txt', 'w').write('r')\ny = 8\nmath.factorial(2000)")
        assert not untold.ok and "ValueError" in untold.logs and untold.changed == ("r.txt",)
        assert (await kept.run("class P: pass\nprint(y); P()")).logs.startswith("8\n<P object")
        assert (await kept.run("(1,\n 2); 'é', y")).logs == "('é', 8)\n"
        assert (await kept.run("def repr(x): return [[0] * 100_000] * 1000\n_ = 5\ny")).logs == "8\n"
        assert (await kept.run("_ + 1")).logs == "6\n", "it is the code's own name"
        said = await kept.run(
            "class Q:\n    def __repr__(self):\n        print('told')\n        return 'Q'\nQ()"
        )
        assert said.logs == "told\nQ\n"
        large = await kept.run("z = 'q' * 60_000_000\n1")
        assert not large.ok and large.logs.endswith("The variables are those of the cell before.")
        assert (await kept.run("y;")).logs == ""


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("1/0", "1/0\n    ~~~\n"),
        ("é = 'é'; 1/0 # é", "é = 'é'; 1/0 # é\n             ~~~\n"),
        ("1/0; 2", "1/0; 2\n    ~~~\n"),
        ("(1 +\n 1/0)", "1/0)\n    ~~~\n"),
        ("[1/0,\n2]", "[1/0,\n     ~~~\n"),
        ("(1 +\n '')", "(1 +\n"),
    ],
)
async def test_an_error_in_a_cell_of_monty_shows_the_line_as_it_was_written(code: str, shown: str) -> None:
    async with box("monty") as kept:
        told = (await kept.run(code)).logs
    assert f"in <module>\n    {shown}" in told and "__" not in told


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
for kind in (1, 2, 3):
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
    "calls by their numbers": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
page = ctypes.create_string_buffer(4096)
calls = {
    "bpf": (321 if x86 else 280, 0, page, 128),
    "clone into a namespace": (56 if x86 else 220, 0x10000011, 0, 0, 0, 0),
    "clone for the parent": (56 if x86 else 220, 0x8011, 0, 0, 0, 0),
    "clone3": (435, page, 88),
    "fsopen": (430, b"tmpfs", 0),
    "io_uring_setup": (425, 8, page),
    "kcmp": (312 if x86 else 272, os.getpid(), os.getpid(), 2, 0, 0),
    "keyctl": (250 if x86 else 219, 0, -3, 1),
    "open_tree": (428, -100, b"/", 1),
    "perf_event_open": (298 if x86 else 241, page, 0, -1, -1, 0),
    "process_vm_readv": (310 if x86 else 270, os.getpid(), page, 0, page, 0, 0),
    "seccomp": (317 if x86 else 277, 2, 0, page),
    "setns": (308 if x86 else 268, 0, 0),
    "shmat": (30 if x86 else 196, 0, 0, 0),
    "userfaultfd": (323 if x86 else 282, 1),
}
for name, given in calls.items():
    ctypes.set_errno(0)
    found = libc.syscall(*given)
    if found == 0 and name.startswith("clone"):
        os._exit(0)
    if found >= 0 or ctypes.get_errno() not in (1, 38):
        print("OPEN", name, found, ctypes.get_errno())
for option in (1, 4, 22, 36):
    if libc.prctl(option, 0, 0, 0, 0) == 0:
        print("OPEN prctl", option)
""",
    "signals by way of a descriptor": """
import fcntl, os
first, second = os.pipe()
for command in (fcntl.F_SETOWN, fcntl.F_SETSIG):
    try:
        fcntl.fcntl(first, command, 9)
        print("OPEN", command)
    except OSError:
        pass
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
async def test_there_is_no_way_out(tier: Tier) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unix,
    ):
        secret, path = Path(folder, "secret"), Path(folder, "unix")
        secret.write_text("secret")
        unix.bind(str(path))
        Path(folder).chmod(0o711)  # no user is kept from them by anything but the sandbox
        secret.chmod(0o666)
        path.chmod(0o777)
        told = f"PORT, PID, SECRET = {server.getsockname()[1]}, {os.getpid()}, {str(secret)!r}\n"
        told += f"UNIX = {str(path)!r}\n"
        async with box(tier) as kept:
            for name, code in ESCAPES.items():
                result = await kept.run(told + code)
                assert result.ok and "OPEN" not in result.logs, (name, result.logs)
                assert result.changed == (), name
            assert (await kept.run("6 * 7")).logs == "42\n"
        unix.setblocking(False)
        with pytest.raises(BlockingIOError):
            unix.recv(1)


MONTY_ESCAPES = {
    "read outside": """
for path in (SECRET, "/etc/passwd", "/proc/self/environ", "/mnt/data/../../etc/passwd", "../../etc/passwd"):
    try:
        print("OPEN", open(path).read())
    except Exception:
        pass
""",
    "write outside": """
from pathlib import Path
for path in (SECRET, "/tmp/x", "/mnt/x", "../x", "/mnt/data/../x"):
    try:
        Path(path).write_text("x")
        print("OPEN", path)
    except Exception:
        pass
""",
    "list outside": """
import os
for path in ("/", "/etc", "/mnt", "..", "/mnt/data/.."):
    try:
        print("OPEN", path, os.listdir(path))
    except Exception:
        pass
""",
    "move outside": """
import os
open("here", "w").write("x")
for first, second in (("here", SECRET), ("here", "/tmp/x"), (SECRET, "there")):
    try:
        os.rename(first, second)
        print("OPEN", first, second)
    except Exception:
        pass
os.remove("here")
""",
    "the environment": """
import os
try:
    print("OPEN", os.environ)
except Exception:
    pass
""",
    **{f"the module {name}": f"import {name}\nprint(TOLD)" for name in ("ctypes", "socket", "subprocess")},
    "links": "import os\nos.symlink(SECRET, 'link')\nprint(TOLD)",
    "a program": "import os\nos.system('true')\nprint(TOLD)",
    "inner objects": "print(TOLD, ().__class__.__base__.__subclasses__())",
    "imports by name": "print(TOLD, __import__('os'))",
}


async def test_there_is_no_way_out_of_monty(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with box("monty") as kept:
        for name, code in MONTY_ESCAPES.items():
            result = await kept.run(f"SECRET, TOLD = {str(secret)!r}, 'OPEN'\n{code}")
            assert "OPEN" not in result.logs and result.changed == (), (name, result.logs)
    assert secret.read_text() == "secret" and [*tmp_path.iterdir()] == [secret]


@pytest.mark.parametrize("make", ["os.mkdir(str(n))", "open(str(n), 'w').close()"])
async def test_a_cell_of_monty_that_makes_files_without_an_end_is_stopped(
    make: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.sandbox.folder.MAX_ENTRIES", 2000)
    async with box("monty") as kept:
        await kept.run("x = 1")
        begun = time.monotonic()
        flood = await kept.run(f"import os\nx = 2\nfor n in range(10**7): {make}")
        assert "the code was stopped: There are more than 2000 files" in flood.logs and not flood.ok
        assert time.monotonic() - begun < 30
        assert (await kept.run("print(x, open('in.txt').read())")).logs == "1 hello\n"


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
    "entries that take no room": (
        "import os\nfor n in range(10**7):\n"
        "    for folder in ('/tmp', '/dev/shm'): os.symlink('a' * 127, f'{folder}/{n}')",
        "more than 20000 files",
    ),
    "memory of many processes": (
        "import os, time\nfor n in range(4):\n    if os.fork() == 0:\n"
        "        held = b'a' * (60 * MIB)\n        time.sleep(60)\ntime.sleep(60)",
        "may be taken",
    ),
    "memory of many processes whose first threads have ended": (
        """
import ctypes, os, threading, time
def hold():
    global held
    held = b'a' * (60 * MIB)
    time.sleep(60)
for n in range(4):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
time.sleep(60)
""",
        "may be taken",
    ),
    "descriptors of many processes": (
        "import os, time\nfor n in range(12):\n    if os.fork() == 0:\n"
        "        held = [os.dup(1) for n in range(200)]\n        time.sleep(60)\ntime.sleep(60)",
        "1024 may be held",
    ),
    "descriptors": (
        "import os\nheld = []\ntry:\n    while True: held.append(os.dup(1))\n"
        "except OSError as fault: print(fault)\nfor each in held: os.close(each)",
        "Too many open files",
    ),
    "signals that wait": (
        """
import signal, ctypes
libc, count = ctypes.CDLL(None), 0
timer = ctypes.c_void_p()
while count < 1000 and libc.timer_create(0, None, ctypes.byref(timer)) == 0:
    count += 1
print("timers:", count <= 128)
""",
        "timers: True",
    ),
    "output": ("while True: print('a' * 1000)", "and was stopped"),
    "time": ("while True: pass", "KeyboardInterrupt"),
    "time, and deaf": (
        "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass",
        "The session was ended",
    ),
    "its own end": ("import os\nos._exit(1)", "The session was ended"),
    "the ABI of 32 bits": (
        "import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')  # mov eax, getpid; int 0x80; ret\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(page))\nprint(ctypes.CFUNCTYPE(int)(at)())",
        "The session was ended",
    ),
    "the ABI x32": (
        "import ctypes\nprint(ctypes.CDLL(None).syscall(0x40000000 + 39))",
        "The session was ended",
    ),
    "lies without an end": (
        """
import os
for descriptor in range(3, 20):
    try:
        os.write(descriptor, b'[' * 60000 + b'\\n')
    except OSError:
        pass
""",
        "The session was ended",
    ),
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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FLOODS)
async def test_what_code_may_use_is_bounded(name: str) -> None:
    await _bounded("bubblewrap", name, *FLOODS[name])


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_what_a_cell_has_taken_is_looked_at_when_it_has_ended(
    tier: Tier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else many short ones could take what one may not."""
    monkeypatch.setattr(sandbox_module, "WATCH_S", 60)
    monkeypatch.setattr(python_session, "MAX_ENTRIES", 2000)
    async with box(tier) as kept:
        code = "import os, tempfile\npath, x = tempfile.mkdtemp(), 1\n"
        code += "for n in range(1500): os.symlink('a' * 127, f'{path}/{n}')"
        assert (await kept.run(code)).ok
        more = await kept.run(code)
        assert more.lost and more.logs.startswith("[There are more than 2000 files and folders.]"), more.logs
        assert (await kept.run("'x' in dir()")).logs.endswith("False\n")


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_the_watch_looks_also_when_all_other_threads_of_the_server_are_busy(tier: Tier) -> None:
    """What else the server does on threads is read or written for as long as others like."""
    limits = replace(LIMITS, memory_bytes=160 * MIB)
    gate, loop = threading.Event(), asyncio.get_running_loop()
    async with box(tier, limits) as kept:
        await kept.run("MIB = 1 << 20")
        code, _ = FLOODS["memory of many processes"]
        running = asyncio.create_task(kept.run(f"print('begun')\n{code}"))
        [room] = kept.sandbox._rooms.values()
        assert room.session is not None and room.session._process is not None
        process = room.session._process
        while b"begun" not in room.session._logs:
            await asyncio.sleep(0.01)
        try:
            blocked = [loop.run_in_executor(None, gate.wait) for _ in range(64)]
            await asyncio.wait_for(process.wait(), 20)
        finally:
            gate.set()
        await asyncio.gather(*blocked)
        assert "may be taken" in (await running).logs


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock", "monty"])
async def test_a_container_with_more_files_than_it_can_have_says_so(tier: Tier) -> None:
    """A client and a cell may have brought some at the same time."""
    async with box(tier) as kept:
        kept.space = replace(kept.space, files={"a": ("a", 3 * MIB), "b": ("b", 3 * MIB)})
        with pytest.raises(SandboxError, match="2 files of 6291456 bytes, and can have 50 files of 4194304"):
            await kept.run("1")
        kept.space = replace(kept.space, files={"a": ("a", 1)})
        assert (await kept.run("print(open('a').read())")).logs == "a\n"


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
    **{name: flood for name, flood in FLOODS.items() if "of many processes" in name},
    "signals that wait": FLOODS["signals that wait"],
    "files without a name": (f"{HELD}    held[-1].write(b'a' * MIB)\ntime.sleep(60)", "The files took"),
    **{name: FLOODS[name] for name in ("time, and deaf", "the ABI of 32 bits", "the ABI x32")},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ON_DISK)
async def test_what_code_may_use_is_bounded_by_landlock(name: str) -> None:
    await _bounded("landlock", name, *ON_DISK[name])


async def _bounded(tier: Tier, name: str, code: str, told: str) -> None:
    if "ABI" in name and platform.machine() != "x86_64":
        pytest.skip("this machine has one ABI")
    limits = SHORT if name.startswith("time") else LIMITS
    if tier == "landlock":
        limits = replace(limits, scratch_bytes=MIB)
    if name == "time":
        limits = replace(limits, grace_s=20)  # on a busy machine an interrupt takes its time to come through
    if "entries" in name or "of many processes" in name:
        limits = replace(limits, memory_bytes=160 * MIB)
    begun = time.monotonic()
    async with box(tier, limits) as kept:
        result = await kept.run(f"MIB = 1 << 20\n{code}")
        assert told in result.logs and len(result.logs) < LIMITS.log_bytes + 2000
        after = await kept.run("print(open('in.txt').read())")
        assert after.logs.endswith("hello\n"), "the container is as good as new"
    assert time.monotonic() - begun < 30


async def test_a_session_outlives_a_machine_on_which_processes_take_long_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have to get a processor for it, of which they are left little."""
    looks = 0

    def late(processes: Iterable[int]) -> bool:
        nonlocal looks
        looks += 1
        return looks % 60 == 0 and processes_module.stop(processes)

    monkeypatch.setattr(python_session, "stop", late)
    async with box("bubblewrap") as kept:
        await kept.run("x = 1")
        assert (await kept.run("x")).logs == "1\n"
    assert looks >= 120


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_nothing_goes_on_between_cells(tier: Tier) -> None:
    """A thread of a cell is stopped for as long as no cell runs; a process is ended, however it was kept."""
    watch = """
import ctypes, os, threading, time
os.kill = lambda *_: None
if os.fork() == 0:
    time.sleep(60)
if os.fork() == 0:  # it goes on when its first thread has ended
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)
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
        after = await kept.run(
            "time.sleep(0.05)\nprint(max(gaps) > 0.45, [os.waitpid(-1, 0)[1] for _ in '12'])"
        )
        assert after.logs == "True [9, 9]\n"


SERVER = """
import asyncio, sys
from tests.support.sandboxes import box

async def main():
    async with box(sys.argv[1]) as kept:
        first = await kept.run("import os")
        running = asyncio.create_task(kept.run(sys.argv[2]))
        [room] = kept.sandbox._rooms.values()
        while b"begun" not in room.session._logs:
            await asyncio.sleep(0.01)
        print(*room.session._processes(), flush=True)
        await running

asyncio.run(main())
"""


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
def test_all_that_code_has_started_ends_with_a_server_that_is_killed(tier: Tier) -> None:
    if tier == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    code = (
        "import time\nfor n in range(3):\n    if os.fork() == 0: time.sleep(600)\n"
        "print('begun')\ntime.sleep(60)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, tier, code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdout is not None
        told = [int(process) for process in server.stdout.readline().split()]
        server.kill()
    assert len(told) > 4, f"{told} were at work, and the server ended with {server.returncode}"
    deadline = time.monotonic() + 60
    while left := [process for process in told if lives(process)]:
        if time.monotonic() > deadline:
            seen = {process: Path(f"/proc/{process}/status").read_text()[:300] for process in left}
            pytest.fail(f"{left} of {told} outlive the server: {seen}")
        time.sleep(0.01)


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_containers_do_not_reach_each_other(tier: Tier) -> None:
    async with box(tier) as one:
        other = Box(one.sandbox)
        other.space = replace(other.space, key="c2")
        assert (await one.run("open('mine', 'w').write('x')\nx = 1")).ok
        [room] = one.sandbox._rooms.values()
        assert room.session is not None
        processes = room.session._processes()
        told = f"PROCESSES, FOLDER = {processes}, {str(room.folder)!r}\n"
        reached = await other.run(
            told
            + """
import os, resource
for process in (*PROCESSES, -1):
    for attempt in (
        lambda: process > 0 and os.kill(process, 0),
        lambda: os.killpg(process, 9),
        lambda: os.listdir(f"/proc/{process}/fd"),
        lambda: open(f"/proc/{process}/mem"),
        lambda: open(f"/proc/{process}/environ"),
        lambda: resource.prlimit(process, resource.RLIMIT_CPU, (1, 1)),
        lambda: os.sched_setaffinity(process, {0}),
    ):
        try:
            if attempt() is None or attempt():
                print("OPEN", process)
        except OSError:
            pass
for path in (FOLDER, f"{FOLDER}/mine", f"/proc/{PROCESSES[-1]}/cwd/mine"):
    try:
        print("OPEN", os.open(path, os.O_RDONLY))
    except OSError:
        pass
"""
        )
        assert "OPEN" not in reached.logs, reached.logs
        assert (await one.run("x")).logs == "1\n"


async def test_cells_of_monty_take_turns_and_end_with_whoever_asked() -> None:
    async with box("monty", replace(LIMITS, per_owner=1)) as one:
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


def test_a_folder_that_was_cleaned_is_its_processs_own_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by systemd-tmpfiles, which takes what nobody has touched for days, and knows of locks on folders."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living, unlocked = ground.Ground.claim(), Path(tempfile.mkdtemp(prefix=ground.PREFIX))
    for left in living.root.iterdir():
        left.unlink()
    os.utime(living.root, (0, 0))
    looker = os.open(living.root, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(looker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(looker)
    new = ground.Ground.claim()
    assert {*tmp_path.iterdir()} == {living.root, new.root, unlocked}, "one may be about to be locked"
    os.utime(unlocked, (0, 0))
    last = ground.Ground.claim()
    assert {*tmp_path.iterdir()} == {living.root, new.root, last.root}
    for each in (living, new, last):
        each.leave()


@pytest.mark.parametrize("tier", ["landlock", "monty"])
async def test_containers_outlive_the_removal_of_their_folders(tier: Tier) -> None:
    async with box(tier) as kept:
        await kept.run("x = 41")
        held = kept.sandbox._ground
        assert held is not None
        remove(held.root)
        again = await kept.run("print(open('in.txt').read())")
        assert again.ok and again.logs.endswith("hello\n"), again.logs
        other = Box(kept.sandbox)
        other.space = replace(other.space, key="c2")
        remove(held.root)
        assert (await other.run("open('a', 'w').write('a')\nNone")).changed == ("a",)
        root = held.root
    assert not root.exists()


@pytest.mark.long
async def test_plots_are_files_of_the_container() -> None:
    async with box("bubblewrap", replace(LIMITS, memory_bytes=1024 * MIB)) as kept:
        if "matplotlib" not in kept.sandbox.about:
            pytest.skip("matplotlib is not installed")
        result = await kept.run("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()")
        assert (result.images, result.changed) == (("image-1.png",), ("image-1.png",)), result.logs


MANY_IMAGES = """
class Picture:
    def _repr_png_(self):
        return b"png"
for _ in range(LIMIT):
    display(Picture())
"""


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_images_beyond_the_limit_are_told(tier: Tier) -> None:
    async with box(tier) as kept:
        all_shown = await kept.run(MANY_IMAGES.replace("LIMIT", "8"))
        assert (len(all_shown.images), all_shown.logs) == (8, "")
        more = await kept.run(MANY_IMAGES.replace("LIMIT", "10") + "print('end')")
        assert len(more.images) == len(more.changed) == 8 and more.ok
        assert more.logs.startswith("end\n[images that are not shown, and not kept: 2. A cell shows 8;")
        assert (await kept.run("print('next')")).logs == "next\n"


@pytest.mark.long
async def test_figures_beyond_the_limit_are_told() -> None:
    async with box("bubblewrap", replace(LIMITS, memory_bytes=1024 * MIB)) as kept:
        if "matplotlib" not in kept.sandbox.about:
            pytest.skip("matplotlib is not installed")
        result = await kept.run("import matplotlib.pyplot as plt\nfor _ in range(10): plt.figure()")
        assert len(result.images) == 8 and "not kept: 2. A cell shows 8;" in result.logs, result.logs


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_code_leaves_the_processor_to_the_server(tier: Tier) -> None:
    async with box(tier) as kept:
        assert (await kept.run("import os\nos.getpriority(0, 0)")).logs == f"{os.nice(0) + NICENESS}\n"
        if tier == "bubblewrap":
            assert (await kept.run("open('/proc/self/oom_score_adj').read()")).logs == f"'{OOM_SCORE}\\n'\n"
        if tier == "bubblewrap" and Path("/proc/self/autogroup").exists():
            group = (await kept.run("open('/proc/self/autogroup').read()")).logs
            assert f"nice {NICENESS}" in group, group
        for name in ("self/oom_score_adj", "self/autogroup", "1/mem"):
            refused = await kept.run(f"open('/proc/{name}', 'r+b')")
            assert not refused.ok and "Error" in refused.logs, name


async def test_a_cell_of_monty_leaves_the_processor_to_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[int]] = []

    def look(process: int) -> None:
        let_stand_back(process)
        threads = os.listdir(f"/proc/{process}/task")
        seen.append({os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in threads})

    monkeypatch.setattr(monty_session, "let_stand_back", look)
    async with box("monty") as kept:
        assert (await kept.run("1 + 1")).logs == "2\n"
    assert seen == [{max(os.nice(0), NICENESS)}]


WRITES = """
import os
with open("all", "w") as file:
    while True:
        file.write("a" * 65536)
        file.flush()
        file.seek(0)
"""


async def test_code_writes_to_a_disk_at_a_bounded_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_session, "WRITES_A_S", 100_000)
    stopped: list[int] = []

    def stop(processes: list[int]) -> bool:
        stopped.extend(processes)
        return processes_module.stop(processes)

    monkeypatch.setattr(python_session, "stop", stop)
    async with box("landlock", SHORT) as kept:
        await kept.run("x = 1")
        del stopped[:]  # all that a cell has started is stopped at its end
        running = asyncio.ensure_future(kept.run(WRITES))
        while not stopped:
            assert not running.done()
            await asyncio.sleep(0.01)
        ended = await running
        assert "it may run for 1.5 s" in ended.logs and "variables are gone" not in ended.logs
        assert (await kept.run("x")).logs == "1\n", "it could be interrupted although it was stopped"


async def test_an_owner_whose_containers_are_built_again_and_again_waits_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []

    async def sleep(delay: float) -> None:
        waits.append(round(delay, 1))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    turns = starts.Starts()
    for _ in range(starts.AT_ONCE + 2):
        await turns.turn("ann")
    assert waits[: starts.AT_ONCE] == [0] * starts.AT_ONCE and waits[starts.AT_ONCE :] == [0.2, 0.4]
    await turns.turn("bob")
    assert waits[-1] == 0
    turns.tidy()
    await turns.turn("ann")
    assert waits[-1] == 0.6, "what has been used is not forgotten"


async def test_cells_wait_where_all_sessions_of_their_owner_are_at_work() -> None:
    async with box("bubblewrap") as one:
        boxes = [Box(one.sandbox) for _ in range(5)]
        for number, each in enumerate(boxes):
            each.space = replace(each.space, key=f"c{number}")
        code = "import time\ntime.sleep(0.3)\n'done'"
        results = await asyncio.gather(*(each.run(code) for each in boxes))
        assert [result.logs for result in results] == ["'done'\n"] * 5
        assert one.sandbox.num_live == one.sandbox.limits.per_owner == 2


async def test_a_cell_that_waits_too_long_for_a_session_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with box("bubblewrap", replace(LIMITS, per_owner=1)) as one:
        other = Box(one.sandbox)
        other.space = replace(other.space, key="c2")
        busy = asyncio.create_task(one.run("import time\ntime.sleep(1)"))
        while one.sandbox.num_live == 0:
            await asyncio.sleep(0.01)
        with monkeypatch.context() as patched:
            patched.setattr(sandbox_module, "TURN_S", 0.05)
            with pytest.raises(SandboxError, match="too many sessions run code just now"):
                await other.run("1")
        assert (await busy).ok and (await other.run("1")).logs == "1\n"


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


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_a_sandbox_in_which_code_could_read_what_is_secret_is_refused(
    tier: Tier, tmp_path: Path
) -> None:
    python = Path("/usr/bin/python3")
    found = await find_sandbox(tier, LIMITS, python=python, hidden=[tmp_path, Path("/usr/lib/antiphon")])
    assert found.sandbox is None
    assert "code could read /usr/lib/antiphon, which lies in /usr" in found.told
    (tmp_path / "link").symlink_to("/usr/share")
    found = await find_sandbox(tier, LIMITS, python=python, hidden=[tmp_path / "link" / "data"])
    assert found.sandbox is None


@pytest.mark.parametrize(("version", "has"), [(0, "no Landlock"), (3, "Landlock 3"), (5, "Landlock 5")])
async def test_an_older_landlock_is_refused_and_told(
    monkeypatch: pytest.MonkeyPatch, version: int, has: str
) -> None:
    monkeypatch.setattr("tools.sandbox.confinement.landlock_version", lambda: version)
    found = await find_sandbox("landlock", LIMITS, python=Path("/usr/bin/python3"))
    assert found.sandbox is None
    assert found.told == f"landlock: the kernel has {has}, and version 6 (Linux 6.12) is needed"


@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_a_machine_whose_system_calls_are_not_known_is_refused(
    monkeypatch: pytest.MonkeyPatch, tier: Tier
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    found = await find_sandbox(tier, LIMITS, python=Path("/usr/bin/python3"))
    assert found.sandbox is None and "system calls of this machine" in found.told


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


async def test_what_a_model_is_told_of_monty_is_so() -> None:
    said = LACKS.partition("little besides ")[2]
    there, missing = (re.findall(r"[a-z0-9]+", part) for part in said.split(";"))
    there = [name for name in there if name != "and"]
    missing = [name for name in missing if name in sys.stdlib_module_names]
    assert {"csv", "json"} <= {*there} and {"io", "statistics"} <= {*missing}
    async with box("monty") as kept:
        for name in there:
            assert (await kept.run(f"import {name}")).ok, name
        for name in missing:
            assert not (await kept.run(f"import {name}")).ok, name


@pytest.mark.parametrize("tier", ["monty", "landlock"])
async def test_a_flood_of_output_is_told_as_one(tier: Tier) -> None:
    async with box(tier, SHORT) as kept:
        flood = await kept.run("while True: print('a' * 1000)")
        note = f"[cut: the code printed more than {LIMITS.log_bytes} bytes, and was stopped]"
        assert not flood.ok and note in flood.logs and "memory" not in flood.logs


@pytest.mark.skipif(shutil.which("fc-list") is None, reason="fontconfig is not installed")
@pytest.mark.parametrize("tier", ["bubblewrap", "landlock"])
async def test_the_first_look_at_fonts_complains_of_nothing(tier: Tier) -> None:
    async with box(tier) as kept:
        look = "import subprocess\nprint(subprocess.run(['fc-list'], capture_output=True, text=True).stderr)"
        assert (await kept.run(look)).logs.strip() == ""
