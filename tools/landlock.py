"""Takes from the process that it runs in, for good, what it has no use for: by Landlock most files and
networks, by seccomp system calls. Linux only.

It imports nothing of ours and no package, because its text is also handed to other Pythons.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2
_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _READ_FILE, _READ_FOLDER, _WRITE_FILE, _TRUNCATE, _DEVICES = 1, 1 << 2, 1 << 3, 2, 1 << 14, 1 << 15
_CAPABILITIES, _MAY_READ = 0x20080522, 1 << 2
"""The version of the sets of capabilities, and CAP_DAC_READ_SEARCH."""
_MAKE_DEVICES = 1 << 6 | 1 << 11
_TCP, _SCOPES = 0b11, 0b11
"""Binding and connecting; abstract Unix sockets of others, and signals to them."""


def landlock_version() -> int:
    """Which version of Landlock the kernel has; 0 for none."""
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, int(libc.syscall(_CREATE, None, ctypes.c_size_t(0), _VERSION)))


def give_up_privileges() -> bool:
    """Never gain a right by starting a program, which Landlock and seccomp ask for."""
    return bool(ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0)


def give_up_capabilities() -> None:
    """Of what root may do, keep only to read every file, which Landlock bounds: some Pythons lie in a folder
    that lets nobody else in. Other users have nothing to give up."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for kept in (_MAY_READ, 0):
        sets = struct.pack("6I", kept, kept, 0, 0, 0, 0)  # effective, permitted, inheritable; the high halves
        if libc.capset(struct.pack("Ii", _CAPABILITIES, 0), sets) == 0:
            return


def only_these_files(readable: Iterable[str], writable: Iterable[str] = (), programs: bool = False) -> int:
    """Open nothing but what lies below these paths; the version of Landlock that sees to that, 0 where the
    kernel does not. writable: read, too. programs: whether what can be read can also be executed."""
    version = landlock_version()
    if version < 1:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    every = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    handled = struct.pack("<Q", every)
    handled += struct.pack("<Q", _TCP) if version >= 4 else b""
    handled += struct.pack("<Q", _SCOPES) if version >= 6 else b""
    rules = libc.syscall(_CREATE, handled, ctypes.c_size_t(len(handled)), 0)
    if rules < 0:
        return 0
    reading = _READ_FILE | _READ_FOLDER | (_EXECUTE if programs else 0)
    rights = [(path, reading) for path in readable]
    rights += [(path, every & ~(_MAKE_DEVICES | _DEVICES)) for path in writable]
    try:
        for path, right in rights:
            with suppress(OSError):
                opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
                if not os.path.isdir(path):
                    right &= _READ_FILE | _EXECUTE | _WRITE_FILE | _TRUNCATE & every
                libc.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("<Qi", right, opened), 0)
                os.close(opened)
        return version if libc.syscall(_RESTRICT, rules, 0) == 0 else 0
    finally:
        os.close(rules)


def filter_system_calls(instructions: bytes) -> bool:
    """Let a filter, as instructions of BPF, decide about each system call; whether the kernel does that."""
    libc = ctypes.CDLL(None, use_errno=True)
    held = ctypes.create_string_buffer(instructions)
    program = struct.pack("@HP", len(instructions) // 8, ctypes.addressof(held))
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, program, 0, 0) == 0)
