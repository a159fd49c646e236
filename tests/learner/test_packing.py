"""Rows of the model: however answers lie in them, a token is predicted from its prompt and what is before it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from cases import CONFIG

from jaxrl_llm.learner.packing import Division, bucket, first_fit_decreasing, lay_out, plan, statistics
from jaxrl_llm.types import EOS, Prompt, Rollouts

P, G = 5, 3
PROMPT_LENGTHS = np.array([3, 1, 9, 2, 4], np.int32)
LENGTHS = np.array([4, 1, 6, 2, 21, 3, 5, 5, 1, 6, 2, 4, 1, 1, 13], np.int32)


def rollouts(prompt_lengths=PROMPT_LENGTHS, lengths=LENGTHS):
    """Every token has an id of its own, and what pads is 7."""
    p, b = len(prompt_lengths), len(lengths)
    prompts, tokens = np.full((p, 12), 7, np.int32), np.full((b, 32), 7, np.int32)
    for i, n in enumerate(prompt_lengths):
        prompts[i, :n] = 1000 + 100 * i + np.arange(n)
    for i, n in enumerate(lengths):
        tokens[i, :n] = 5000 + 100 * i + np.arange(n)
    problems, texts = tuple(Prompt(i, "") for i in range(p)), ("",) * b
    logp, finish = np.zeros(tokens.shape, np.float32), np.full(b, EOS)
    return Rollouts(problems, prompts, prompt_lengths, tokens, logp, lengths, finish, texts, np.arange(p))


def read(rows, cut, given, padded):
    """(answer, t) → (tokens seen, their positions, target), by walking the rows as attention does."""
    x, layout, found = rows.inputs, rows.inputs.layout, {}
    size, per_shard = x.tokens.shape[3], x.tokens.shape[2] // cut.shards
    slots, group = x.answers.shape[2] // cut.shards, given.group_size
    for u, m, d in itertools.product(range(cut.mini_batches), range(cut.micro_batches), range(cut.shards)):
        for slot in range(slots):
            number = x.answers[u, m, d * slots + slot]
            for t in range(layout.length):
                i = x.put[u, m, d, slot * layout.length + t]
                if i == x.take.shape[3]:
                    continue
                assert x.unput[u, m, d, i] == slot * layout.length + t
                place = x.take[u, m, d, i]
                assert x.untake[u, m, d, place] == i
                row, at = divmod(place, size)
                r = d * per_shard + row
                if layout.group:
                    width = (size - layout.prefix) // layout.group
                    own = layout.prefix + (at - layout.prefix) // width * width
                    seen = [*range(x.segments[u, m, r]), *range(own, at + 1)]
                else:
                    seen = [j for j in range(at + 1) if x.segments[u, m, r, j] == x.segments[u, m, r, at]]
                assert number < padded
                q, g = divmod(number, group)
                answer = (q * cut.mini_batches + u) * group + g  # a mini-batch takes every U-th prompt
                sequence = x.tokens[u, m, r, seen].tolist(), x.positions[u, m, r, seen].tolist()
                found[int(answer), t] = (*sequence, int(x.targets[u, m, d, i]))
                assert rows.where[u, number] == (m * cut.shards + d) * slots + slot
    return found


CUTS = [
    Division(1, 1, 1),
    Division(1, 2, 1),
    Division(5, 1, 1),
    Division(2, 2, 4, row_tokens=100),
    Division(1, 3, 2, multiple=128),
    Division(2, 1, 8),
]


@pytest.mark.parametrize("layout", ["grouped", "packed", "auto"])
@pytest.mark.parametrize("cut", CUTS, ids=lambda c: f"{c.mini_batches}x{c.micro_batches}x{c.shards}")
def test_a_token_sees_its_prompt_and_its_answer_so_far_and_nothing_else(layout, cut):
    cut, given = replace(cut, layout=layout), rollouts()
    planned, padded = plan(PROMPT_LENGTHS - 1, LENGTHS, CONFIG.model, cut), -(-P // cut.mini_batches) * G
    rows = lay_out(given, planned, cut, padded)
    found = read(rows, cut, given, padded)
    assert len(found) == LENGTHS.sum()
    for (i, t), (tokens, positions, target) in found.items():
        n = PROMPT_LENGTHS[i // G]
        assert tokens == [*given.prompt_tokens[i // G, :n].tolist(), *given.tokens[i, :t].tolist()]
        assert positions == list(range(n + t))
        assert target == given.tokens[i, t]
    size = rows.inputs.tokens.shape[3]
    assert size % cut.multiple == 0
    assert size <= cut.row_tokens or not cut.row_tokens
    assert layout == "auto" or (rows.inputs.layout.group > 0) == (layout == "grouped")


def test_prompts_of_one_token_need_no_prefix():
    ones = np.ones(P, np.int32)
    cut, given = Division(layout="grouped"), rollouts(ones)
    rows = lay_out(given, plan(ones - 1, LENGTHS, CONFIG.model, cut), cut, P * G)
    assert rows.inputs.layout.prefix == 0
    assert len(read(rows, cut, given, P * G)) == LENGTHS.sum()


@pytest.mark.parametrize(
    ("prompt", "lengths", "packed"),
    [(500, [40, 40, 40, 40], False), (4, [200, 10, 12, 9], True)],
    ids=["long prompts", "ragged answers"],
)
def test_the_layout_with_fewer_operations_is_taken(prompt, lengths, packed):
    prefixes, lengths = np.full(6, prompt), np.array(lengths * 6)
    both = [plan(prefixes, lengths, CONFIG.model, Division(layout=x)).flops for x in ("grouped", "packed")]
    assert (both[1] < both[0]) == packed
    taken = plan(prefixes, lengths, CONFIG.model, Division())
    assert taken.flops == min(both)
    assert (taken.layout.group == 0) == packed


def test_a_group_is_split_when_there_are_fewer_prompts_than_shards():
    planned = plan(np.array([20]), np.full(8, 40), CONFIG.model, Division(1, 2, 4, "grouped"))
    assert planned.layout.group == 1
    assert planned.rows == 1


def test_a_row_that_cannot_hold_an_answer():
    with pytest.raises(ValueError, match="learner.row_tokens is 20; expected at least 21"):
        plan(np.array([3]), np.array([2, 18]), CONFIG.model, Division(row_tokens=20))


def test_first_fit_decreasing_by_hand():
    boxes = first_fit_decreasing(np.array([2, 6, 5, 3, 4, 10]), 10)
    assert boxes == [[5], [1, 4], [2, 3, 0]]


def test_statistics_by_hand():
    lengths, prefixes = np.array([10, 20, 30, 20]), np.array([6, 4], np.int32)
    cut = Division(layout="grouped")
    given = rollouts(prefixes + 1, lengths.astype(np.int32))
    of_grouped = statistics(plan(prefixes, lengths, CONFIG.model, cut), given)
    # a row: 16 tokens for the prompt and 2 × 32 for its answers
    assert of_grouped == {
        "packing/efficiency": (80 + 10) / (2 * 80),
        "packing/packed": 0.0,
        "packing/rows": 2.0,
        "packing/row_tokens": 80.0,
    }
    cut = Division(layout="packed")
    of_packed = statistics(plan(prefixes, lengths, CONFIG.model, cut), given)
    # segments of 16, 26, 34 and 24 tokens in rows of 48: 34, 26 + 16, 24
    assert of_packed["packing/efficiency"] == pytest.approx((80 + 20) / (3 * 48))
    assert (of_packed["packing/rows"], of_packed["packing/row_tokens"]) == (3.0, 48.0)


def test_bucket():
    assert [bucket(n) for n in (0, 1, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 97)] == [
        16, 16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 128,
    ]  # fmt: skip
    assert bucket(33, 32) == 48
    assert [bucket(n, 1) for n in (1, 2, 3, 4, 5, 7)] == [1, 2, 3, 4, 6, 8]
    sizes = [bucket(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(n <= s for n, s in enumerate(sizes, 1))
    assert all(s < 1.5 * n for n, s in enumerate(sizes, 1) if n > 16)
    assert len(set(sizes)) == 18
    assert all(bucket(s) == s for s in set(sizes))
