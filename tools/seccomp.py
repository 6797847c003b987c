"""Filters of system calls, as the instructions of BPF that Linux takes (seccomp, mode 2).

A filter is a list of what is allowed. A call that it lacks fails: with EPERM where this module knows it,
because another filter allows it, and with ENOSYS otherwise, as if the kernel were older, which libraries go
on without. `clone3` is among those: its flags lie in memory, where no filter sees them, and libraries then
use `clone`. A call by another ABI than the machine's own, whose numbers mean other things, ends the process.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The machines whose system calls are known here, and their numbers in the kernel (AUDIT_ARCH)."""

NUMBERS: Mapping[str, tuple[int | None, int | None]] = {
    "accept": (43, 202),
    "accept4": (288, 242),
    "access": (21, None),
    "alarm": (37, None),
    "arch_prctl": (158, None),
    "bind": (49, 200),
    "brk": (12, 214),
    "capget": (125, 90),
    "chdir": (80, 49),
    "chmod": (90, None),
    "chown": (92, None),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "clone": (56, 220),
    "close": (3, 57),
    "close_range": (436, 436),
    "connect": (42, 203),
    "copy_file_range": (326, 285),
    "creat": (85, None),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "epoll_create": (213, None),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_pwait2": (441, 441),
    "epoll_wait": (232, None),
    "eventfd": (284, None),
    "eventfd2": (290, 19),
    "execve": (59, 221),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "fchdir": (81, 50),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "fcntl": (72, 25),
    "fdatasync": (75, 83),
    "fgetxattr": (193, 10),
    "flistxattr": (196, 13),
    "flock": (73, 32),
    "fork": (57, None),
    "fremovexattr": (199, 16),
    "fsetxattr": (190, 7),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "fsync": (74, 82),
    "ftruncate": (77, 46),
    "futex": (202, 98),
    "futimesat": (261, None),
    "getcpu": (309, 168),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getpeername": (52, 205),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getpriority": (140, 141),
    "getrandom": (318, 278),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "getsid": (124, 156),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "getuid": (102, 174),
    "getxattr": (191, 8),
    "ioctl": (16, 29),
    "kill": (62, 129),
    "lchown": (94, None),
    "lgetxattr": (192, 9),
    "link": (86, None),
    "linkat": (265, 37),
    "listen": (50, 201),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "lremovexattr": (198, 15),
    "lseek": (8, 62),
    "lsetxattr": (189, 6),
    "lstat": (6, None),
    "madvise": (28, 233),
    "membarrier": (324, 283),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "msync": (26, 227),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pause": (34, None),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "poll": (7, None),
    "ppoll": (271, 73),
    "prctl": (157, 167),
    "pread64": (17, 67),
    "preadv": (295, 69),
    "preadv2": (327, 286),
    "prlimit64": (302, 261),
    "pselect6": (270, 72),
    "pwrite64": (18, 68),
    "pwritev": (296, 70),
    "pwritev2": (328, 287),
    "read": (0, 63),
    "readahead": (187, 213),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "recvfrom": (45, 207),
    "recvmmsg": (299, 243),
    "recvmsg": (47, 212),
    "removexattr": (197, 14),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "restart_syscall": (219, 128),
    "rmdir": (84, None),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "sched_get_priority_max": (146, 125),
    "sched_get_priority_min": (147, 126),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_rr_get_interval": (148, 127),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_yield": (24, 124),
    "select": (23, None),
    "sendfile": (40, 71),
    "sendmmsg": (307, 269),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setgroups": (116, 159),
    "setitimer": (38, 103),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setresgid": (119, 149),
    "setresuid": (117, 147),
    "setrlimit": (160, 164),
    "setsid": (112, 157),
    "setsockopt": (54, 208),
    "setxattr": (188, 5),
    "shutdown": (48, 210),
    "sigaltstack": (131, 132),
    "signalfd": (282, None),
    "signalfd4": (289, 74),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "sync_file_range": (277, 84),
    "sysinfo": (99, 179),
    "tgkill": (234, 131),
    "time": (201, None),
    "timer_create": (222, 107),
    "timer_delete": (226, 111),
    "timer_getoverrun": (225, 109),
    "timer_gettime": (224, 108),
    "timer_settime": (223, 110),
    "timerfd_create": (283, 85),
    "timerfd_gettime": (287, 87),
    "timerfd_settime": (286, 86),
    "times": (100, 153),
    "truncate": (76, 45),
    "umask": (95, 166),
    "uname": (63, 160),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "vfork": (58, None),
    "wait4": (61, 260),
    "waitid": (247, 95),
    "write": (1, 64),
    "writev": (20, 66),
}
"""Name -> its number on x86_64 and on aarch64; None where it does not exist."""

_X32 = 0x40000000
"""The ABI x32 of x86_64 begins there, with numbers that no machine has otherwise."""
_ALL_BITS = 0xFFFFFFFF

_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_EQUAL, _AT_LEAST = 0x15, 0x35
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000

Instruction = tuple[int, int, int, int]
"""Code, how many instructions to skip if true and if false, and a constant."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What an argument of a call must be: under `mask` one of `values`, or else the call fails with `error`.
    Of an argument, from 0, the lower 32 bits are looked at, which are all that the kernel reads of it in the
    calls that are judged so."""

    argument: int
    values: tuple[int, ...]
    mask: int = _ALL_BITS
    error: int = errno.EPERM


Allowed = Mapping[str, Sequence[Condition]]
"""The calls that are carried out, by name, and the conditions on each, all of which must hold."""


def system_call_filter(allowed: Allowed, machine: str = "") -> bytes | None:
    """The filter for a machine, this one by default; None where its system calls are not known here. Raises
    KeyError for a name that is not in NUMBERS."""
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES or sys.byteorder != "little":
        return None
    column = list(ARCHITECTURES).index(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _KILL),
    ]
    unknown = allowed.keys() - NUMBERS.keys()
    if unknown:
        raise KeyError(*unknown)
    for name, numbers in NUMBERS.items():
        if (number := numbers[column]) is not None:
            block = _judged(allowed[name]) if name in allowed else [(_RETURN, 0, 0, _FAIL | errno.EPERM)]
            program += [(_EQUAL, 0, len(block), number), *block]
    program.append((_RETURN, 0, 0, _FAIL | errno.ENOSYS))
    return b"".join(struct.pack("<HBBI", *one) for one in program)


def _judged(conditions: Iterable[Condition]) -> list[Instruction]:
    """What judges a call whose number has been found; it always returns."""
    block: list[Instruction] = []
    for condition in conditions:
        block += [(_LOAD, 0, 0, _FIRST_ARGUMENT + 8 * condition.argument), (_AND, 0, 0, condition.mask)]
        last = len(condition.values)
        block += [(_EQUAL, last - at, 0, value) for at, value in enumerate(condition.values)]
        block.append((_RETURN, 0, 0, _FAIL | condition.error))
    return [*block, (_RETURN, 0, 0, _ALLOW)]


def named(names: str) -> dict[str, Sequence[Condition]]:
    """Calls by their names, separated by spaces, without conditions."""
    return dict.fromkeys(names.split(), ())


# -- what Python needs ---------------------------------------------------------------------------------------

_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 9, 36, 37, 38, 1030, 1032)
"""Of fcntl: copies of a descriptor, its flags, locks. Not F_SETOWN and F_SETSIG, by which the kernel can be
made to send any signal to any process of the same user."""
_REQUESTS = (
    *(0x5401, 0x5402, 0x5403, 0x5404, 0x540E, 0x540F, 0x5410, 0x5413, 0x5414),  # TCGETS to TIOCSWINSZ
    *(0x5441, 0x80045430, 0x40045431),  # a pair of a terminal: TIOCGPTPEER, TIOCGPTN, TIOCSPTLCK
    *(0x541B, 0x5421, 0x5450, 0x5451),  # FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
    0x40049409,  # FICLONE
)
"""Of ioctl. Not TIOCSTI, which types into a terminal, nor TIOCSETD, which loads drivers."""
_OPTIONS = (2, 3, 15, 16, 21, 23, 27, 29, 30, 38, 39, 40, 41, 42, 0x53564D41, 0x41555856)
"""Of prctl: what asks, the names of threads and of memory, timers, huge pages. Not PR_SET_PDEATHSIG, by which
a process ends with the server, nor PR_SET_DUMPABLE, which hides it from whoever measures it."""

READING = named(
    "access close close_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2"
    " epoll_wait eventfd eventfd2 faccessat faccessat2 fadvise64 fstat fstatfs getcwd getdents getdents64"
    " lseek lstat newfstatat open openat pipe pipe2 poll ppoll pread64 preadv preadv2 pselect6 read readahead"
    " readlink readlinkat readv select stat statfs statx write writev"
) | {
    "fcntl": (Condition(1, _COMMANDS, error=errno.EINVAL),),
    "ioctl": (Condition(1, _REQUESTS, error=errno.ENOTTY),),
}
"""Files and pipes: opening them, reading, waiting. What may be opened is for others to say."""

ITSELF = named(
    "arch_prctl brk capget clock_getres clock_gettime clock_nanosleep exit exit_group futex getcpu getegid"
    " geteuid getgid getgroups getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid"
    " getrlimit getrusage getsid gettid gettimeofday getuid madvise membarrier mmap mprotect mremap msync"
    " munmap nanosleep pause restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn"
    " rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity"
    " sched_getparam sched_getscheduler sched_rr_get_interval sched_yield set_robust_list set_tid_address"
    " setitimer sigaltstack sysinfo time times umask uname"
) | {"prctl": (Condition(0, _OPTIONS, error=errno.EINVAL),)}
"""Memory, time, threads that are there, and what a process may know of itself."""

CHANNEL = named(
    "getpeername getsockname getsockopt recvfrom recvmmsg recvmsg sendmmsg sendmsg sendto setsockopt shutdown"
)
"""What is done with sockets that are there."""
