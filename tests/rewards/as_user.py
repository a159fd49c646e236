"""Runs programs in the sandbox as an ordinary user: JSON [programs, limits] in, their outcomes out. Started as root.

Python may lie where root alone can read, so that this user keeps the right to read, and nothing else.
"""

import ctypes
import json
import os
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

USER, READ = 4321, 1 << 2


def main() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(8, 1, 0, 0, 0) == 0  # PR_SET_KEEPCAPS
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    assert libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", READ, READ, READ, 0, 0, 0)) == 0
    assert libc.prctl(47, 2, 2, 0, 0) == 0  # PR_CAP_AMBIENT_RAISE
    from jaxrl_llm.rewards.sandbox import Limits, run

    given, limits = json.load(sys.stdin)
    programs = [text.replace("PARENT", str(os.getpid())) for text in given]
    with ThreadPoolExecutor(8) as pool:
        outcomes = pool.map(lambda text: asdict(run(text, limits=Limits(**limits))), programs)
        json.dump(list(outcomes), sys.stdout)


if __name__ == "__main__":
    main()
