"""What the compiled train step sends between devices, read from its HLO."""

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest

from jaxrl_llm.learner.packing import Division
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.parallel import sharding

BENCHMARKS = Path(__file__).parents[2] / "experiments" / "benchmarks"
MODEL = ModelConfig(40, layers=1, width=16, heads=2, kv_heads=1, head_width=8, mlp_width=32, tied_head=False)
HEAD, SHARD = "f32[16,40]", "f32[2,40]"  # the shapes of no other array; whole, and on one of 8 devices


@cache
def benchmark(name):
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_the_head_is_gathered_twice_and_its_gradient_reduced_once_a_micro_batch(micro_batches):
    memory, cut = benchmark("memory"), Division(1, micro_batches, 8, "grouped")
    rollouts, tokens = memory.answers(prompts=32, group=1, prompt_tokens=5, answer_tokens=8), 32 // micro_batches
    step = memory.lowered(MODEL, rollouts, cut, sharding.make_mesh(1, 8, 1), chunk=3)
    found = benchmark("tpu_compile").collectives(step.compile().as_text())
    times = lambda kind, shape: sum(x.times for x in found if x.kind == kind and shape in x.shapes)
    assert tokens / 3 > 2  # of a device and micro-batch: several chunks
    assert 1 <= times("all-gather", HEAD) <= 2 * micro_batches
    assert times("all-reduce", HEAD) + times("reduce-scatter", SHARD) == micro_batches


PROGRAM = """
HloModule step

%condition (p: (s32[], f32[6])) -> pred[] {
  %n = s32[]{:T(128)} constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

%body (p: (s32[], f32[6])) -> (s32[], f32[6]) {
  %kernel = f32[6] custom-call(%x), backend_config={"regions": {
}}, metadata={op_name="kernel"}
  %reduced = (f32[6]{0}, bf16[2,3]{1,0}) all-reduce(%x, %y), channel_id=1, replica_groups={{0,1,2},{3,4,5}}
}

%piece.1 (p: bf16[2,4]) -> bf16[8,4] {
  %gather.1 = bf16[8,4] all-gather(%p), channel_id=2, replica_groups=[2,4]<=[8], frontend_attributes={chain_id="0"}
}, execution_thread="other"

%piece.2 (p: bf16[2,4]) -> bf16[8,4] {
  %gather.2 = bf16[8,4] all-gather(%p), channel_id=2, replica_groups=[2,4]<=[8], frontend_attributes={chain_id="0"}
}

ENTRY %main (a: f32[6]) -> f32[6] {
  %loop = (s32[], f32[6]) while(%start), condition=%condition, body=%body
  %one = bf16[8,4] fusion(%a), calls=%piece.1
  %two = bf16[8,4] fusion(%one), calls=%piece.2
  %scattered = f32[5] reduce-scatter(%b), channel_id=1, replica_groups=mesh['a'=2,'b'=3] {'b'}
  %sent = (f32[9], f32[9], u32[]) collective-permute-start(%c), channel_id=4
  %got = f32[9] collective-permute-done(%sent)
}
"""


def test_what_collectives_bring_by_hand():
    found = benchmark("tpu_compile").collectives(PROGRAM)
    assert sorted((x.kind, x.times, x.bytes) for x in found) == [
        ("all-gather", 1, 64 * 3 / 4),  # written twice
        ("all-reduce", 7, pytest.approx((24 + 12) * 2 * 2 / 3)),
        ("collective-permute", 1, 38),  # 36, and half of the u32 that is no operand
        ("reduce-scatter", 1, 20 * 2),
    ]
