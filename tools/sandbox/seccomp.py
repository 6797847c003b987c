"""A filter of system calls for confined processes, as the bytes that Linux takes.

What code has no need for, and what has been a way out of namespaces before, fails as if it were not
permitted: tracing, mounts, new namespaces, keys, kernel modules, io_uring, memory that belongs to no process
and no folder, and sockets other than local ones and those of the sandbox's own empty network. Where there are
no namespaces, a stricter filter takes their place as well as one can.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Name -> its number on x86_64 and on aarch64; None where it does not exist.
_DENIED: Mapping[str, tuple[int | None, int | None]] = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "migrate_pages": (256, 238),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "move_pages": (279, 239),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_madvise": (440, 440),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "settimeofday": (164, 170),
    "shmget": (29, 194),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_DENIED_SHARED: Mapping[str, tuple[int | None, int | None]] = {
    "chmod": (90, None),
    "chown": (92, None),
    "connect": (42, 203),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "fchownat": (260, 54),
    "futimesat": (261, None),
    "ioprio_set": (251, 30),
    "lchown": (94, None),
    "lremovexattr": (198, 15),
    "lsetxattr": (189, 6),
    "pidfd_send_signal": (424, 424),
    "removexattr": (197, 14),
    "removexattrat": (466, 466),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "setpgid": (109, 154),
    "setpriority": (141, 140),
    "setsid": (112, 157),
    "setxattr": (188, 5),
    "setxattrat": (463, 463),
    "socket": (41, 198),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
}
"""What is denied besides where the process shares the machine's processes, users and network: Landlock does
not ask about it. Without new sessions and groups nothing that code starts can leave the group it is ended by.
"""
_CLONE, _CLONE3, _SOCKET = (56, 220), 435, (41, 198)
_SOCKETPAIR, _PRLIMIT = (53, 199), (302, 261)
_DATAGRAM = 2
"""A pair of this type can still send to other sockets, by their paths."""

_NAMESPACES = 0x7E020000
"""All flags of clone that make a namespace."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6. Others, such as AF_VSOCK, do not belong to the network namespace."""
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_AND = 0x54
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _FAIL, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def system_call_filter(machine: str = "", *, alone: bool = True) -> bytes | None:
    """The filter for a machine, this one by default; None where its system calls are not known here. alone:
    whether the process is in namespaces of its own."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        return None
    column = list(_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_EQUAL, 0, 1, _CLONE3),  # its flags lie in memory, where no filter sees them: libraries fall back
        (_RETURN, 0, 0, _FAIL | errno.ENOSYS),
    ]
    for numbers in (_DENIED if alone else {**_DENIED, **_DENIED_SHARED}).values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _FAIL | errno.EPERM)]
    if not alone:
        program += [
            (_EQUAL, 0, 4, _SOCKETPAIR[column]),
            (_LOAD, 0, 0, _SECOND_ARGUMENT),
            (_AND, 0, 0, 0xF),
            (_EQUAL, 0, 5, _DATAGRAM),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_EQUAL, 0, 4, _PRLIMIT[column]),  # of any process but the one that asks
            (_LOAD, 0, 0, _FIRST_ARGUMENT),
            (_EQUAL, 1, 0, 0),
            (_RETURN, 0, 0, _FAIL | errno.EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_ANY_BIT, 0, 4 + len(_FAMILIES), _NAMESPACES),
        (_RETURN, 0, 0, _FAIL | errno.EPERM),
        (_EQUAL, 0, 2 + len(_FAMILIES), _SOCKET[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        *((_EQUAL, len(_FAMILIES) - at, 0, family) for at, family in enumerate(_FAMILIES)),
        (_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *one) for one in program)
