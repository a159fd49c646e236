"""The inside of the sandbox: a script that takes away from its own process what a stranger's program must not have.

`sandbox.run` starts it, with an empty environment, three files as descriptors and the program at the beginning of its
standard input. It becomes the program in the same interpreter, so that executing can be forbidden. Landlock leaves the
standard library to read and nothing to write; newer kernels also forbid TCP, abstract sockets and signals by it.
Seccomp allows the calls of CALLS, and those of CHECKED with harmless arguments; none makes a process, a file or a
connection. Names and sizes of files can still be seen. It imports little, as it is to start in milliseconds.
"""

import ctypes
import os
import resource
import struct
import sys
import types

THREADS = 64
CALLS = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, close 3 57, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, mremap 25 216, madvise 28 233, brk 12 214, futex 202 98, rt_sigaction 13 134, rt_sigprocmask 14 135,
rt_sigreturn 15 139, sigaltstack 131 132, clock_gettime 228 113, gettimeofday 96 169, getpid 39 172, gettid 186 178,
exit 60 93, exit_group 231 94, open 2 -, openat 257 56, stat 4 -, lstat 6 -, fstat 5 80, newfstatat 262 79,
statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -, readlinkat 267 78, getdents64 217 61,
getcwd 79 17, dup 32 23, dup2 33 -, dup3 292 24, pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -,
pselect6 270 72, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19,
recvfrom 45 207, getrandom 318 278, getrlimit 97 163, getrusage 98 165, times 100 153, sysinfo 99 179, uname 63 160,
umask 95 166, time 201 -, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177, getppid 110 173,
getpgrp 111 -, getpgid 121 155, getsid 124 156, getgroups 115 158, getresuid 118 148, getresgid 120 150, getcpu 309 168,
clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101, sched_yield 24 124, sched_getaffinity 204 123,
set_tid_address 218 96, set_robust_list 273 99, rseq 334 293, arch_prctl 158 -, restart_syscall 219 128, pause 34 -,
rt_sigpending 127 136, rt_sigtimedwait 128 137, rt_sigsuspend 130 133, setitimer 38 103, getitimer 36 102, alarm 37 -
"""  # name, number on x86_64, number on aarch64
SELF = -1  # stands for the process's own id
CHECKED = {  # name: numbers, argument, bits of it that count, its values, the error otherwise
    "kill": ((62, 129), 0, 0xFFFFFFFF, (SELF,), 1),
    "tgkill": ((234, 131), 0, 0xFFFFFFFF, (SELF,), 1),
    "prlimit64": ((302, 261), 0, 0xFFFFFFFF, (0, SELF), 1),
    "fcntl": ((72, 25), 1, 0xFFFFFFFF, (0, 1, 2, 3, 4, 1030), 1),  # F_SETOWN would have the kernel signal others
    "ioctl": ((16, 29), 1, 0xFFFFFFFF, (0x5421, 0x5450, 0x5451), 25),  # FIONBIO, FIONCLEX, FIOCLEX; else "no terminal"
    "socketpair": ((53, 199), 0, 0xFFFFFFFF, (1,), 1),  # of asyncio; its ends cannot be connected to anything else
    "sendto": ((44, 206), 4, 0xFFFFFFFF, (0,), 1),  # to no other address
    "clone": ((56, 220), 0, 0xFFBFFFFF, (0x3D0F00,), 1),  # a thread as pthread_create makes it, never a process
    "clone3": ((435, 435), 0, 0, (), 38),  # flags behind a pointer; without it the C library takes clone
}
ARCH = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, RETURN, AND = 0x20, 0x15, 0x06, 0x54  # of BPF, https://docs.kernel.org/userspace-api/seccomp_filter.html


def call(name: str, *args: int | bytes | None) -> int:
    """A function of the C library. Raises OSError with its name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(*(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}{args[:2]}: {os.strerror(ctypes.get_errno())}")
    return result


def limit(**most: int) -> None:
    """Ceilings of the kernel, for good, by the names of RLIMIT_…, or those there are if they are lower."""
    for name, value in most.items():
        what = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(what)[1]
        value = value if hard < 0 else min(value, hard)
        resource.setrlimit(what, (value, value + 1 if name == "CPU" and hard < 0 else value))  # SIGXCPU, then SIGKILL


def drop() -> None:
    """Give capabilities up, and as root be a user of whom there is no other process, or nobody.

    Where Python lies in a folder of root's, the right to look into folders stays; Landlock says into which.
    """
    with open("/proc/loadavg") as file:  # the limit of threads counts all that a user has, at most these
        threads = int(file.read().split()[3].split("/")[1]) + THREADS
    if os.geteuid() == 0:
        call("prctl", 8, 1, 0, 0, 0)  # PR_SET_KEEPCAPS
        for user in (2**30 + os.getpid(), 65534):
            try:
                os.setgroups([])
                os.setresgid(user, user, user)
                os.setresuid(user, user, user)
                threads = threads if user == 65534 else THREADS
                break
            except OSError:  # a user that this container does not know, or it may not change users
                continue
    limit(NPROC=threads)
    for right in (0,) if os.access(os.__file__, os.R_OK) else (1 << 2, 1 << 1):  # CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE
        try:
            call("capset", struct.pack("Ii", 0x20080522, 0), struct.pack("6I", right, right, 0, 0, 0, 0))
            return
        except OSError:  # a container often has the second alone
            continue
    raise SystemExit(f"{os.__file__} cannot be read without root's rights")


def landlock() -> None:
    """Leave what Python needs to be read."""
    try:
        version = call("syscall", 444, None, 0, 1)
    except OSError as error:
        raise SystemExit(f"this kernel has no Landlock ({error.strerror})") from error
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1  # all that this version knows are forbidden
    attributes = struct.pack("3Q", rights, 3 * (version >= 4), 3 * (version >= 6))  # files; TCP; sockets and signals
    rules = call("syscall", 444, attributes, len(attributes), 0)
    places = [os.path.dirname(os.__file__), "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    for path in (*places, os.path.join(sys.base_exec_prefix, "lib"), "/etc/ld.so.cache", "/dev/null", "/dev/urandom"):
        if os.path.exists(path):
            place = os.open(path, os.O_PATH)
            right = 4 | 8 if os.path.isdir(path) else 4 | 2 if path == "/dev/null" else 4  # 4, 8 read; 2 write
            call("syscall", 445, rules, 1, struct.pack("=Qi", right, place), 0)
            os.close(place)
    call("syscall", 446, rules, 0)
    os.close(rules)


def seccomp(column: int, arch: int) -> None:
    """Allow CALLS, and CHECKED where the arguments are as they say; all others fail."""
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for numbers in (line.split()[1:] for line in CALLS.split(",")):
        if numbers[column] != "-":
            code += [(EQUAL, 0, 1, int(numbers[column])), (RETURN, 0, 0, ALLOW)]
    for numbers, argument, bits, values, error in CHECKED.values():
        at, refuse = 16 + 8 * argument, (RETURN, 0, 0, ERROR | error)
        check = [(LOAD, 0, 0, at + 4), (EQUAL, 1, 0, 0), refuse, (LOAD, 0, 0, at), (AND, 0, 0, bits)]
        for value in values:
            check += [(EQUAL, 0, 1, os.getpid() if value == SELF else value), (RETURN, 0, 0, ALLOW)]
        code += [(EQUAL, 0, len(check) + 1, numbers[column]), *check, refuse]
    code.append((RETURN, 0, 0, ERROR | 1))
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    call("prctl", 22, 2, struct.pack("HP", len(code), ctypes.addressof(program)), 0, 0)  # PR_SET_SECCOMP


def main() -> None:
    parent, size, cpu_s, memory_mb, output_kb, unsafe = map(int, sys.argv[1:])
    source = b""
    while len(source) < size:
        source += os.read(0, size - len(source))
    limit(CPU=cpu_s, FSIZE=output_kb << 10, NOFILE=64, CORE=0, MEMLOCK=0)
    if sys.platform == "linux":
        limit(AS=memory_mb << 20)
    machine = os.uname().machine if sys.platform == "linux" else sys.platform
    if not unsafe:
        if machine not in ARCH:
            raise SystemExit(f"no sandbox for {machine}")
        drop()
        call("prctl", 1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL: the parent's death is this process's
        if os.getppid() != parent:
            raise SystemExit("the parent is gone")
        call("prctl", 4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: no other process of this user can look inside
        call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        landlock()
        seccomp(*ARCH[machine])
    os.environ.clear()
    sys.argv[:] = ["main.py"]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    exec(compile(source, "main.py", "exec", dont_inherit=True), vars(module))


if __name__ == "__main__":
    main()
