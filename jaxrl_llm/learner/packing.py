"""Which answers share a row of the model: on the host, in NumPy.

A batch is cut into U mini-batches of whole prompts, each of them into M micro-batches, each of these over the D shards
of the mesh: U·M·D bins of r rows of N tokens. There are two layouts of a row:

    grouped    [prompt | answer | answer | …]                    answers of one prompt, which is computed once for them
    packed     [prompt | answer][prompt | answer]…[padding]      segments that do not see each other

`grouped` is best where prompts are long, `packed` where answers differ in length; the one that takes fewer operations
is taken, batch by batch. Rows are what micro-batches and the mesh divide: a group may be split over several, with its
prompt repeated, and rows without answers fill up the last bins. Sizes are rounded up to few, so that few programs are
compiled. Log-probs leave a row for [B,T] by index, before any loss sees them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from jaxrl_llm.arrays import Layout, ModelInput, Rows
from jaxrl_llm.models.shape import ModelConfig
from jaxrl_llm.types import Rollouts, expect

Bins = list[list[np.ndarray]]  # for each bin its rows, for each row its answers


def bucket(n: int, smallest: int = 16) -> int:
    """The least of 16, 24, 32, 48, 64, … that holds n: few shapes, hence few compilations, at most a third wasted.

    smallest: a power of two to begin with, 1 for 1, 2, 3, 4, 6, 8, ….
    """
    size = smallest
    while size < n:
        size = max(size * 3 // 2, 2) if size & (size - 1) == 0 else size * 4 // 3
    return size


@dataclass(frozen=True)
class Division:
    """Into how many pieces a batch is cut, and what rows may be like."""

    mini_batches: int = 1  # U
    micro_batches: int = 1  # M
    shards: int = 1  # D
    layout: str = "auto"  # or grouped, packed
    row_tokens: int = 0  # that a row may have at most; 0: of grouped rows any number, of packed ones the longest answer
    multiple: int = 1  # of which N (and, in grouped rows, the prompt's tokens) must be one, for the attention's kernel


@dataclass(frozen=True)
class Plan:
    """A layout, the bins, and the operations it takes."""

    layout: Layout
    size: int  # N
    bins: Bins
    rows: int  # r, of a bin
    answers: int  # that a bin has room for
    trained: int  # generated tokens that a bin has room for
    flops: float


def first_fit_decreasing(sizes: Int[np.ndarray, " B"], capacity: int) -> list[list[int]]:
    """Numbers of the things in each box of this capacity: the largest first, each into the first box with room."""
    free, boxes = np.full(len(sizes), capacity), []
    for i in np.argsort(-sizes, kind="stable"):
        box = int(np.argmax(free >= sizes[i]))
        if box == len(boxes):
            boxes.append([])
        boxes[box].append(int(i))
        free[box] -= sizes[i]
    return boxes


def plan(prefixes: Int[np.ndarray, " P"], lengths: Int[np.ndarray, " B"], model: ModelConfig, cut: Division) -> Plan:
    """The plan that takes the fewest operations, for prompts of `prefixes` tokens without their last and answers of
    `lengths`. Raises ValueError when a row of `row_tokens` does not hold the longest answer with its prompt.
    """
    group = len(lengths) // len(prefixes)
    sizes, limit = np.repeat(prefixes, group) + lengths, cut.row_tokens or math.inf
    expect(sizes.max() <= limit, "learner.row_tokens", cut.row_tokens, f"at least {sizes.max()}, an answer's")
    whole = lambda n: -(-bucket(n) // cut.multiple) * cut.multiple if n else 0
    prefix, answer, length = whole(int(prefixes.max())), whole(int(lengths.max())), bucket(int(lengths.max()))
    answers = np.arange(len(lengths)).reshape(-1, group)
    parts, plans = [answers[u :: cut.mini_batches] for u in range(cut.mini_batches)], []
    if cut.layout != "packed":
        for g in sorted({-(-group // k) for k in range(1, group + 1)}):
            rows = [[p[i : i + g] for p in part for i in range(0, group, g)] for part in parts]
            if g == 1 or prefix + g * answer <= limit:
                plans.append(_planned(Layout(length, prefix, g), prefix + g * answer, rows, sizes, lengths, model, cut))
    if cut.layout != "grouped":
        size = whole(int(sizes.max()))
        while not plans or plans[-1].layout.group or size <= cut.row_tokens:
            rows = [[part.ravel()[box] for box in first_fit_decreasing(sizes[part.ravel()], size)] for part in parts]
            plans.append(_planned(Layout(length), size, rows, sizes, lengths, model, cut))
            size *= 2
    return min(plans, key=lambda p: p.flops)


def _planned(
    layout: Layout, size: int, rows: list[list[np.ndarray]], sizes: np.ndarray, lengths: np.ndarray,
    model: ModelConfig, cut: Division,
) -> Plan:  # fmt: skip
    """Rows of each mini-batch dealt to its bins, the fullest first, and what that costs."""
    n_bins, bins = cut.micro_batches * cut.shards, []
    for of_part in rows:
        if not layout.group:  # grouped rows are of one size whatever is in them
            of_part = sorted(of_part, key=lambda row: -sizes[row].sum())
        bins += [of_part[i::n_bins] for i in range(n_bins)]
    most = max(len(rows) for rows in bins)
    per_bin = most if layout.group else bucket(most, 1)
    answers = per_bin * layout.group or bucket(max(sum(map(len, rows)) for rows in bins), 1)
    room = per_bin * (size - layout.prefix)
    while room % 2 == 0 and room // 2 >= max(sum(int(lengths[row].sum()) for row in rows) for rows in bins):
        room //= 2  # in halves, so that there are few sizes
    pairs = size * size / 2
    if layout.group:
        answer = (size - layout.prefix) // layout.group
        pairs = layout.prefix**2 / 2 + layout.group * answer * (layout.prefix + answer / 2)
    flops = per_bin * (size * model.flops_per_token + pairs * model.flops_per_pair) + room * model.flops_of_head
    return Plan(layout, size, bins, per_bin, answers, room, len(bins) * flops)


def lay_out(answers: Rollouts, planned: Plan, cut: Division, padded: int) -> Rows:
    """The arrays that the model reads. padded: answers of a mini-batch with those that only fill up the batch.

    Here, and nowhere else, targets are shifted against inputs by one token: an answer's inputs are the prompt's last
    token and then the answer without its last, its targets the answer.
    """
    layout, size, (U, M, D) = planned.layout, planned.size, (cut.mini_batches, cut.micro_batches, cut.shards)
    n_bins, room, length = len(planned.bins), planned.rows * size, layout.length
    placed = [
        (i, b, r, k) for b, rows in enumerate(planned.bins) for r, row in enumerate(rows) for k, i in enumerate(row)
    ]
    of, in_bin, in_row, number = np.array(
        placed, np.int64
    ).T  # of each answer: itself, its bin, its row there, its place
    prompt, n = of // answers.group_size, answers.lengths[of].astype(np.int64)
    before = answers.prompt_lengths[prompt].astype(np.int64) - 1
    row = (in_bin * planned.rows + in_row) * size  # where its row begins
    if layout.group:
        start, first = row, row + layout.prefix + number * ((size - layout.prefix) // layout.group)
    else:
        new_row = number == 0
        behind = _starts(before + n, new_row)
        start, first = row + behind, row + behind + before
    (a, t), (b, s) = _ragged(n), _ragged(before)  # of each generated token, and of each token of a prefix
    shown = np.where(t == 0, answers.prompt_tokens[prompt[a], before[a]], answers.tokens[of[a], np.maximum(t - 1, 0)])
    at, at_prefix = first[a] + t, start[b] + s
    flat = lambda fill=0, width=room: np.full(n_bins * width, fill, np.int32)
    tokens, positions, segments = flat(), flat(), flat()
    tokens[at], positions[at], segments[at] = shown, before[a] + t, number[a] + 1
    tokens[at_prefix], positions[at_prefix], segments[at_prefix] = answers.prompt_tokens[prompt[b], s], s, number[b] + 1
    prefix_lengths = np.zeros(n_bins * planned.rows, np.int32)
    prefix_lengths[row // size] = before
    trained, of_slot = planned.trained, planned.answers * length
    slot = _starts(np.ones_like(n), np.diff(in_bin, prepend=-1) > 0)  # of the answer among those of its bin
    i = _starts(n, np.diff(in_bin, prepend=-1) > 0)[a] + t  # of the token among those of its bin
    begin, aligned = in_bin[a], slot[a] * length + t
    take, untake, targets = flat(room, trained), flat(trained), flat(0, trained)
    put, unput = flat(trained, of_slot), flat(of_slot, trained)
    take[begin * trained + i], untake[at], targets[begin * trained + i] = at - begin * room, i, answers.tokens[of[a], t]
    put[begin * of_slot + aligned], unput[begin * trained + i] = i, aligned
    mini, group = in_bin // (M * D), answers.group_size
    within = (prompt // U) * group + of % group  # of the answer in its mini-batch
    there, where = flat(padded, planned.answers), np.full((U, padded), M * D * planned.answers, np.int32)
    there[in_bin * planned.answers + slot] = within
    where[mini, within] = in_bin % (M * D) * planned.answers + slot
    rows, shards = (lambda x: x.reshape(U, M, D * planned.rows, -1)), (lambda x: x.reshape(U, M, D, -1))
    given = prefix_lengths.reshape(U, M, -1) if layout.group else rows(segments)
    places = [shards(x) for x in (take, untake, targets, put, unput)]
    return Rows(ModelInput(rows(tokens), rows(positions), given, *places, there.reshape(U, M, -1), layout), where)


def _ragged(n: Int[np.ndarray, " A"]) -> tuple[np.ndarray, np.ndarray]:
    """For n = 2, 3: [0 0 1 1 1] and [0 1 0 1 2]."""
    owner = np.repeat(np.arange(len(n)), n)
    return owner, np.arange(len(owner)) - (np.cumsum(n) - n)[owner]


def _starts(n: Int[np.ndarray, " A"], new: np.ndarray) -> np.ndarray:
    """The sum of n over those before, since the last that is `new`."""
    before = np.cumsum(n) - n
    return before - np.maximum.accumulate(np.where(new, before, 0))


def statistics(planned: Plan, answers: Rollouts) -> dict[str, float]:
    """What the layout was, and how much of what is computed is tokens: prompts count as often as they are computed."""
    rows, group = planned.rows * len(planned.bins), answers.group_size
    before = answers.prompt_lengths - 1
    prompts = [(before[row[0] // group] if planned.layout.group else before[row // group].sum()) for b in planned.bins
               for row in b]  # fmt: skip
    tokens = float(answers.lengths.sum() + np.sum(prompts))
    return {
        "packing/efficiency": tokens / (rows * planned.size),
        "packing/packed": float(not planned.layout.group),
        "packing/rows": float(rows),
        "packing/row_tokens": float(planned.size),
    }
