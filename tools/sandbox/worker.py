"""The program that runs cells of Python, one after the other, inside of a sandbox.

Its text is handed to a Python of the operator's, which may be older or newer than the server's and need have
no packages; so it imports nothing of ours. The first argument is a JSON object: limits to put on itself, and
the folder of the files. Standard input brings one JSON object a line: a cell, or an order to interrupt it.
Standard output takes one line for each cell that has ended; what cells print goes to standard error.
"""

from __future__ import annotations

import ast
import inspect
import json
import linecache
import os
import queue
import re
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from types import CodeType
from typing import Any

DATA = "/mnt/data"
MAX_MAPPED = 1000
"""Files that a cell's answer names which were mapped into memory."""
_ANYHOW, _TO_WRITE = 0, 2
"""What `mmap` is asked for where no access is named, and where it is `ACCESS_WRITE`."""


def confine(limits: dict[str, Any]) -> None:
    """Limits that hold for this process and all that it starts; the user comes late, because none may raise
    them, and what the kernel is to refuse comes last."""
    # Where `/proc` cannot be written, whoever has started this process sees to both.
    priority = _module(limits["priority"])
    priority["end_first"]()
    given = limits["rlimits"]
    if limits.get("shared") and not limits.get("uid"):  # what the user runs besides counts, too
        given["RLIMIT_NPROC"] += _tasks_of(os.getuid())
    for name, most in given.items():
        kind = getattr(resource, name)
        there = resource.getrlimit(kind)[1]  # which only root may raise
        most = most if there == resource.RLIM_INFINITY else min(most, there)
        resource.setrlimit(kind, (most, most))
    priority["stand_back"]()
    os.umask(0o077)
    needed = [os.path.dirname(os.__file__), *filter(os.path.isdir, sys.path)]
    if limits.get("uid"):
        os.setgroups([])
        os.setresgid(*[limits["uid"]] * 3)
        os.setresuid(*[limits["uid"]] * 3)
    for folder in needed:  # the packages may lie elsewhere than the rest
        if not os.access(folder, os.R_OK | os.X_OK):
            sys.exit(f"the user {os.getuid()}, whom code runs as, cannot read {folder}")
    if restrictions := limits.get("restrictions"):
        _restrict(restrictions)


def _module(text: str) -> dict[str, Any]:
    """What a module of the server's defines, of which only the text is here."""
    known: dict[str, Any] = {"__name__": "handed"}
    exec(text, known)
    return known


def _restrict(told: dict[str, Any]) -> None:
    """Landlock and seccomp, by the text of the module that knows them. Goes on in a child: its parent, in a
    domain of Landlock around the child's, stays behind to end it with all that it has started."""
    import ctypes

    known = _module(told["module"])

    def restrict() -> bool:
        return bool(known["only_these_files"](told["readable"], told["writable"], programs=True))

    done = known["give_up_privileges"]() and restrict()
    worker = os.fork() if done else 0
    if worker == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with the parent
        done = done and restrict()  # from here no signal reaches the parent
    if not (done and known["filter_system_calls"](bytes.fromhex(told["filter"]))):
        sys.exit("the kernel does not confine processes by Landlock and seccomp")
    if worker:
        _stay_behind(worker)


def _stay_behind(worker: int) -> None:
    """Wait until the worker has ended, or the server, which has the other end of standard input; then end all
    that is in the same domain of Landlock, or within: no signal from here goes beyond. Never returns."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    ends = select.poll()
    ends.register(0, 0)  # that its other end is closed is told in any case
    ends.register(os.pidfd_open(worker))
    ends.poll()
    with suppress(OSError):
        os.kill(-1, signal.SIGKILL)
    os._exit(0)


def _tasks_of(user: int) -> int:
    count = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def show_folders(channel: int, paths: list[str]) -> None:
    """Hand folders, as they are in this namespace of mounts, to whoever has the other end."""
    with socket.socket(fileno=channel) as there:
        folders = [os.open(path, os.O_RDONLY | os.O_DIRECTORY) for path in paths]
        socket.send_fds(there, [b"f"], folders)
        for folder in folders:
            os.close(folder)


class Cells:
    """Runs cells in one namespace."""

    def __init__(self, data: str, alone: bool, images: int) -> None:
        self._data = data
        self._alone = alone
        self._most_images = images
        self._globals: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
        self._count = 0
        self._loop: Any = None
        self._shown: list[str] = []
        self._num_unshown = 0
        self._globals["display"] = self._display
        self._mapped = set[int]()
        sys.addaudithook(self._note_mapping)

    def run(self, code: str) -> dict[str, Any]:
        """Runs one; returns what is to be said of it besides what it printed."""
        self._count += 1
        self._shown, self._num_unshown = [], 0
        self._mapped.clear()
        if self._data != DATA:  # it has another name here
            code = code.replace(DATA, self._data)
        ok = False
        try:
            self._run(code)
            ok = True
        except SystemExit as end:
            ok = True
            if isinstance(end.code, str):
                sys.stderr.write(f"{end.code}\n")
        except BaseException:
            self._tell_error()
        try:
            self._save_figures()
            self._tell_unshown()
        except BaseException:
            self._tell_error()
        for stream in (sys.stdout, sys.stderr):
            with suppress(BaseException):
                stream.flush()
        if self._alone:  # what the cell has left running; the first process of all is none of ours
            with suppress(OSError):
                os.kill(-1, signal.SIGKILL)
        return {"ok": ok, "images": self._shown, "mapped": [*self._mapped][:MAX_MAPPED]}

    def _note_mapping(self, event: str, told: tuple[Any, ...]) -> None:
        """Remember the inode of a file that is mapped into memory to be written there: neither its time nor
        its size tells of that. Others find what is mapped still when the cell has ended."""
        if event == "mmap.__new__" and told[0] != -1 and told[2] in (_ANYHOW, _TO_WRITE):
            with suppress(OSError):
                self._mapped.add(os.fstat(told[0]).st_ino)

    def _run(self, code: str) -> None:
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(True), name)
        tree = _parsed(code, name)
        last: ast.Expr | None = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = tree.body.pop()  # type: ignore[assignment]
        self._execute(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
        if last is not None:
            expression = ast.Expression(last.value)
            value = self._execute(compile(expression, name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT))
            if value is not None:
                self._globals["_"] = value
                self._display(value)

    def _execute(self, code: CodeType) -> Any:
        value = eval(code, self._globals)
        if not code.co_flags & inspect.CO_COROUTINE:
            return value
        import asyncio

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop.run_until_complete(value)

    def _display(self, *values: Any) -> None:
        for value in values:
            png = getattr(type(value), "_repr_png_", None)
            shown = png(value) if callable(png) and not _has_figures(value) else None
            if isinstance(shown, bytes):
                if self._has_room():
                    self._save(shown)
            else:
                print(value if isinstance(value, str) and len(values) > 1 else repr(value))

    def _save_figures(self) -> None:
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is None:
            return
        import io

        for number in pyplot.get_fignums():
            if self._has_room():
                image = io.BytesIO()
                pyplot.figure(number).savefig(image, format="png", bbox_inches="tight")
                self._save(image.getvalue())
        pyplot.close("all")

    def _has_room(self) -> bool:
        """Whether the cell can show one more image; one that it cannot is counted."""
        room = len(self._shown) < self._most_images
        self._num_unshown += not room
        return room

    def _tell_unshown(self) -> None:
        if self._num_unshown:
            print(
                f"[images that are not shown, and not kept: {self._num_unshown}. A cell shows"
                f" {self._most_images}; save more of them as files, or show them by another cell.]"
            )

    def _save(self, image: bytes) -> None:
        number = 1
        while os.path.lexists(os.path.join(self._data, f"image-{number}.png")):
            number += 1
        name = f"image-{number}.png"
        with open(os.path.join(self._data, name), "xb") as file:
            file.write(image)
        self._shown.append(name)

    def _tell_error(self) -> None:
        kind, error, trace = sys.exc_info()
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
            trace = trace.tb_next  # of what runs the cells
        try:
            sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
        except BaseException:
            sys.stderr.write(f"{getattr(kind, '__name__', kind)}: the error cannot be told\n")


def _has_figures(value: Any) -> bool:
    """Whether it is a figure of matplotlib, which is saved at the end of the cell."""
    return type(value).__module__.startswith("matplotlib")


_LINE_ENDS = re.compile(r"(?<=\n)|(?<=\r)(?!\n)")
"""What ends a line for Python; `splitlines` knows others, too."""
_NOTEBOOK = re.compile(r"([ \t]*)(!|%)(.*?)([\r\n]*)", re.DOTALL)


def _parsed(code: str, name: str) -> ast.Module:
    """The syntax tree of a cell. Lines of notebooks, `!command` and `%magic`, are read where Python finds
    nothing that it knows: never inside of a text, where it does not stumble over them."""
    lines = _LINE_ENDS.split(code)
    while True:
        try:
            return ast.parse("".join(lines), name)
        except SyntaxError as fault:
            place = (fault.lineno or 0) - 1
            found = _NOTEBOOK.fullmatch(lines[place]) if 0 <= place < len(lines) else None
            if found is None:
                raise
            lines[place] = _as_python(found)


def _as_python(found: re.Match[str]) -> str:
    """A line of a notebook as Python: a command is run, and a magic, but for plots, is told to be none."""
    indent, kind, rest, end = found.groups()
    if kind == "!":
        return f"{indent}__import__('subprocess').run({rest!r}, shell=True) and None{end}"
    if rest.startswith("matplotlib"):  # figures are shown in any case
        return f"{indent}pass{end}"
    note = f"[not run: %{rest.strip()}. There are no magic commands here, and packages cannot be installed.]"
    return f"{indent}print({note!r}){end}"


def know_fonts(listed: str, folder: str) -> None:
    """Copy the list of fonts that was made with the environment to where matplotlib looks for it: it passes
    over a folder that it cannot write to. Raises OSError where there is none."""
    names = os.listdir(listed)
    os.mkdir(folder)
    for name in names:
        with open(os.path.join(listed, name), "rb") as there, open(os.path.join(folder, name), "wb") as here:
            here.write(there.read())


def main() -> None:
    """Runs cells until nobody asks any more."""
    told = json.loads(sys.argv[1])
    # A server that a script has started in the background ignores it, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    confine(told)
    if told.get("channel") is not None:
        show_folders(told["channel"], told["shown"])
    os.chdir(told["data"])
    sys.argv = [""]
    sys.path.insert(0, told["data"])
    orders, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    plain: Any = {"encoding": "utf-8", "errors": "backslashreplace", "line_buffering": True}
    for stream in (sys.stdout, sys.stderr):
        getattr(stream, "reconfigure")(**plain)  # noqa: B009 (it has one, which types do not know)
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    # An interrupt that is sent while no cell runs would end the process: under the lock it is known whether
    # one does. An interrupt that comes before its cell has begun is remembered.
    turn, at_work, stopped = threading.Lock(), threading.Event(), threading.Event()
    myself = threading.main_thread().ident

    def listen() -> None:
        for line in orders:
            order = json.loads(line)
            with turn:
                if "code" in order:
                    stopped.clear()
                    waiting.put(order["code"])
                elif at_work.is_set() and myself is not None:
                    signal.pthread_kill(myself, signal.SIGINT)
                else:
                    stopped.set()
        os._exit(0)  # nobody asks any more

    threading.Thread(target=listen, daemon=True).start()
    with suppress(OSError, KeyError):  # fontconfig complains to the model where it has to make this itself
        os.makedirs(os.path.join(os.environ["XDG_CACHE_HOME"], "fontconfig"), exist_ok=True)
    with suppress(OSError, KeyError):
        know_fonts(os.path.join(sys.prefix, "matplotlib"), os.environ["MPLCONFIGDIR"])
    cells = Cells(told["data"], told["alone"], told["images"])
    answers.write(b'{"ready": true}\n')
    answers.flush()
    while True:
        code, said = waiting.get(), {"ok": False, "images": list[str]()}
        try:
            with turn:
                if not stopped.is_set():
                    at_work.set()
            if at_work.is_set():
                said = cells.run(code)
            else:
                sys.stderr.write("KeyboardInterrupt\n")
            with turn:
                at_work.clear()
        except KeyboardInterrupt:  # it came too late for the cell
            at_work.clear()
        answers.write(json.dumps(said).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
