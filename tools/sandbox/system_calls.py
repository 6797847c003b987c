"""Which system calls code in a sandbox can make: what Python, packages for data and a shell need.

What is missing has been a way out of sandboxes before, or takes memory that belongs to no process and no
folder: tracing and the memory of others, mounts, namespaces, keys, kernel modules, BPF, io_uring,
userfaultfd, `memfd_create`, and the shared memory, queues and semaphores of System V and POSIX.
"""

from __future__ import annotations

import errno

from tools.seccomp import CHANNEL, ITSELF, READING, Allowed, Condition, named, system_call_filter

_NAMESPACES = 0x7E020000
"""All flags of clone that make a namespace."""
_PARENT, _TRACED = 0x8000, 0x2000
"""A child of its parent's parent, which the server would never take notice of; a process that is traced."""
_THREAD, _SHARED_FILES = 0x10000, 0x400
_STREAM, _PACKETS, _KIND = 1, 5, 0xF
_LOCAL, _INET, _INET6 = 1, 2, 10

_CODE: Allowed = {
    **READING,
    **ITSELF,
    **CHANNEL,
    **named(
        "chdir copy_file_range creat fallocate fchdir fdatasync fgetxattr flistxattr flock fsync ftruncate"
        " getxattr lgetxattr link linkat listxattr llistxattr mkdir mkdirat mknod mknodat pwrite64 pwritev"
        " pwritev2 rename renameat renameat2 rmdir sendfile symlink symlinkat sync_file_range truncate unlink"
        " unlinkat"
    ),
    **named(
        "alarm execve fork kill pidfd_open setrlimit signalfd signalfd4 tgkill timer_create timer_delete"
        " timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime vfork"
        " wait4 waitid"
    ),
    "clone": (
        Condition(0, (0,), _NAMESPACES | _PARENT | _TRACED),
        # A thread with descriptors of its own could hold files where nobody counts them.
        Condition(0, (0, _SHARED_FILES, _THREAD | _SHARED_FILES), _THREAD | _SHARED_FILES),
    ),
    "prlimit64": (Condition(0, (0,)),),  # of no process but the one that asks
}

_ALONE: Allowed = {
    **_CODE,
    **named(
        "accept accept4 bind chmod chown connect fchmod fchmodat fchmodat2 fchown fchownat fremovexattr"
        " fsetxattr futimesat lchown listen lremovexattr lsetxattr pidfd_send_signal removexattr"
        " sched_setaffinity sched_setattr sched_setparam sched_setscheduler setgroups setpgid setpriority"
        " setresgid setresuid setsid setxattr socketpair utime utimensat utimes"
    ),
    # Families such as AF_VSOCK do not belong to the network namespace.
    "socket": (Condition(0, (_LOCAL, _INET, _INET6), error=errno.EAFNOSUPPORT),),
}
"""In namespaces of its own."""

_BESIDE_OTHERS: Allowed = {
    **_CODE,
    # Other types than these can send to any socket by its path: datagrams, and SOCK_RAW, which becomes them.
    "socketpair": (Condition(0, (_LOCAL,)), Condition(1, (_STREAM, _PACKETS), _KIND)),
}
"""Where it shares the machine's processes, users and network: Landlock does not ask about the modes, owners
and times of files, not even of those that it lets be read, nor about sockets with a path. Without new
sessions and groups nothing that code starts can leave the session that it is ended by."""


def code_filter(machine: str = "", *, alone: bool) -> bytes | None:
    """The filter for a machine, this one by default; None where its system calls are not known here. alone:
    whether the process is in namespaces of its own."""
    return system_call_filter(_ALONE if alone else _BESIDE_OTHERS, machine)
