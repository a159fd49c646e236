"""What a train step takes of a chip of a TPU slice, compiled on a machine without a TPU.

The step is DAPO's, with AdamW, of prompts × group answers that all have full length; bfloat16, splash attention. The
compiler runs until it has written its buffer assignment and the optimised program, a tenth of a compilation. From the
former come arguments and temporaries, as `memory_analysis` gives them; from the latter the traffic: the bytes that
collectives bring to a chip in a step, each one's times the trips of the loops around it. n devices exchange x bytes:
all-gather, reduce-scatter and all-to-all bring x·(n−1)/n, an all-reduce twice that, a permutation x.

libtpu belongs in a folder of its own, because wherever it is installed every start of jax is slow:
    pip install --no-deps --target /tmp/libtpu libtpu==0.0.51
Command: PYTHONPATH=/tmp/libtpu python experiments/benchmarks/tpu_compile.py [--topology v5p:4x4x4] [--data 1]
    [--fsdp 64] [--tensor 1] [--preset qwen2.5-7b] [--answer-tokens 2048] [--micro-batches 1] [--row-tokens 0] [--help]
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

import tyro

WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}  # bytes
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_ENABLE_COMPILATION_CACHE": "false",
}  # fmt: skip
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


@dataclass(frozen=True)
class Step:
    """A program: what is learned from, and on what."""

    topology: str = "v5p:4x4x4"
    preset: str = "qwen2.5-7b"
    data: int = 1
    fsdp: int = 64
    tensor: int = 1
    prompts: int = 64
    group: int = 16
    prompt_tokens: int = 1024
    answer_tokens: int = 2048
    micro_batches: int = 1
    layout: Literal["auto", "grouped", "packed"] = "auto"
    row_tokens: int = 0  # that a row may have at most: groups that are longer are split
    remat: Literal["none", "dots", "full"] = "full"
    chunk: int = 1024  # learner.logprob_chunk, tokens
    dump: str = ""  # the folder for the compiler's files, if they are to stay
    child: bool = False  # only compile, in this process


def lower_and_compile(step: Step) -> None:
    """Write the compiler's files into `step.dump` and go on to the end, minutes for which the parent does not wait."""
    os.environ |= ENVIRONMENT  # before jax starts
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import Mesh
    from memory import answers, lowered

    from jaxrl_llm.learner.packing import Division
    from jaxrl_llm.models.kernels import UNIT
    from jaxrl_llm.models.presets import PRESETS

    devices = topologies.get_topology_desc(platform="tpu", topology_name=step.topology).devices
    shape = step.data, step.fsdp, step.tensor
    mesh = Mesh(mesh_utils.create_device_mesh(shape, devices), ("data", "fsdp", "tensor"))
    model = replace(PRESETS[step.preset], dtype="bfloat16", remat=step.remat, attention="splash")
    cut = Division(1, step.micro_batches, step.data * step.fsdp, step.layout, step.row_tokens, UNIT)
    rollouts = answers(step.prompts, step.group, step.prompt_tokens, step.answer_tokens)
    program = lowered(model, rollouts, cut, mesh, step.chunk)
    done = program.compile(compiler_options={"xla_dump_to": step.dump, "xla_dump_hlo_as_text": True})
    print(done.memory_analysis())


def compiled(step: Step, folder: Path) -> tuple[str, str]:
    """The buffer assignment and the optimised program of a process that is ended once it has written them.

    Raises SystemExit, with the error that the process ended in, if it ends before: if the program does not fit, say.
    """
    options = asdict(replace(step, dump=str(folder)))
    del options["child"]
    command = [sys.executable, __file__, "--child", *(f"--{k.replace('_', '-')}={v}" for k, v in options.items())]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, stdout=log, stderr=log)
        try:
            sizes = [-1, 0]  # of the last of the files, which is whole when it no longer grows
            while not sizes[-2] == sizes[-1] > 0:
                if process.poll() is not None:
                    said = (folder / "log").read_text()
                    raise SystemExit((re.findall(r"^[\w.]*Error: .*", said, re.M) or [said])[-1])
                time.sleep(0.5)
                sizes.append(sum(x.stat().st_size for x in folder.glob("*jit_train_step*after_buffer_assignment.txt")))
        finally:
            process.kill()
            process.wait()
    text = lambda name: next(folder.glob(f"*jit_train_step*{name}.txt")).read_text()
    return text("after_optimizations-buffer-assignment"), text("after_buffer_assignment")


def n_bytes(shapes: str) -> int:
    """Of the arrays in a piece of HLO."""
    found = re.findall(r"\b(\w+)\[([\d,]*)\]", shapes)
    return sum(WIDTH[kind] * prod(int(n) for n in size.split(",") if n) for kind, size in found if kind in WIDTH)


def participants(line: str) -> int:
    """Devices of a collective's group, in any of the three ways in which HLO writes groups."""
    if axes := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        size = dict(re.findall(r"'(\w+)'=(\d+)", axes[1]))
        return prod(int(size[name]) for name in re.findall(r"'(\w+)'", axes[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line):
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return listed[1].count(",") + 1 if listed else 2


def computations(program: str) -> dict[str, tuple[int, list[str]]]:
    """Of an optimised program: how often each computation runs, by the trips of the loops around it, and its lines."""
    lines = {
        name: body.splitlines()
        for name, body in re.findall(r"^(?:ENTRY )?%?(\S+) \(.*?\{\n(.*?)^\}(?!\})", program, re.M | re.S)
    }
    names = re.findall(r"^ENTRY %?(\S+)", program, re.M)
    runs = Counter(names)
    for name in names:  # which grows: who calls comes before what is called
        for line in lines[name]:
            times, loop = 1, re.search(r"condition=%?([\w.-]+), body=", line)
            if loop:  # `i < constant`, from 0
                constants = re.findall(r" constant\((\d+)\)", "\n".join(lines[loop[1]]))
                times = max(map(int, constants), default=1)
            for called in re.findall(r"(?:calls|body|to_apply)=%?([\w.-]+)", line):
                runs[called] = max(runs[called], runs[name] * times)
                names.append(called)
    return {name: (n, lines[name]) for name, n in runs.items()}


@dataclass(frozen=True)
class Collective:
    kind: str
    shapes: str  # of its results, as HLO writes them; of an asynchronous one also of its operands
    devices: int  # that take part
    times: int  # in a run of the program
    asynchronous: bool

    @property
    def bytes(self) -> float:
        """That it brings to a device, each time."""
        n, size = self.devices, n_bytes(self.shapes)
        if self.asynchronous:
            size *= {"all-gather": n / (n + 1), "collective-permute": 1 / 2}.get(self.kind, 1)
        shares = {"collective-permute": 1, "all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1}
        return size * shares.get(self.kind, (n - 1) / n)


def collectives(program: str) -> list[Collective]:
    """All of an optimised program. One that runs piece by piece is written for each piece, and counts once."""
    found = {}
    for times, lines in computations(program).values():
        for line in lines:
            if op := re.search(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(", line):
                chain = re.search(r"(channel_id=\d+).*\bchain_id=", line)
                one = Collective(op[2], op[1], participants(line), times, op[3] is not None)
                found.setdefault(chain[1] if chain else line, []).append(one)
    return [max(same, key=lambda x: x.times) for same in found.values()]


def main(step: Step) -> None:
    """Print a line of the table."""
    if step.child:
        return lower_and_compile(step)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(step.dump or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise SystemExit(f"--dump {folder} holds files; expected an empty folder")
        buffers, program = compiled(step, folder)
    size = lambda kind: (
        sum(map(int, re.findall(rf"^allocation \d+: size (\d+), page 0, {kind}", buffers, re.M))) / 2**30
    )
    moved = Counter()
    for x in collectives(program):
        moved[x.kind] += x.times * x.bytes / 2**30
    print(f"{'arguments, GiB':>15} {'temporaries, GiB':>17} {'ICI, GiB':>9} {'s':>6}  of which")
    parts = ", ".join(f"{kind} {n:.2f}" for kind, n in sorted(moved.items()))
    figures = f"{size('parameter'):15.2f} {size('preallocated-temp'):17.2f} {sum(moved.values()):9.2f}"
    print(f"{figures} {time.perf_counter() - start:6.1f}  {parts}")


if __name__ == "__main__":
    main(tyro.cli(Step))
