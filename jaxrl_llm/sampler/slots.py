"""Rows and prefixes of the device, and who is in them: what is filled, moved, decoded and harvested between two calls.

Shapes follow the work: as many rows as there are answers to draw, as many columns as the longest of them needs, and
each in few sizes, so that a handful of programs serve a whole run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import core, weights
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request
from jaxrl_llm.sampler.sampling import Draw
from jaxrl_llm.types import expect

if TYPE_CHECKING:
    from jaxrl_llm.sampler.decode import LocalEngine

MIN_COLUMNS = 32  # tokens
MIN_PREFIX = 16  # tokens
HALVINGS = 3  # of the rows, as answers end and none wait
AT_ONCE = (1, 4, 16, 64)  # prompts in one prefill


@dataclass(eq=False)
class ActiveGroup:
    """A request under way."""

    request: Request
    drafts: Sequence[PartialAnswer]
    prefix: int = -1  # where its prompt lies
    own: Any = None  # keys and values of what was begun, when its prompt is prefilled

    def __post_init__(self) -> None:
        self.begun = any(d.open and d.tokens for d in self.drafts)  # there are tokens from an earlier call

    @property
    def left(self) -> int:
        return sum(d.open for d in self.drafts)

    def answers(self) -> Group:
        return tuple(d.answer() for d in self.drafts)


Place = tuple[ActiveGroup, PartialAnswer]  # who has a row, or waits for one


class _Shape(NamedTuple):
    rows: int
    prefixes: int
    size: int  # of a prefix, tokens
    columns: int  # of an answer, tokens


_prefill = jax.jit(core.prefill, static_argnums=0)
_init_prefixes = jax.jit(core.init_prefixes, static_argnums=(0, 1, 2, 3))
_init_own = jax.jit(core.init_own, static_argnums=(0, 1, 2, 3))
_init_answers = jax.jit(core.init_answers, static_argnums=0)
_insert_prefixes = jax.jit(core.insert_prefixes, donate_argnums=0)
_insert_rows = jax.jit(core.insert_rows, donate_argnums=0)
_insert_own = jax.jit(core.insert_own, donate_argnums=0)
_repack_prefixes = jax.jit(core.repack_prefixes, static_argnums=2)  # other shapes: nothing to donate
_repack_own = jax.jit(core.repack_own, static_argnums=3)
_repack_answers = jax.jit(core.repack_answers)
_decode = jax.jit(core.decode_k, static_argnums=(0, 1, 2), donate_argnums=4)


@jax.jit
def _keys(seeds: jax.Array, draws: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key per answer: fold_in(seed, draw, number). Position is folded in by the decoding loop."""
    fold = jax.random.fold_in
    return jax.vmap(lambda seed, draw, number: fold(fold(jax.random.key(seed), draw), number))(seeds, draws, numbers)


def draws_of(drafts: Sequence[PartialAnswer], n: int) -> Draw:
    """How `drafts` are to be drawn, padded to n rows."""
    gather = lambda name, dtype: _padded([getattr(d.request.sampling, name) for d in drafts], n, dtype)
    seeds = _padded([d.request.seed for d in drafts], n, np.uint32)
    places = _padded([d.request.draw for d in drafts], n, np.uint32)
    keys = _keys(seeds, places, _padded([d.number for d in drafts], n, np.uint32))
    return Draw(keys, gather("temperature", np.float32), gather("top_k", np.int32), gather("top_p", np.float32))


def _padded(values: Sequence[Any], n: int, dtype: Any = np.int32, fill: int = 0) -> np.ndarray:
    return np.array([*values, *[fill] * (n - len(values))], dtype)


def power(n: int, least: int = 1) -> int:
    """The least power of two that holds n, `least` at least."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def prefix_of(prompts: Sequence[Sequence[int]], rows: int, size: int) -> np.ndarray:
    """Prompts without their last tokens, [rows,size], right-padded."""
    out = np.zeros((rows, size), np.int32)
    for row, prompt in zip(out, prompts, strict=False):
        row[: len(prompt) - 1] = prompt[:-1]
    return out


class Slots:
    """Rows, prefixes, and who is in them. Row i lies in shard i // (rows / ways)."""

    def __init__(self, engine: LocalEngine):
        exact = engine.max_prompt_tokens > 0 or not engine.exact
        expect(exact, "max_prompt_tokens", engine.max_prompt_tokens, "a positive number for exact")
        self.engine, self.ways = engine, sharding.rows(1, engine.mesh)
        self.most = sharding.rows(engine.slots, engine.mesh)
        self.sizes = [sharding.rows(-(-self.most // 2**i), engine.mesh) for i in range(HALVINGS + 1)]
        self.state: core.DecodeState | None = None
        self.shape, self.lanes = _Shape(0, 0, 0, 0), 1
        self.rows: list[Place | None] = []
        self.prefixes: list[ActiveGroup | None] = []
        self.prefills = 0  # groups whose prompt has gone through the model

    @property
    def busy(self) -> int:
        return sum(x is not None for x in self.rows)

    def _shards(self, places: list) -> list[range]:
        n = len(places) // self.ways
        return [range(s * n, (s + 1) * n) for s in range(self.ways)]

    def _fullest(self, places: list) -> int:
        """Places taken in the shard that has most of them."""
        return max((sum(places[i] is not None for i in shard) for shard in self._shards(places)), default=0)

    # --- shapes

    def _need(self, waiting: Sequence[Place]) -> _Shape:
        """The room that the work needs."""
        e, live = self.engine, [x for x in self.rows if x]
        if e.exact:
            return _Shape(self.most, self.most, power(e.max_prompt_tokens - 1, MIN_PREFIX), _eights(e.max_tokens))
        demand, fullest = min(len(live) + len(waiting), self.most), self._fullest(self.rows)
        rows = min(n for n in self.sizes if n >= demand and n // self.ways >= fullest)
        soon = [*live, *list(waiting)[: rows - len(live)]]
        prefixes = max(-(-len({group for group, _ in soon}) // self.ways), self._fullest(self.prefixes))
        work = [*live, *waiting]  # all: where a shard is full, an answer from further back comes first
        columns = max(min(len(d.tokens) + e.tokens_per_call, d.limit) for _, d in work)
        most = _eights(max(d.limit for _, d in work))
        size = power(max(len(group.request.prompt) for group, _ in work) - 1, MIN_PREFIX)
        return _Shape(rows, self.ways * power(prefixes), size, min(power(columns, MIN_COLUMNS), most))

    def _fit(self, waiting: Sequence[Place]) -> None:
        """Other shapes when the work outgrows them, or when half of the rows would do."""
        need, have = self._need(waiting), self.shape
        if need.rows < have.rows:  # one size at a time, and nothing else with it: few programs
            need = need._replace(rows=max(n for n in self.sizes if n < have.rows))
        need = _Shape(need.rows, *map(max, need[1:], have[1:]))
        e, kv_dtype = self.engine, self.engine.kv_dtype or self.engine.model.dtype
        if self.state is None:
            self.state = core.DecodeState(
                _init_prefixes(e.model, kv_dtype, need.prefixes, need.size),
                _init_own(e.model, kv_dtype, need.rows, need.columns),
                _init_answers(need.rows),
            )
            self.rows, self.prefixes, self.shape = [None] * need.rows, [None] * need.prefixes, need
            return
        state = self.state
        if (need.rows, need.columns) != (have.rows, have.columns):
            source, self.rows = self._moved(self.rows, need.rows)
            state = replace(
                state,
                own=_repack_own(state.own, state.answers.step, source, need.columns),
                answers=_repack_answers(state.answers, source),
            )
        if (need.prefixes, need.size) != (have.prefixes, have.size):
            source, self.prefixes = self._moved(self.prefixes, need.prefixes)
            state = replace(state, prefixes=_repack_prefixes(state.prefixes, source, need.size))
            for i, group in enumerate(self.prefixes):
                if group is not None:
                    group.prefix = i
        self.state, self.shape = state, need

    def _moved(self, places: list, n: int) -> tuple[np.ndarray, list]:
        """For each of n places the old place it is filled from, −1 for none; and who is there. No shard is left."""
        source = []
        for shard in self._shards(places):
            taken = [i for i in shard if places[i] is not None]
            source += taken + [-1] * (n // self.ways - len(taken))
        return np.array(source, np.int32), [None if i < 0 else places[i] for i in source]

    # --- filling

    def fill(self, held: weights.SamplerWeights, waiting: deque[Place]) -> None:
        """Put waiting answers into free rows, in their order; those that find no place stay."""
        if self.engine.exact and (self.busy or not waiting):
            return
        self._fit(waiting)
        if self.engine.exact:
            answers = self.state.answers  # an answer's first token goes to column 0
            self.state = replace(self.state, answers=replace(answers, step=jnp.zeros_like(answers.step)))
        placed, groups, stay = [], [], []
        while waiting and None in self.rows:
            group, draft = waiting.popleft()
            row = self._place(group)
            if row is None:
                stay.append((group, draft))
                continue
            self.rows[row] = group, draft
            placed.append((row, draft, group))
            if group not in groups:
                groups.append(group)
        waiting.extendleft(reversed(stay))
        fresh = [g for g in groups if not g.begun]
        self._prefill(held, [g for g in fresh if g.own is None])
        self._insert([(row, draft) for row, draft, group in placed if not group.begun])
        for group in groups:
            if group.begun:
                self._continue(held, group, {d.number: row for row, d, g in placed if g is group})

    def _place(self, group: ActiveGroup) -> int | None:
        """A free row in the shard of the group's prompt; of a new one in the emptiest shard, where it gets a place."""
        free = lambda places, shard: [i for i in shard if places[i] is None]
        shards = list(zip(self._shards(self.rows), self._shards(self.prefixes), strict=True))
        if group.prefix >= 0:
            shards = [s for s in shards if group.prefix in s[1]]
        else:
            shards = [s for s in shards if free(self.prefixes, s[1])]
        rows, prefixes = max(shards, key=lambda s: len(free(self.rows, s[0])), default=((), ()))
        found = free(self.rows, rows)
        if not found:
            return None
        if group.prefix < 0:
            group.prefix = free(self.prefixes, prefixes)[0]
            self.prefixes[group.prefix] = group
        return found[0]

    def _prefill(self, held: weights.SamplerWeights, groups: list[ActiveGroup]) -> None:
        """The prompts of these groups, once each; so many at a time that there are few programs."""
        for group in groups:
            group.own = ()
        while groups:
            n = 1 if self.engine.exact else max(m for m in AT_ONCE if m <= len(groups))
            part, groups = groups[:n], groups[n:]
            longest = max(len(g.request.prompt) for g in part)
            size = self.shape.size if self.engine.exact else power(longest - 1, MIN_PREFIX)
            self._fill_prefixes(held, part, size, np.zeros((sharding.rows(n, self.engine.mesh), 1, 0), np.int32))

    def _fill_prefixes(
        self, held: weights.SamplerWeights, groups: list[ActiveGroup], size: int, begun: np.ndarray
    ) -> core.Prefilled:
        """Prefill and put in place; groups and `begun` are padded to as many rows as that has."""
        prompts, n = [g.request.prompt for g in groups], len(begun)
        lengths = _padded([len(p) - 1 for p in prompts], n)
        filled = _prefill(self.engine.model, held.params, prefix_of(prompts, n, size), lengths, begun)
        into = _padded([g.prefix for g in groups], n, fill=len(self.prefixes))
        prefixes = _insert_prefixes(self.state.prefixes, filled.prefix, lengths, into)
        self.state = replace(self.state, prefixes=prefixes)
        self.prefills += len(groups)
        return filled

    def _insert(self, placed: list[tuple[int, PartialAnswer]]) -> None:
        """Answers into their rows; always as many rows as there are, so that there is one program."""
        n = len(self.rows)
        if placed:
            rows = rows_of(placed, n, n)
            self.state = replace(self.state, answers=_insert_rows(self.state.answers, rows))

    def _continue(self, held: weights.SamplerWeights, group: ActiveGroup, rows: dict[int, int]) -> None:
        """Answers that were begun: their tokens go through the model once, together, beside their prompt."""
        prompt, ways, past = group.request.prompt, self.ways, len(self.rows)
        if group.own is None:
            said = [d.tokens if d.open else [] for d in group.drafts]
            begun = np.zeros((ways, len(said), power(max(map(len, said)), MIN_PREFIX)), np.int32)
            for g, tokens in enumerate(said):
                begun[0, g, : len(tokens)] = [prompt[-1], *tokens][: len(tokens)]
            filled = self._fill_prefixes(held, [group], power(len(prompt) - 1, MIN_PREFIX), begun)
            group.own = jax.tree.map(lambda x: x[: len(said)], filled.own)
        placed = [(rows.get(d.number, past), d) for d in group.drafts]
        step = self.state.answers.step
        own = _insert_own(self.state.own, step, rows_of(placed, len(placed), past), group.own)
        self.state = replace(self.state, own=own)
        self._insert([(row, draft) for row, draft in placed if row < past])

    # --- drawing

    def step(self, held: weights.SamplerWeights) -> list[ActiveGroup]:
        """One call of the decoding loop. Returns the groups that are done; their rows and prefixes are free again."""
        e, steps = self.engine, self.engine.tokens_per_call
        lanes, place = self._lanes()
        forced = np.full((len(self.rows), steps), -1, np.int32)
        for i, occupant in enumerate(self.rows):
            if occupant and occupant[1].script:
                script = occupant[1].script[len(occupant[1].tokens) :][:steps]
                forced[i, : len(script)] = script
        filtered = any(x[0].request.sampling.filtered for x in self.rows if x)
        static = (e.model, e.tokenizer.eos_ids, filtered)
        self.state, drawn = _decode(*static, held.params, self.state, lanes, place, forced)
        tokens, logp, count, live = jax.device_get(drawn)
        cut = False
        for i, occupant in enumerate(self.rows):
            if occupant is None:
                continue
            group, draft = occupant
            if count[i]:
                draft.take(tokens[i, : count[i]].tolist(), logp[i, : count[i]].tolist(), held.version, e.tokenizer)
            if not draft.open:
                self.rows[i] = None
                cut |= bool(live[i])
        if cut:  # by a stop string
            live = live & np.array([x is not None for x in self.rows])
            answers = self.state.answers
            answers = replace(answers, live=jax.device_put(live, answers.live.sharding))
            self.state = replace(self.state, answers=answers)
        read = [x[0] for x in self.rows if x]  # by a row too of a group that another thread has just cancelled
        done = [g for g in self.prefixes if g is not None and not g.left and g not in read]
        for group in done:
            self.prefixes[group.prefix] = None
        return done

    def _lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """Which rows read each prefix, and each row's lane (see `cache.View`)."""
        n, r = len(self.rows) // self.ways, len(self.prefixes) // self.ways
        readers: list[list[int]] = [[] for _ in self.prefixes]
        for i, occupant in enumerate(self.rows):
            if occupant is not None:
                readers[occupant[0].prefix].append(i)
        self.lanes = max(self.lanes, *(power(g.request.group) for g in self.prefixes if g is not None))
        lanes = np.zeros((self.ways, r, self.lanes), np.int32)
        place = np.zeros((self.ways, n), np.int32)
        for p, rows in enumerate(readers):
            for l, i in enumerate(rows):
                lanes[p // r, p % r, l] = i % n
                place[i // n, i % n] = (p % r) * self.lanes + l
        return lanes, place


def rows_of(placed: Sequence[tuple[int, PartialAnswer]], n: int, past: int) -> core.Rows:
    """Rows to be filled with answers, padded to n with the row number `past`, which is dropped."""
    drafts = [draft for _, draft in placed]
    return core.Rows(
        _padded([row for row, _ in placed], n, fill=past),
        _padded([d.tokens[-1] if d.tokens else d.request.prompt[-1] for d in drafts], n),
        _padded([len(d.tokens) for d in drafts], n),
        _padded([d.limit for d in drafts], n),
        draws_of(drafts, n),
    )


def _eights(n: int) -> int:
    return -(-n // 8) * 8
