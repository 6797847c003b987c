"""What the filters of system calls let through, on every machine they are for, is what they say.

The filters are run here by an interpreter of the instructions that they consist of, so that those of another
machine than this one are tested, too. `tests/tools/sandbox` and `tests/tools/documents` show that the kernel
does the same.
"""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.documents.confinement import parsing_filter
from tools.sandbox.system_calls import code_filter
from tools.seccomp import ARCHITECTURES, NUMBERS, named, system_call_filter

MACHINES = ("x86_64", "aarch64")
ME = 4711
ALLOWED, KILLED = 0x7FFF0000, 0x80000000

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
OTHER_NAMES = {"newfstatat": "fstatat"}
"""Of calls that one header calls otherwise."""


def judged(program: bytes, machine: str, number: int, *arguments: int) -> int:
    """What a filter returns of a call."""
    given = struct.pack("<iIQ", number if number < 1 << 31 else number - (1 << 32), ARCHITECTURES[machine], 0)
    given += struct.pack("<6Q", *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at = value = 0
    while True:
        kind, if_true, if_false, constant = code[at]
        at += 1
        match kind:
            case 0x20:
                value = struct.unpack_from("<I", given, constant)[0]
            case 0x54:
                value &= constant
            case 0x15:
                at += if_true if value == constant else if_false
            case 0x35:
                at += if_true if value >= constant else if_false
            case 0x06:
                return int(constant)
            case _:
                raise AssertionError(f"no instruction of a filter: {kind:#x}")


def fails(code: int) -> int:
    return 0x00050000 | code


def filters(machine: str) -> Mapping[str, bytes]:
    found = {
        "code under bubblewrap": code_filter(machine, alone=True),
        "code by Landlock": code_filter(machine, alone=False),
        "a parser": parsing_filter(ME, machine),
    }
    return {name: program for name, program in found.items() if program is not None}


def numbers_of(machine: str) -> dict[str, int]:
    """The numbers of all calls of a machine, as its headers have them."""
    if not HEADERS[machine].exists():
        pytest.skip("the headers of the kernel are not installed")
    text = HEADERS[machine].read_text()
    return {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", text)}


def of(machine: str, name: str) -> int:
    number = NUMBERS[name][MACHINES.index(machine)]
    assert number is not None
    return number


@pytest.mark.parametrize("machine", MACHINES)
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    known = numbers_of(machine)
    wrong = {}
    for name in NUMBERS:
        number = NUMBERS[name][MACHINES.index(machine)]
        there = known.get(name, known.get(OTHER_NAMES.get(name, "")))
        if number != there and not (there is None and number is not None and number > max(known.values())):
            wrong[name] = (number, there)
    assert wrong == {}


NEVER = """
    acct add_key bpf chroot clock_settime clone3 delete_module execveat fanotify_init finit_module
    fsconfig fsmount fsopen fspick get_robust_list init_module io_pgetevents io_setup io_submit
    io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl
    landlock_create_ruleset lookup_dcookie mbind memfd_create memfd_secret migrate_pages mlock mlockall
    modify_ldt mount mount_setattr move_mount move_pages mq_open mq_timedsend mq_timedreceive mq_unlink
    msgctl msgget msgrcv msgsnd name_to_handle_at nfsservctl open_by_handle_at open_tree openat2
    perf_event_open personality pidfd_getfd pivot_root process_madvise process_mrelease process_vm_readv
    process_vm_writev ptrace quotactl reboot remap_file_pages request_key rt_sigqueueinfo
    rt_tgsigqueueinfo seccomp semctl semget semop semtimedop set_mempolicy setdomainname sethostname setns
    settimeofday shmat shmctl shmdt shmget splice swapoff swapon sync syncfs syslog tee tkill umount2
    unshare uselib userfaultfd ustat vhangup vmsplice
"""


@pytest.mark.parametrize("machine", MACHINES)
def test_what_leads_out_of_sandboxes_fails_under_every_filter(machine: str) -> None:
    known = numbers_of(machine)
    for kind, program in filters(machine).items():
        through = [
            name
            for name in NEVER.split()
            if name in known and judged(program, machine, known[name]) & 0xFFFF0000 != 0x00050000
        ]
        assert through == [], kind


@pytest.mark.parametrize("machine", MACHINES)
def test_what_nobody_knows_fails_as_on_an_older_kernel(machine: str) -> None:
    for program in filters(machine).values():
        for number in (600, 0x3FFFFFFF):
            assert judged(program, machine, number) == fails(errno.ENOSYS)
        assert judged(program, machine, 435) == fails(errno.ENOSYS), "libraries use clone instead of clone3"


@pytest.mark.parametrize("machine", MACHINES)
def test_other_abis_of_the_machine_end_the_process(machine: str) -> None:
    other = MACHINES[1 - MACHINES.index(machine)]
    for program in filters(machine).values():
        assert judged(program, other, 0) == KILLED
        assert judged(program, machine, 0x40000000) == KILLED
        assert judged(program, machine, 0x40000000 + 520) == KILLED
        assert judged(program, machine, 0xFFFFFFFF) == KILLED


CASES: list[tuple[str, str, tuple[int, ...], int]] = [
    ("code", "clone", (0x01200011,), ALLOWED),  # fork
    ("code", "clone", (0x003D0F00,), ALLOWED),  # a thread
    ("code", "clone", (0x00004111,), ALLOWED),  # vfork
    *(
        ("code", "clone", (flag | 17,), fails(errno.EPERM))
        for flag in (1 << 17, *(1 << n for n in range(25, 31)))
    ),
    ("code", "clone", (0x8011,), fails(errno.EPERM)),  # CLONE_PARENT
    ("code", "clone", (0x003D0F00 & ~0x400,), fails(errno.EPERM)),  # a thread with descriptors of its own
    ("code", "prlimit64", (0, 7), ALLOWED),
    ("code", "prlimit64", (1, 7), fails(errno.EPERM)),
    ("code", "fcntl", (3, 1030), ALLOWED),
    ("code", "fcntl", (3, 8), fails(errno.EINVAL)),  # F_SETOWN
    ("code", "fcntl", (3, 10), fails(errno.EINVAL)),  # F_SETSIG
    ("code", "ioctl", (0, 0x5401), ALLOWED),
    ("code", "ioctl", (0, 0x5412), fails(errno.ENOTTY)),  # TIOCSTI
    ("code", "ioctl", (0, 0x100005401), ALLOWED),  # the kernel reads 32 bits of it, too
    ("code", "prctl", (15,), ALLOWED),
    ("code", "prctl", (1, 0), fails(errno.EINVAL)),  # PR_SET_PDEATHSIG
    ("code", "prctl", (4, 0), fails(errno.EINVAL)),  # PR_SET_DUMPABLE
    ("code", "prctl", (22, 1), fails(errno.EINVAL)),  # PR_SET_SECCOMP
    ("code under bubblewrap", "socket", (1, 1), ALLOWED),
    ("code under bubblewrap", "socket", (40, 1), fails(errno.EAFNOSUPPORT)),  # AF_VSOCK
    ("code under bubblewrap", "socket", (16, 3), fails(errno.EAFNOSUPPORT)),  # AF_NETLINK
    ("code by Landlock", "socket", (1, 1), fails(errno.EPERM)),
    ("code by Landlock", "connect", (3,), fails(errno.EPERM)),
    ("code by Landlock", "fchmod", (3, 0), fails(errno.EPERM)),
    ("code by Landlock", "fsetxattr", (3, 0), fails(errno.EPERM)),
    ("code by Landlock", "setsid", (), fails(errno.EPERM)),
    ("code by Landlock", "socketpair", (1, 0x80801), ALLOWED),
    ("code by Landlock", "socketpair", (1, 5), ALLOWED),
    ("code by Landlock", "socketpair", (1, 2), fails(errno.EPERM)),
    ("code by Landlock", "socketpair", (1, 3), fails(errno.EPERM)),  # SOCK_RAW, which becomes SOCK_DGRAM
    ("code by Landlock", "socketpair", (30, 1), fails(errno.EPERM)),  # AF_TIPC
    ("a parser", "tgkill", (ME, ME, 6), ALLOWED),
    ("a parser", "tgkill", (1, 1, 9), fails(errno.EPERM)),
    ("a parser", "fcntl", (3, 8), fails(errno.EINVAL)),
    *(
        ("a parser", name, (), fails(errno.EPERM))
        for name in (
            "clone",
            "execve",
            "kill",
            "socket",
            "socketpair",
            "ftruncate",
            "prlimit64",
            "pidfd_open",
        )
    ),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("kind", "name", "arguments", "returned"), CASES)
def test_arguments_decide(
    machine: str, kind: str, name: str, arguments: tuple[int, ...], returned: int
) -> None:
    for other, program in filters(machine).items():
        if other.startswith(kind):
            assert judged(program, machine, of(machine, name), *arguments) == returned, other


def test_a_machine_that_is_not_known_has_no_filter() -> None:
    assert system_call_filter({}, "riscv64") is None
    with pytest.raises(KeyError):
        system_call_filter(named("no_such_call"), "x86_64")
