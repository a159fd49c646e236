"""Programs that try to get out of the sandbox. Each prints ESCAPED when it has.

Names in capitals are filled in: PARENT, the process that runs the tests; PORT, where it listens; ABSTRACT, the name of
an abstract socket of it, and with a d behind it one of datagrams; PLACE, a folder that anybody may write, with a file
`victim` and a socket `socket`.
"""

import re

PRELUDE = """
import ctypes, os, sys, time, socket, signal, mmap
libc = ctypes.CDLL(None, use_errno=True)
intel = os.uname().machine == "x86_64"
def sc(x86, arm, *a):
    return libc.syscall(*[ctypes.c_long(x) if isinstance(x, int) else x for x in (x86 if intel else arm, *a)])
def escaped(done=True):
    if done: print("ESCAPED", flush=True)
def tries(*attempts):
    for attempt in attempts:
        try: escaped(attempt() not in (-1, None, False))
        except (OSError, RuntimeError, MemoryError, AttributeError, ValueError) as error:
            print(repr(error), file=sys.stderr)
def opens(*paths, mode="rb"):
    tries(*(lambda p=p: open(p, mode) for p in paths))
"""
ESCAPES = {
    # the network
    "tcp": "tries(lambda: socket.create_connection(('127.0.0.1', PORT), 1))",
    "udp": "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); escaped(s.sendto(b'x', ('127.0.0.1', PORT)))",
    "listen": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); escaped()",
    "download": "import urllib.request; escaped(urllib.request.urlopen('http://127.0.0.1:PORT/', timeout=1).read())",
    "raw_socket": "tries(*(lambda f=f: socket.socket(f, socket.SOCK_RAW) for f in (2, 10, 16, 17)))",
    "unix_socket": "s = socket.socket(socket.AF_UNIX); s.connect('PLACE/socket'); escaped()",
    "abstract_socket": "s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + 'ABSTRACT'); escaped()",
    "pair_to_abstract": """
        a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        tries(lambda: a.sendto(b'x', chr(0) + 'ABSTRACTd'), lambda: a.connect(chr(0) + 'ABSTRACTd') is None)""",
    # other processes
    "fork": "pid = os.fork(); escaped()",
    "fork_bomb": """
        import contextlib
        for _ in range(10_000):
            with contextlib.suppress(OSError):
                os.fork(); escaped()""",
    "vfork_spawn": "os.posix_spawn('/bin/true', ['true'], {}); escaped()",
    "shell": "import subprocess; escaped(subprocess.run(['/bin/sh', '-c', 'echo x'], capture_output=True).stdout)",
    "exec": "os.execv('/bin/echo', ['echo', 'ESCAPED'])",
    "exec_by_descriptor": "tries(lambda: os.execve(os.open('/bin/echo', os.O_RDONLY), ['echo', 'ESCAPED'], {}))",
    "loader": """
        import glob
        for loader in glob.glob('/lib*/ld-linux-*'):
            os.execv(loader, [loader, '/bin/echo', 'ESCAPED'])""",
    "multiprocessing": """
        import multiprocessing
        p = multiprocessing.get_context('fork').Process(target=escaped); p.start(); p.join()""",
    "clone": "escaped(sc(56, 220, 17, 0, 0, 0, 0) >= 0)",
    "clone_shared_memory": "escaped(sc(56, 220, 0x100 | 17, 0, 0, 0, 0) >= 0)",
    "clone3": """
        flags = (ctypes.c_uint64 * 11)(0, 0, 0, 0, 17)
        escaped(sc(435, 435, flags, 88) >= 0)""",
    "x32_fork": "escaped(intel and sc(0x40000000 + 57, 0) >= 0)",
    "int_0x80": """
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        code.write(bytes.fromhex("b802000000cd80c3") if intel else bytes(8))  # fork of 32 bits; an illegal instruction
        escaped(ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))() >= 0)""",
    "daemon": """
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(30)
        escaped()""",
    "new_session": "tries(lambda: os.setsid() >= 0, lambda: os.setpgid(0, 0) is None)",
    "thread_bomb": """
        import contextlib, threading
        threading.stack_size(32768)
        with contextlib.suppress(RuntimeError):
            for _ in range(20_000):
                threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
        escaped(threading.active_count() > 5000)
        os._exit(0)""",
    "kill_parent": "tries(lambda: os.kill(PARENT, signal.SIGUSR1) is None, lambda: os.kill(os.getppid(), 0) is None)",
    "kill_all": "tries(lambda: os.kill(-1, 0) is None, lambda: os.killpg(0, 0) is None, lambda: os.kill(1, 0) is None)",
    "tgkill": "escaped(sc(234, 131, PARENT, PARENT, 10) == 0 or sc(200, 130, PARENT, 10) == 0)",
    "sigqueue": "escaped(libc.sigqueue(PARENT, 10, None) == 0)",
    "pidfd_signal": "escaped(sc(424, 424, sc(434, 434, PARENT, 0), 10, 0, 0) == 0)",
    "pidfd_getfd": "escaped(sc(438, 438, sc(434, 434, PARENT, 0), 0, 0) >= 0)",
    "owner_signal": """
        import fcntl
        r, w = os.pipe()
        fcntl.fcntl(r, 8, PARENT)  # F_SETOWN
        fcntl.fcntl(r, 10, 10)  # F_SETSIG
        fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        os.write(w, b'x'); escaped()""",
    "ptrace": "escaped(libc.ptrace(16, PARENT, 0, 0) == 0 or libc.ptrace(0x4206, PARENT, 0, 0) == 0)",
    "read_memory": """
        here = ctypes.create_string_buffer(8)
        vector = (ctypes.c_uint64 * 2)(ctypes.addressof(here), 8)
        escaped(libc.process_vm_readv(PARENT, vector, 1, vector, 1, 0) != -1)""",
    "parent_memory": "opens('/proc/PARENT/mem', '/proc/PARENT/maps', '/proc/PARENT/fd/0', '/proc/self/mem')",
    "parent_limits": """
        import resource
        tries(lambda: resource.prlimit(PARENT, 7), lambda: resource.prlimit(os.getppid(), 7, (0, 0)))""",
    "parent_priority": """
        tries(lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 19) is None,
              lambda: os.sched_setaffinity(PARENT, {0}) is None,
              lambda: os.sched_setscheduler(PARENT, os.SCHED_IDLE, os.sched_param(0)) is None)""",
    # files
    "home": "opens('/root/.bashrc', '/root/.profile', '/root/.ssh/id_rsa'); tries(lambda: os.listdir('/root'))",
    "secrets": "opens('/etc/passwd', '/etc/shadow', '/etc/hostname', 'PLACE/victim')",
    "list_files": "tries(*(lambda p=p: os.listdir(p) for p in ('/', '/tmp', '/etc', '/proc', 'PLACE')))",
    "descriptors": """
        for n in range(3, 4096):
            try: os.fstat(n); escaped()
            except OSError: pass""",
    "environment": "opens(*(f'/proc/{p}/environ' for p in (1, 'self', PARENT))); escaped(os.environ)",
    "write": "opens('/tmp/escaped', '/var/tmp/escaped', 'escaped', 'PLACE/escaped', 'PLACE/victim', mode='ab')",
    "devices": "opens('/dev/kmsg', '/dev/mem', '/dev/vda', '/dev/sda', '/dev/tty', '/dev/fuse', '/dev/net/tun')",
    "write_null": "opens('/dev/urandom', mode='wb'); tries(lambda: os.truncate('/dev/null', 5) is None)",
    "shared_memory_file": "opens('/dev/shm/escaped', '/run/escaped', mode='wb')",
    "shared_memory": "from multiprocessing import shared_memory as s; s.SharedMemory('escaped', True, 99); escaped()",
    "symlink": """
        tries(*(lambda f=f: f('PLACE/victim', 'PLACE/link') is None for f in (os.symlink, os.link)))
        opens('PLACE/there')""",
    "remove": "tries(lambda: os.unlink('PLACE/victim') is None, lambda: os.rename('PLACE/victim', 'PLACE/v') is None)",
    "change": """
        tries(lambda: os.chmod('PLACE/victim', 0) is None, lambda: os.truncate('PLACE/victim', 0) is None,
              lambda: os.utime('PLACE/victim') is None, lambda: os.setxattr('PLACE/victim', 'user.x', b'x') is None,
              lambda: os.chown('PLACE/victim', os.getuid(), -1) is None)""",
    "make": """
        tries(lambda: os.mkdir('PLACE/made') is None, lambda: os.mkfifo('PLACE/made') is None,
              lambda: os.mknod('PLACE/made', 0o60666, 259 << 8) is None)""",
    "standard_library": "opens(os.__file__, mode='ab'); opens(os.path.dirname(os.__file__) + '/x.pyc', mode='wb')",
    "core_pattern": "opens('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/sys/power/state', mode='r+b')",
    "by_handle": """
        handle, mount = (ctypes.c_uint32 * 34)(128), ctypes.c_int()
        found = sc(303, 264, -100, b'PLACE/victim', handle, ctypes.byref(mount), 0)
        escaped(found == 0 or sc(304, 265, -100, handle, 0) >= 0)""",
    "inotify": "escaped(libc.inotify_init1(0) >= 0 or libc.fanotify_init(0, 0) >= 0)",
    "disk": """
        tries(lambda: os.ftruncate(1, 1 << 30) is None, lambda: os.pwrite(1, b'x', 1 << 30),
              lambda: os.posix_fallocate(1, 0, 1 << 30) is None)
        os.lseek(1, 1 << 30, 0); tries(lambda: os.write(1, b'x'))""",
    # memory and time
    "memory": "tries(lambda: len(bytearray(1 << 32)), lambda: len(mmap.mmap(-1, 1 << 32)))",
    "memory_by_pieces": """
        kept = []
        while len(kept) < 4096:
            kept.append(bytearray(1 << 20))
        escaped()""",
    "memory_file": "tries(lambda: os.memfd_create('x'), lambda: sc(447, 447, 0))",
    "sysv": "escaped(max(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600), libc.semget(0, 1, 0o1600)) >= 0)",
    "message_queue": "escaped(sc(240, 180, b'escaped', 0o102, 0o600, 0) >= 0)",
    "huge_output": "while True: sys.stdout.write('x' * 1_000_000)",
    "huge_error": "while True: os.write(2, b'x' * 1_000_000)",
    "sleep": "time.sleep(60); escaped()",
    "sleep_deaf": "[signal.signal(n, signal.SIG_IGN) for n in {*range(1, 32)} - {9, 19}]; time.sleep(60); escaped()",
    "spin": "while True: pass",
    "spin_deaf": """
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)
        while True: pass""",
    "stop_itself": "os.kill(os.getpid(), signal.SIGSTOP); escaped(False)",
    "more_limits": """
        import resource
        most = resource.RLIM_INFINITY
        tries(*(lambda n=n: resource.setrlimit(n, (most, most)) is None for n in (0, 1, 4, 6, 7, 9)))""",
    "timers": """
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        signal.signal(signal.SIGALRM, lambda *_: escaped(os.getppid() != PARENT))
        escaped(sc(222, 107, 1, 0, ctypes.byref(ctypes.c_int())) == 0)
        time.sleep(60)""",
    "crash": "ctypes.string_at(0)",
    "core_dump": "os.abort()",
    # the kernel
    "io_uring": "escaped(sc(425, 425, 8, (ctypes.c_uint32 * 30)()) >= 0)",
    "mount": """
        escaped(libc.mount(b'none', b'/mnt', b'tmpfs', 0, None) == 0 or libc.umount2(b'/proc', 2) == 0)
        tries(lambda: os.chroot('PLACE') is None)
        escaped(sc(428, 428, -100, b'/', 1) >= 0 or sc(430, 430, b'tmpfs', 0) >= 0)""",
    "unshare": "escaped(any(libc.unshare(n) == 0 for n in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x10020000)))",
    "setns": "escaped(libc.setns(os.open('/proc/1/ns/mnt', 0), 0) == 0)",
    "be_root": """
        tries(lambda: os.setuid(0) is None, lambda: os.setresuid(0, 0, 0) is None, lambda: os.setgid(0) is None,
              lambda: os.setgroups([0]) is None)
        import struct
        escaped(libc.capset(struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0xFFFFFFFF] * 6)) == 0)
        escaped(os.getuid() == 0)""",
    "su": "os.execv('/bin/su', ['su', '-c', 'echo ESCAPED'])",
    "keyctl": "escaped(sc(250, 219, 0, -3, 1) >= 0 or sc(248, 217, b'user', b'x', b'x', 1, -3) >= 0)",
    "bpf": """
        zeros = ctypes.create_string_buffer(120)
        escaped(sc(321, 280, 0, zeros, 72) >= 0 or sc(298, 241, zeros, 0, -1, -1, 0) >= 0)""",
    "userfaultfd": "escaped(sc(323, 282, 0) >= 0 or sc(323, 282, 1) >= 0)",
    "undo": """
        names = {1: 0, 4: 1, 22: 0, 24: 0, 47: 2, 59: 0}  # PDEATHSIG, DUMPABLE, SECCOMP, CAPBSET, AMBIENT, SPECULATION
        escaped(any(libc.prctl(name, value, 0, 0, 0) == 0 for name, value in names.items()))""",
    "clock": "tries(lambda: time.clock_settime(0, time.time()) is None, lambda: socket.sethostname('escaped') is None)",
    "reboot": "escaped(sc(169, 142, 0xFEE1DEAD, 672274793, 0, 0) == 0 or sc(246, 104, 0, 0, 0, 0) == 0)",
    "personality": "escaped(libc.personality(0x0040000) not in (-1, 0xFFFFFFFF))",
    "modules": "escaped(sc(313, 273, 0, b'', 0) == 0 or sc(175, 105, b'x', 1, b'') == 0)",
}  # fmt: skip


def program(name: str, **filled: object) -> str:
    lines = ESCAPES[name].split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    text = "\n".join([lines[0], *(line[indent:] for line in lines[1:])])
    return PRELUDE + re.sub("|".join(filled), lambda found: str(filled[found[0]]), text)
