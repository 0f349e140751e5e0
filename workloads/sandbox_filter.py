"""Which system calls a sandboxed program may make: a table by purpose, and the BPF program that the kernel runs.

Landlock decides which files may be opened. This filter takes away what Landlock does not see: processes, sockets,
signals to others, owners and modes of files, and memory that no limit counts. A refused call returns EPERM, as if the
user lacked the right. Calls newer than the table return ENOSYS, as on an older kernel.

Sources: seccomp(2), linux/seccomp.h, linux/filter.h, linux/audit.h; numbers from the kernel's tables of system calls.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

# A BPF instruction: code, jump if true, jump if false, operand.
INSTRUCTION = struct.Struct("HBBI")
LOAD_WORD, JUMP_EQUAL, JUMP_GREATER, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
KILL_PROCESS, ALLOW, REFUSE = 0x80000000, 0x7FFF0000, 0x00050000
# struct seccomp_data: int nr; u32 arch; u64 instruction_pointer; u64 args[6]. Of arguments the low word, little-endian.
NUMBER_AT, MACHINE_AT, FIRST_ARGUMENT_AT, ARGUMENT_BYTES = 0, 4, 16, 8

NEWEST_KNOWN = 467
"""open_tree_attr of Linux 6.15. From 424 on, numbers are the same on all machines."""

CLONE_THREAD = 0x10000
F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY = 8, 10, 15, 1024, 1026
TERMINAL_AND_DESCRIPTOR_IOCTLS = {
    "TCGETS": 0x5401,
    "TIOCGWINSZ": 0x5413,
    "FIONREAD": 0x541B,
    "FIONBIO": 0x5421,
    "FIONCLEX": 0x5450,
    "FIOCLEX": 0x5451,
}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4

COMMON_REFUSED = {
    "signals to others": {"pidfd_send_signal": 424, "pidfd_open": 434, "pidfd_getfd": 438},
    "calls through a ring, which no filter sees": {
        "io_uring_setup": 425,
        "io_uring_enter": 426,
        "io_uring_register": 427,
    },
    "mounts": {
        "open_tree": 428,
        "move_mount": 429,
        "fsopen": 430,
        "fsconfig": 431,
        "fsmount": 432,
        "fspick": 433,
        "mount_setattr": 442,
        "open_tree_attr": 467,
    },
    "other processes": {"process_madvise": 440, "process_mrelease": 448},
    "memory that no limit counts": {"memfd_secret": 447},
    "owners, modes and times of files": {"fchmodat2": 452, "setxattrat": 463, "removexattrat": 466},
}

X86_64_REFUSED = {
    "processes": {"fork": 57, "vfork": 58, "execve": 59, "execveat": 322},
    "network": {"socket": 41, "socketpair": 53},
    "signals to others": {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297},
    "other processes": {
        "ptrace": 101,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "setpriority": 141,
        "sched_setparam": 142,
        "sched_setscheduler": 144,
        "sched_setaffinity": 203,
        "sched_setattr": 314,
        "ioprio_set": 251,
        "migrate_pages": 256,
        "move_pages": 279,
    },
    "mounts": {"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308},
    "owners, modes and times of files": {
        "chmod": 90,
        "fchmod": 91,
        "fchmodat": 268,
        "chown": 92,
        "fchown": 93,
        "lchown": 94,
        "fchownat": 260,
        "utime": 132,
        "utimes": 235,
        "futimesat": 261,
        "utimensat": 280,
        "setxattr": 188,
        "lsetxattr": 189,
        "fsetxattr": 190,
        "removexattr": 197,
        "lremovexattr": 198,
        "fremovexattr": 199,
    },
    # Landlock sees it from its third version on.
    "sizes of files by name": {"truncate": 76},
    "memory that no limit counts": {
        "shmget": 29,
        "shmat": 30,
        "shmctl": 31,
        "semget": 64,
        "semop": 65,
        "semctl": 66,
        "semtimedop": 220,
        "msgget": 68,
        "msgsnd": 69,
        "msgrcv": 70,
        "msgctl": 71,
        "mq_open": 240,
        "memfd_create": 319,
    },
    # Landlock hides neither names nor what happens to them.
    "watching files": {
        "inotify_init": 253,
        "inotify_init1": 294,
        "inotify_add_watch": 254,
        "inotify_rm_watch": 255,
        "fanotify_init": 300,
        "fanotify_mark": 301,
    },
    "the kernel": {
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "bpf": 321,
        "perf_event_open": 298,
        "userfaultfd": 323,
    },
}

AARCH64_REFUSED = {
    "processes": {"execve": 221, "execveat": 281},
    "network": {"socket": 198, "socketpair": 199},
    "signals to others": {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240},
    "other processes": {
        "ptrace": 117,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "setpriority": 140,
        "sched_setparam": 118,
        "sched_setscheduler": 119,
        "sched_setaffinity": 122,
        "sched_setattr": 274,
        "ioprio_set": 30,
        "migrate_pages": 238,
        "move_pages": 239,
    },
    "mounts": {"mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "unshare": 97, "setns": 268},
    "owners, modes and times of files": {
        "fchmod": 52,
        "fchmodat": 53,
        "fchownat": 54,
        "fchown": 55,
        "utimensat": 88,
        "setxattr": 5,
        "lsetxattr": 6,
        "fsetxattr": 7,
        "removexattr": 14,
        "lremovexattr": 15,
        "fremovexattr": 16,
    },
    "sizes of files by name": {"truncate": 45},
    "memory that no limit counts": {
        "shmget": 194,
        "shmctl": 195,
        "shmat": 196,
        "semget": 190,
        "semctl": 191,
        "semtimedop": 192,
        "semop": 193,
        "msgget": 186,
        "msgctl": 187,
        "msgrcv": 188,
        "msgsnd": 189,
        "mq_open": 180,
        "memfd_create": 279,
    },
    # Landlock hides neither names nor what happens to them.
    "watching files": {
        "inotify_init1": 26,
        "inotify_add_watch": 27,
        "inotify_rm_watch": 28,
        "fanotify_init": 262,
        "fanotify_mark": 263,
    },
    "the kernel": {
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "bpf": 280,
        "perf_event_open": 241,
        "userfaultfd": 282,
    },
}


@dataclass(frozen=True)
class CallTable:
    """Numbers of system calls on one kind of machine."""

    audit_machine: int
    """AUDIT_ARCH_*: the kernel says with it which table the caller's number belongs to."""
    refused: dict[str, dict[str, int]]
    """Name to number, by what the calls are for."""
    clone: int
    fcntl: int
    ioctl: int
    prctl: int
    prlimit64: int
    clone3: int = field(default=435)

    def numbers(self) -> list[int]:
        """Of the calls that are refused whatever their arguments."""
        return sorted(n for table in (self.refused, COMMON_REFUSED) for calls in table.values() for n in calls.values())


CALL_TABLES = {
    "x86_64": CallTable(0xC000003E, X86_64_REFUSED, clone=56, fcntl=72, ioctl=16, prctl=157, prlimit64=302),
    "aarch64": CallTable(0xC00000B7, AARCH64_REFUSED, clone=220, fcntl=25, ioctl=29, prctl=167, prlimit64=261),
}
"""By `platform.machine()`."""


def filter_program(table: CallTable) -> bytes:
    """The instructions, as `struct sock_filter[]`: one decision after the other, none behind another's jump."""
    eperm, enosys = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS
    return b"".join(
        [
            # Numbers of another table (32-bit calls) mean other calls.
            _instruction(LOAD_WORD, MACHINE_AT),
            _instruction(JUMP_EQUAL, table.audit_machine, if_true=1),
            _instruction(RETURN, KILL_PROCESS),
            _instruction(LOAD_WORD, NUMBER_AT),
            # Also x86's second table (x32), whose numbers have a high bit.
            _instruction(JUMP_GREATER, NEWEST_KNOWN, if_false=1),
            _instruction(RETURN, enosys),
            # Its flags lie behind a pointer; the C library falls back to clone.
            _when_number(table.clone3, [_instruction(RETURN, enosys)]),
            _when_number(table.clone, _verdict_by_bit(0, CLONE_THREAD, eperm)),
            _when_number(table.ioctl, _allow_only(1, TERMINAL_AND_DESCRIPTOR_IOCTLS.values(), eperm)),
            # A file's owner gets signals from it: that may be another process.
            _when_number(table.fcntl, _refuse(1, (F_SETOWN, F_SETSIG, F_SETOWN_EX, F_SETLEASE, F_NOTIFY), eperm)),
            # It shall end with its parent, and the parent shall see what it holds open.
            _when_number(table.prctl, _refuse(0, (PR_SET_PDEATHSIG, PR_SET_DUMPABLE), eperm)),
            # Limits of its own process (0) only.
            _when_number(table.prlimit64, _allow_only(0, (0,), eperm)),
            *(_when_number(number, [_instruction(RETURN, eperm)]) for number in table.numbers()),
            _instruction(RETURN, ALLOW),
        ]
    )


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return INSTRUCTION.pack(code, if_true, if_false, operand)


def _when_number(number: int, decision: list[bytes]) -> bytes:
    """`decision` ends in a return on every path; other calls jump over it. The call's number is loaded."""
    return b"".join([_instruction(JUMP_EQUAL, number, if_false=len(decision)), *decision])


def _argument(index: int) -> bytes:
    return _instruction(LOAD_WORD, FIRST_ARGUMENT_AT + ARGUMENT_BYTES * index)


def _verdict_by_bit(index: int, bit: int, otherwise: int) -> list[bytes]:
    allow = _instruction(RETURN, ALLOW)
    return [_argument(index), _instruction(JUMP_ANY_BIT, bit, if_false=1), allow, _instruction(RETURN, otherwise)]


def _allow_only(index: int, values: Iterable[int], otherwise: int) -> list[bytes]:
    tests = [_instruction(JUMP_EQUAL, v, if_false=1) + _instruction(RETURN, ALLOW) for v in values]
    return [_argument(index), *_split(tests), _instruction(RETURN, otherwise)]


def _refuse(index: int, values: Iterable[int], refusal: int) -> list[bytes]:
    tests = [_instruction(JUMP_EQUAL, v, if_false=1) + _instruction(RETURN, refusal) for v in values]
    return [_argument(index), *_split(tests), _instruction(RETURN, ALLOW)]


def _split(pairs: Iterable[bytes]) -> list[bytes]:
    size = INSTRUCTION.size
    return [pair[start : start + size] for pair in pairs for start in (0, size)]
