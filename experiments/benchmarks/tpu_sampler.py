"""What a call of the sampler's programs takes of a TPU chip, compiled on a machine without one.

The paged decode of `--rows` answers that have `--context` tokens each, and an `extend` of `--prefill-tokens` tokens of
prompts; bfloat16, TPU's ragged paged attention. Printed are arguments and temporaries, by the compiler, and for decode
the bytes that one step moves to and from the chip's memory, counted in the compiled loop: what is read or written by
each operation there, unless it lies in the chip's vector memory. Attention's kernel says nothing of its own; it reads
the pages that are live. Bound: 1.2 × (weights of the step + live keys and values). With --quantized int8 the weights of
the step are those bytes; bound of the ratio to bfloat16's: 0.6.

The compiler goes to the end, minutes for a whole model: --layers 4 takes four, and a layer's share is told.
Command: PYTHONPATH=/tmp/libtpu python experiments/benchmarks/tpu_sampler.py [--topology v5p:2x2x1] [--rows 256]
    [--context 2048] [--quantized int8] [--layers 4]     (libtpu: see tpu_compile.py)
"""

import os
import re
from dataclasses import replace
from functools import partial
from math import prod
from typing import Literal

import tyro
from tpu_compile import ENVIRONMENT, WIDTH

VECTOR_MEMORY = "S(1)"
MOVES_NOTHING = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "constant",
    "copy-done",
    "slice-done",
    "after-all",
}


def main(
    topology: str = "v5p:2x2x1",
    preset: str = "qwen2.5-7b",
    layers: int = 4,
    rows: int = 256,
    context: int = 2048,
    prefill_tokens: int = 4096,
    quantized: Literal["", "int8", "int4"] = "",
) -> None:
    os.environ |= ENVIRONMENT  # before jax starts
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from jaxrl_llm.models import transformer
    from jaxrl_llm.models.presets import PRESETS
    from jaxrl_llm.sampler import core, page_attention, pages, weights

    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    mesh = Mesh(np.array([device]).reshape(1, 1, 1), ("data", "fsdp", "tensor"))
    model = replace(PRESETS[preset], attention="splash", layers=layers)
    params = jax.eval_shape(partial(transformer.init, model), jax.random.key(0))
    params = jax.eval_shape(lambda p: weights.push(model, p, None, quantized=quantized).params, params)
    size = pages.page_size(context, 0)
    there = lambda tree: jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec())), tree
    )
    ints = lambda *shape: there(jax.ShapeDtypeStruct(shape, jnp.int32))
    block, steps = page_attention.LANES, 8
    width, queries = -(-(context + block) // size), prefill_tokens // block
    with jax.set_mesh(mesh):
        state = there(jax.eval_shape(partial(core.init_pages, model, "bfloat16", rows * context // size, size, rows)))
        decode = jax.jit(core.decode_pages, static_argnums=(0, 1, 2, 8), donate_argnums=4)
        args = model, (0,), False, there(params), state, ints(rows, width), ints(rows), ints(rows, steps), False
        decoded = decode.lower(*args).compile()
        blocks = page_attention.Blocks(
            ints(queries, width), ints(queries), there(jax.ShapeDtypeStruct((queries, block), jnp.bool_))
        )
        extend = jax.jit(core.extend, static_argnums=0, donate_argnums=2)
        extended = extend.lower(model, there(params), state.pools, ints(queries, block), blocks).compile()
    of = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    read = of(params) - (0 if model.tied_head else of(params["embed"]))  # of the embedding a row a token
    alive = of(state.pools)
    for name, program in (("decode", decoded), ("extend", extended)):
        memory = program.memory_analysis()
        print(
            f"{name} on {topology}, {layers} layers: arguments {memory.argument_size_in_bytes / 2**30:.2f} GiB, "
            f"temporaries {memory.temp_size_in_bytes / 2**30:.3f} GiB"
        )
    moved = loop_bytes(decoded.as_text()) + alive
    print(f"a step moves {moved / 1e9:.3f} GB; weights {read / 1e9:.3f} + keys and values {alive / 1e9:.3f} GB: "
          f"{moved / (read + alive):.3f} ×")  # fmt: skip


def loop_bytes(program: str) -> float:
    """That the loop of a compiled program moves in one trip, without what kernels read of pages."""
    bodies = dict(re.findall(r"^%?(\S+) \(.*?\{\n(.*?)^\}", program, re.M | re.S))
    entry = re.search(r"^ENTRY .*?\{\n(.*?)^\}", program, re.M | re.S)[1]
    body = bodies[re.findall(r" while\(.*?body=%?([\w.-]+)", entry)[-1]]
    held = shapes(body)
    return sum(moved(line, bodies, held) for line in body.splitlines())


def shapes(body: str) -> dict[str, str]:
    """What each name of a computation stands for."""
    return dict(re.findall(r"^\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) [\w-]+\(", body, re.M))


def n_bytes(shape: str) -> float:
    """Of arrays that do not lie in vector memory."""
    arrays = re.findall(r"\b(\w+)\[([\d,]*)\](\{[^}]*\})?", shape)
    outside = [(kind, sizes) for kind, sizes, layout in arrays if kind in WIDTH and VECTOR_MEMORY not in layout]
    return sum(WIDTH[kind] * prod(int(n) for n in sizes.split(",") if n) for kind, sizes in outside)


def moved(line: str, bodies: dict[str, str], held: dict[str, str]) -> float:
    """By an operation: what it reads and writes outside of vector memory."""
    found = re.match(r"\s*(?:ROOT )?%\S+ = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)(.*)", line)
    if not found or found[2] in MOVES_NOTHING:
        return 0
    shape, operation, operands, rest = found.groups()
    operands = [held.get(name, "") for name in re.findall(r"%([\w.-]+)", operands)]
    if operation.endswith("-start"):  # a copy into vector memory, or from it
        return n_bytes(operands[0]) or n_bytes(shape)
    if operation == "custom-call":  # of the kernel, whose pages are the largest of all
        return n_bytes(shape) + sum(sorted(map(n_bytes, operands))[:-1])
    if operation != "fusion":
        return n_bytes(shape) + sum(map(n_bytes, operands))
    return touched(bodies[re.search(r"calls=%?([\w.-]+)", rest)[1]], shape, operands)


def touched(inside: str, shape: str, operands: list[str]) -> float:
    """By a fusion: of what it only gathers or slices from, and of what it updates in place, the part."""
    names = {int(n): name for name, n in re.findall(r"%(\S+) = \S+ parameter\((\d+)\)", inside)}
    updates = re.findall(r"(?:dynamic-update-slice|scatter)\(%([\w.-]+), (.*?)\)", inside)
    total, held = 0.0 if updates else n_bytes(shape), shapes(inside)
    for _, others in updates:
        total += min(n_bytes(held.get(name, "")) for name in re.findall(r"%([\w.-]+)", others))
    for i, operand in enumerate(operands):
        uses = re.findall(rf"= (\S+) ([\w-]+)\((?:[^)]*[ ,])?%{re.escape(names.get(i, '?'))}[,)]", inside)
        parts = [n_bytes(out) for out, kind in uses if kind in ("gather", "dynamic-slice", "slice")]
        if names.get(i) not in [target for target, _ in updates]:
            total += sum(parts) if uses and len(parts) == len(uses) else n_bytes(operand)
    return total


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
