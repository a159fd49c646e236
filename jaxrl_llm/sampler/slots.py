"""Rows and prefixes of the device, and whose they are: what is filled, moved, decoded and harvested between two calls.

Shapes follow the work, upwards at once and downwards when less has been needed for a while: as many rows as there are
answers to draw, as many columns as the longest of them needs, and each in few sizes, so that a handful of programs
serve a whole run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import core
from jaxrl_llm.sampler.page_sizes import power_of_two
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request
from jaxrl_llm.sampler.sampling import Draw
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.types import expect

MIN_COLUMNS = 32  # tokens
MIN_PREFIX = 16  # tokens
HALVINGS = 3  # of the rows, as answers end and none wait
AT_ONCE = (1, 4, 16, 64)  # prompts in one prefill
PERIOD = 64  # calls of the decoding loop; shapes stay as large as this one or the period before has needed them


def check_sizes(config: Any) -> None:
    """ValueError if slots cannot be made for this SlotConfig or `decode.LocalEngine`."""
    for name in ("slots", "max_tokens", "tokens_per_call"):
        expect(getattr(config, name) >= 1, name, getattr(config, name), "at least 1")
    sized = config.max_prompt_tokens > 0 or not (config.exact or config.cache == "pages")
    expect(sized, "max_prompt_tokens", config.max_prompt_tokens, "a positive number for exact and for pages")
    expect(config.cache in ("auto", "ring", "pages"), "cache", config.cache, "auto, ring or pages")
    for name in ("kv_tokens", "page_tokens"):
        expect(getattr(config, name) >= 0, name, getattr(config, name), "0 or a positive number")
    expect(config.prefill_tokens >= 1, "prefill_tokens", config.prefill_tokens, "at least 1")


@dataclass(frozen=True)
class SlotConfig:
    """What slots need to know of the engine that owns them; a `decode.LocalEngine` has these fields too."""

    model: ModelConfig
    tokenizer: Tokenizer
    slots: int  # answers decoded at once
    max_prompt_tokens: int  # 0: any
    max_tokens: int  # per answer
    tokens_per_call: int  # decoding steps between two looks from the host
    kv_dtype: str = ""  # float32, bfloat16 or int8; that of the activations if left out
    exact: bool = False  # see `decode.LocalEngine`
    mesh: Mesh | None = None
    record_experts: bool = False  # see `decode.LocalEngine`
    cache: str = "auto"  # see `decode.LocalEngine`, also for the next three
    kv_tokens: int = 0
    page_tokens: int = 0
    prefill_tokens: int = 4096

    __post_init__ = check_sizes


@dataclass(eq=False)
class ActiveGroup:
    """A request whose answers are being drawn, or wait for rows."""

    request: Request
    answers: Sequence[PartialAnswer]
    prefix: int = -1  # the number of its prompt among the prefixes; −1: not on the device
    suffixes: Any = None  # keys and values of begun answers; (): computed with none begun; None: not yet prefilled

    def __post_init__(self) -> None:
        self.begun = any(a.open and a.tokens for a in self.answers)  # there are tokens from an earlier call
        for answer in self.answers:
            answer.group = self

    @property
    def is_open(self) -> bool:
        """Whether any answer has more to draw."""
        return any(a.open for a in self.answers)

    def result(self) -> Group:
        return tuple(a.answer() for a in self.answers)


class _Shape(NamedTuple):
    rows: int
    prefixes: int
    size: int  # of a prefix, tokens
    columns: int  # of an answer, tokens
    lanes: int  # of a prefix


_prefill = jax.jit(core.prefill, static_argnums=0)
_init = jax.jit(core.init, static_argnums=range(6))
_insert_prefixes = jax.jit(core.insert_prefixes, donate_argnums=0)
_insert_rows = jax.jit(core.insert_rows, donate_argnums=0)
_insert_suffixes = jax.jit(core.insert_suffixes, donate_argnums=0)
_repack_prefixes = jax.jit(core.repack_prefixes, static_argnums=2)  # other shapes: nothing to donate
_repack_suffixes = jax.jit(core.repack_suffixes, static_argnums=3)
repack_answers = jax.jit(core.repack_answers)
_both = jax.jit(jnp.logical_and)  # by jit, which keeps where the rows are: `device_put` would make new programs of all
_decode = jax.jit(core.decode_k, static_argnums=(0, 1, 2, 8), donate_argnums=4)


@jax.jit
def _keys(seeds: jax.Array, draws: jax.Array, numbers: jax.Array) -> jax.Array:
    """A key for each answer: fold_in(seed, draw, number). The decoding loop folds in the token's position."""
    fold = jax.random.fold_in
    return jax.vmap(lambda seed, draw, number: fold(fold(jax.random.key(seed), draw), number))(seeds, draws, numbers)


def _padded(values: Collection[Any], n: int, dtype: Any = np.int32, fill: int = 0) -> np.ndarray:
    return np.array([*values, *[fill] * (n - len(values))], dtype)


def _rows_of(answers: dict[int, PartialAnswer], n: int) -> core.Rows:
    """Answers to be inserted into these of n rows. Padded to n, so that there is one program."""
    partials = answers.values()
    requests = [a.request for a in partials]
    identity = [r.seed for r in requests], [r.draw for r in requests], [a.number for a in partials]
    keys = _keys(*(_padded(x, n, np.uint32) for x in identity))
    sampling = lambda name, dtype: _padded([getattr(r.sampling, name) for r in requests], n, dtype)
    return core.Rows(
        _padded(answers, n, fill=n),
        _padded([a.tokens[-1] if a.tokens else a.request.prompt[-1] for a in partials], n),
        _padded([len(a.tokens) for a in partials], n),
        _padded([a.limit for a in partials], n),
        Draw(keys, sampling("temperature", np.float32), sampling("top_k", np.int32), sampling("top_p", np.float32)),
    )


# --- of slots with any cache


def inserted(state: Any, answers: dict[int, PartialAnswer], rows: int) -> core.Answers:
    """The device's rows once these answers are in them."""
    return _insert_rows(state.answers, state.step, _rows_of(answers, rows))


def of_shards(entries: list, shards: int, taken: bool = True) -> list[list[int]]:
    """For each shard the numbers of its rows, or prefixes, that are taken; or of those that are free."""
    n = len(entries) // shards
    ranges = [range(s * n, (s + 1) * n) for s in range(shards)]
    return [[i for i in shard if (entries[i] is not None) == taken] for shard in ranges]


def moved(entries: list, n: int, shards: int) -> tuple[np.ndarray, list]:
    """For each of n new rows, or prefixes, the old one in its shard that it comes from, or −1; and whose it is."""
    source = [i for taken in of_shards(entries, shards) for i in taken + [-1] * (n // shards - len(taken))]
    return np.array(source, np.int32), [None if i < 0 else entries[i] for i in source]


def forced(rows: Sequence[PartialAnswer | None], steps: int) -> np.ndarray:
    """The tokens that scripts want next, −1 where they are to be drawn."""
    out = np.full((len(rows), steps), -1, np.int32)
    for i, answer in enumerate(rows):
        if answer and answer.script:
            script = answer.script[len(answer.tokens) :][:steps]
            out[i, : len(script)] = script
    return out


def harvest(
    rows: list[PartialAnswer | None], drawn: core.Drawn, answers: core.Answers, version: int, tokenizer: Tokenizer
) -> tuple[list[PartialAnswer], core.Answers]:
    """What was drawn goes to the answers. Those that have ended, whose rows are free now, and the device's rows."""
    tokens, logp, count, live, experts = jax.device_get(drawn)
    ended, stopped = [], False  # by the host, some answer that the device would go on with
    for i, answer in enumerate(rows):
        if answer is None:
            continue
        if n := count[i]:
            routed = None if experts is None else experts[i, :n].copy()  # and not a view that keeps them all
            answer.take(tokens[i, :n].tolist(), logp[i, :n].tolist(), version, tokenizer, routed)
        if not answer.open:
            rows[i] = None
            ended.append(answer)
            stopped |= bool(live[i])
    return ended, only_taken(rows, answers) if stopped else answers


def only_taken(rows: list[PartialAnswer | None], answers: core.Answers) -> core.Answers:
    """The device's rows, of which those that nobody has are not drawn for."""
    return answers._replace(live=_both(answers.live, np.array([x is not None for x in rows])))


class Slots:
    """Rows, prefixes, and whose they are. Both are split alike over D shards: row i lies in shard i // (rows / D)."""

    def __init__(self, config: SlotConfig):
        self.config, self.shards = config, sharding.rows(1, config.mesh)
        self.max_rows = sharding.rows(config.slots, config.mesh)
        self.row_sizes = [sharding.rows(-(-self.max_rows // 2**i), config.mesh) for i in range(HALVINGS + 1)]
        self.state: core.DecodeState | None = None
        self.shape = _Shape(0, 0, 0, 0, 1)
        self.peaks = deque([self.shape], maxlen=2)  # what this period and the one before have needed at most
        self.calls = 0  # of the decoding loop
        self.rows: list[PartialAnswer | None] = []
        self.prefixes: list[ActiveGroup | None] = []
        self.prefills = 0  # groups whose prompt has gone through the model
        self.yielded = 0  # answers that had to make room: none, in a ring

    @property
    def busy(self) -> int:
        """Rows that are taken."""
        return sum(x is not None for x in self.rows)

    # --- shapes

    def _need(self, waiting: Sequence[PartialAnswer]) -> _Shape:
        """The shape that the work needs."""
        c, live = self.config, [x for x in self.rows if x]
        lanes = power_of_two(max((a.request.group for a in (*live, *waiting)), default=1))
        if c.exact:
            size = power_of_two(c.max_prompt_tokens - 1, MIN_PREFIX)
            lanes = max(lanes, self.shape.lanes)
            return _Shape(self.max_rows, self.max_rows, size, -(-c.max_tokens // 8) * 8, lanes)
        demand = min(len(live) + len(waiting), self.max_rows)
        fullest, most_prefixes = (max(map(len, of_shards(x, self.shards))) for x in (self.rows, self.prefixes))
        rows = min(n for n in self.row_sizes if n >= demand and n // self.shards >= fullest)
        soon = [*live, *list(waiting)[: rows - len(live)]]
        prefixes = max(-(-len({a.group for a in soon}) // self.shards), most_prefixes)
        work = [*live, *waiting]  # all: where a shard is full, an answer from further back comes first
        columns = max(min(len(a.tokens) + c.tokens_per_call, a.limit) for a in work)
        most = -(-max(a.limit for a in work) // 8) * 8
        size = power_of_two(max(len(a.request.prompt) for a in work) - 1, MIN_PREFIX)
        columns = min(power_of_two(columns, MIN_COLUMNS), most)
        lanes = min(lanes, power_of_two(rows // self.shards))  # a prompt is read by no more rows than its shard has
        return _Shape(rows, self.shards * power_of_two(prefixes), size, columns, lanes)

    def _wanted(self, waiting: Sequence[PartialAnswer]) -> _Shape:
        """The next shape. Few programs: rows come down by one size at a time, and nothing else with them.

        The rest comes down when answers are to be filled in and two periods have needed at most half of it. A period
        ends when no row is taken, and after PERIOD calls.
        """
        need, have = self._need(waiting), self.shape
        if waiting and (not self.busy or self.calls >= PERIOD):
            self.peaks.append(need)
            self.calls = 0
        self.peaks[-1] = _Shape(*map(max, self.peaks[-1], need))
        peak = map(max, *self.peaks)
        if need.rows < have.rows:
            return _Shape(max(n for n in self.row_sizes if n < have.rows), *map(max, need[1:], have[1:]))
        lower = lambda n, p, h: max(n, p if waiting and 2 * p <= h else h)
        return _Shape(need.rows, *map(lower, need[1:], list(peak)[1:], have[1:]))

    def _fit(self, waiting: Sequence[PartialAnswer]) -> None:
        """Give the device's arrays the shape that is wanted."""
        new, old, c = self._wanted(waiting), self.shape, self.config
        self.shape = new
        if self.state is None:
            sizes = new.prefixes, new.size, new.rows, new.columns
            self.state = _init(c.model, c.kv_dtype or c.model.dtype, *sizes)
            self.rows, self.prefixes = [None] * new.rows, [None] * new.prefixes
            return
        state = self.state
        if (new.rows, new.columns) != (old.rows, old.columns):
            source, self.rows = moved(self.rows, new.rows, self.shards)
            suffixes = _repack_suffixes(state.suffixes, state.step, source, new.columns)
            state = state._replace(suffixes=suffixes, answers=repack_answers(state.answers, source))
        if (new.prefixes, new.size) != (old.prefixes, old.size):
            source, self.prefixes = moved(self.prefixes, new.prefixes, self.shards)
            state = state._replace(prefixes=_repack_prefixes(state.prefixes, source, new.size))
            for i, group in enumerate(self.prefixes):
                if group is not None:
                    group.prefix = i
        self.state = state

    # --- filling

    def fill(self, weights: SamplerWeights, waiting: deque[PartialAnswer]) -> None:
        """Move waiting answers into free rows, in their order; those for which there is no row stay in the queue."""
        if self.config.exact and (self.busy or not waiting):
            return
        self._fit(waiting)
        if self.config.exact:  # an answer's first token goes to column 0
            self.state = self.state._replace(step=jnp.zeros_like(self.state.step))
        filled: dict[int, PartialAnswer] = {}  # rows
        no_row = []
        while waiting and None in self.rows:
            answer = waiting.popleft()
            row = self._free_row(answer.group)
            if row is None:
                no_row.append(answer)
            else:
                self.rows[row] = filled[row] = answer
        waiting.extendleft(reversed(no_row))
        groups = list(dict.fromkeys(answer.group for answer in filled.values()))
        self._prefill(weights, [group for group in groups if not group.begun and group.suffixes is None])
        for group in groups:
            if group.begun:
                self._continue(weights, group, {a.number: row for row, a in filled.items() if a.group is group})
        if filled:
            self.state = self.state._replace(answers=inserted(self.state, filled, len(self.rows)))

    def _free_row(self, group: ActiveGroup) -> int | None:
        """A free row in the shard that has the group's prompt, None if there is none.

        A group whose prompt is not on the device gets a prefix, in the shard with most free rows.
        """
        rows, prefixes = (of_shards(entries, self.shards, False) for entries in (self.rows, self.prefixes))
        if group.prefix >= 0:
            shards = [group.prefix * self.shards // len(self.prefixes)]
        else:
            shards = [s for s in range(self.shards) if prefixes[s]]
        shard = max(shards, key=lambda s: len(rows[s]), default=None)
        if shard is None or not rows[shard]:
            return None
        if group.prefix < 0:
            group.prefix = prefixes[shard][0]
            self.prefixes[group.prefix] = group
        return rows[shard][0]

    def _prefill(self, weights: SamplerWeights, groups: list[ActiveGroup]) -> None:
        """Prefill the prompts of groups of which nothing is begun, in batches of few sizes."""
        while groups:
            n = 1 if self.config.exact else max(m for m in AT_ONCE if m <= len(groups))
            batch, groups = groups[:n], groups[n:]
            self._prefill_batch(weights, batch, np.zeros((sharding.rows(n, self.config.mesh), 1, 0), np.int32))
            for group in batch:
                group.suffixes = ()

    def _prefill_batch(self, weights: SamplerWeights, groups: list[ActiveGroup], fed: np.ndarray) -> core.KeysValues:
        """Fill the groups' prefixes, padded to as many as `fed` has rows. Returns keys and values of what was fed."""
        prompts, n = [g.request.prompt[:-1] for g in groups], len(fed)
        size = self.shape.size if self.config.exact else power_of_two(max(map(len, prompts)), MIN_PREFIX)
        tokens = np.zeros((n, size), np.int32)
        for row, prompt in zip(tokens, prompts, strict=False):
            row[: len(prompt)] = prompt
        lengths = _padded([len(p) for p in prompts], n)
        prefixes, suffixes = _prefill(self.config.model, weights.params, tokens, lengths, fed)
        into = _padded([g.prefix for g in groups], n, fill=len(self.prefixes))
        self.state = self.state._replace(prefixes=_insert_prefixes(self.state.prefixes, prefixes, lengths, into))
        self.prefills += len(groups)
        return suffixes

    def _continue(self, weights: SamplerWeights, group: ActiveGroup, row_of: dict[int, int]) -> None:
        """Put what begun answers were fed into their rows; a whole group and its prompt go through the model once."""
        if group.suffixes is None:
            tokens = [a.tokens if a.open else [] for a in group.answers]
            fed = np.zeros((self.shards, len(tokens), power_of_two(max(map(len, tokens)), MIN_PREFIX)), np.int32)
            for row, ids in zip(fed[0], tokens, strict=True):
                row[: len(ids)] = [group.request.prompt[-1], *ids][: len(ids)]
            suffixes = self._prefill_batch(weights, [group], fed)
            group.suffixes = jax.tree.map(lambda x: x[: len(tokens)], suffixes)
        rows = np.array([row_of.get(a.number, len(self.rows)) for a in group.answers], np.int32)
        count, state = np.array([len(a.tokens) for a in group.answers], np.int32), self.state
        self.state = state._replace(suffixes=_insert_suffixes(state.suffixes, state.step, rows, count, group.suffixes))

    # --- drawing

    def step(self, weights: SamplerWeights) -> list[ActiveGroup]:
        """One call of the decoding loop. Returns the groups that are done; their rows and prefixes are free again."""
        c = self.config
        self.calls += 1
        static = c.model, c.tokenizer.eos_ids, any(a.request.sampling.filtered for a in self.rows if a)
        given = *self._lanes(), forced(self.rows, c.tokens_per_call), c.record_experts
        self.state, drawn = _decode(*static, weights.params, self.state, *given)
        _, answers = harvest(self.rows, drawn, self.state.answers, weights.version, c.tokenizer)
        self.state = self.state._replace(answers=answers)
        # A group that another thread has just cancelled may still have a row, whose prompt has to stay.
        in_rows = [a.group for a in self.rows if a]
        done = [g for g in self.prefixes if g is not None and not g.is_open and g not in in_rows]
        for group in done:
            self.prefixes[group.prefix] = None
        return done

    def _lanes(self) -> tuple[np.ndarray, np.ndarray]:
        """`lanes` and `lane_of_row` of `cache.View`."""
        n, r, width = len(self.rows) // self.shards, len(self.prefixes) // self.shards, self.shape.lanes
        lanes, lane_of_row = np.zeros((self.shards, r, width), np.int32), np.zeros((self.shards, n), np.int32)
        used = [0] * len(self.prefixes)  # lanes of each prefix
        for i, answer in enumerate(self.rows):
            if answer is not None:
                p = answer.group.prefix
                lanes[p // r, p % r, used[p]] = i % n
                lane_of_row[i // n, i % n] = (p % r) * width + used[p]
                used[p] += 1
        return lanes, lane_of_row
