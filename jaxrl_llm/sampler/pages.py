"""Slots whose keys and values lie in pages: memory is bounded in tokens, whatever the lengths of the answers.

Pages are taken before a call for all that it may write, and are free again when an answer ends. When none is free the
youngest answer yields: its tokens are kept, and it goes on when there is room. Prompts go through the model in calls of
at most `prefill_tokens`, many in one, long ones in pieces. What an ended answer has left in its pages stays until they
are needed, for the case that it is continued under the same weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxrl_llm.models import attention
from jaxrl_llm.models.kernels import platform
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler import core, page_attention, slots
from jaxrl_llm.sampler.page_sizes import least_tokens, page_size, power_of_two
from jaxrl_llm.sampler.requests import PartialAnswer, Request
from jaxrl_llm.sampler.slots import ActiveGroup, SlotConfig, Slots
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.types import LENGTH, expect

SPARE = 0.85  # of a device's free memory that pages may have; the rest is for what a call computes with
SHORT = 1024  # tokens of a prompt and its answer for which the ring is as good
PART = 16  # of `prefill_tokens`, for which there is a program too: for up to four such calls one of them all is dearer
FEWER = 4  # times fewer rows, for which there is a program too

_init = jax.jit(core.init_pages, static_argnums=range(5))
_extend = jax.jit(core.extend, static_argnums=0, donate_argnums=2)
_copy = jax.jit(core.copy_pages, donate_argnums=0)
_decode = jax.jit(core.decode_pages, static_argnums=(0, 1, 2, 8), donate_argnums=4)


@dataclass(eq=False)
class _Prompt:
    """A prompt whose whole pages its answers share; what is left over begins the first own page of each."""

    shard: int
    pages: list[int]
    version: int  # of the weights that have read it
    answers: list[_Held] = field(default_factory=list)


@dataclass(eq=False)
class _Held:
    """What an answer has of the pool."""

    prompt: _Prompt
    pages: list[int]  # behind the prompt's
    tokens: int = 0  # of the prompt and the answer that are in the pages

    @property
    def table(self) -> list[int]:
        return self.prompt.pages + self.pages


@dataclass(frozen=True)
class _Run:
    """A row's tokens, which have to go through the model from a position on."""

    held: _Held
    tokens: list[int]  # of the row, up to the last one that is to be read
    start: int
    of_prompt: bool = False


class PagedSlots:
    """Rows and pages, and whose they are. Both are split alike over D shards, each of which numbers its own pages."""

    def __init__(self, config: SlotConfig):
        self.config, self.shards = config, sharding.rows(1, config.mesh)
        self.max_rows = sharding.rows(config.slots, config.mesh)
        self.row_sizes = [self.max_rows, sharding.rows(-(-self.max_rows // FEWER), config.mesh)]
        self.size = page_size(config.max_prompt_tokens, config.max_tokens, config.page_tokens)
        self.pages = page_count(config)  # of a shard
        self.block = page_attention.LANES if attention.resolve(config.model.attention) == "splash" else 16
        self.free = [list(range(self.pages)) for _ in range(self.shards)]
        self.prompts: dict[tuple, _Prompt] = {}
        self.held: dict[PartialAnswer, _Held] = {}  # of answers in rows, in the order in which they came
        self.left: dict[tuple, tuple[_Held, list[int]]] = {}  # of ended answers and their tokens, the oldest first
        self.rows: list[PartialAnswer | None] = []
        self.groups: dict[ActiveGroup, None] = {}  # not yet returned
        self.state: core.PagedState | None = None
        self.width = -(-(config.max_prompt_tokens + config.max_tokens + self.block) // self.size)  # of a table
        self.prefills = 0  # prompts that have gone through the model
        self.yielded = 0  # answers that had to make room, the last time

    @property
    def busy(self) -> int:
        """Rows that are taken."""
        return len(self.held)

    # --- filling

    def fill(self, weights: SamplerWeights, waiting: deque[PartialAnswer]) -> None:
        """Pages for what the next call may write, and waiting answers into free rows, in their order."""
        if self.config.exact and (self.busy or not waiting):
            return
        self._fit(waiting)
        for key in [key for key, (held, _) in self.left.items() if held.prompt.version != weights.version]:
            self._release(self.left.pop(key)[0])
        self._grow(waiting)
        filled: dict[int, PartialAnswer] = {}
        no_row, runs, copies = [], [], []
        while waiting and None in self.rows:
            answer = waiting.popleft()
            row = self._place(answer, weights.version, runs, copies)
            if row is None:
                no_row.append(answer)
                if self.shards == 1:
                    break
            else:
                self.rows[row] = filled[row] = answer
                self.groups[answer.group] = None
        waiting.extendleft(reversed(no_row))
        self._extend(weights, [run for run in runs if run.of_prompt])
        self._copied(copies)
        self._extend(weights, [run for run in runs if not run.of_prompt])
        if filled:
            self.state = self.state._replace(answers=slots.inserted(self.state, filled, len(self.rows)))

    def _fit(self, waiting: Sequence[PartialAnswer]) -> None:
        """As many rows as there is work for, and tables as wide as the longest answer."""
        longest = max((len(a.request.prompt) + a.limit for a in (*self.held, *waiting)), default=0) + self.block
        self.width = max(self.width, power_of_two(-(-longest // self.size)) if longest > self.width * self.size else 0)
        demand = min(self.busy + len(waiting), self.max_rows)
        fullest = max(map(len, slots.of_shards(self.rows, self.shards)), default=0)
        demand = self.max_rows if self.config.exact else demand
        rows = min(n for n in self.row_sizes if n >= demand and n // self.shards >= fullest)
        if self.state is None:
            c = self.config
            pages = self.pages * self.shards
            self.state = _init(c.model, c.kv_dtype or c.model.dtype, pages, self.size, self.max_rows)
            self.rows = [None] * self.max_rows
        if rows != len(self.rows):
            source, self.rows = slots.moved(self.rows, rows, self.shards)
            self.state = self.state._replace(answers=slots.repack_answers(self.state.answers, source))

    def _grow(self, waiting: deque[PartialAnswer]) -> None:
        """Pages for the next call of all that are in rows, the oldest first. Those for which there are none yield."""
        yielded = []
        for answer in list(self.held):
            while answer in self.held:
                held = self.held[answer]
                more = self._taken(held.prompt.shard, self._want(answer, held))
                if more is not None:
                    held.pages += more
                    break
                yielded.append(next(a for a, h in reversed(self.held.items()) if h.prompt.shard == held.prompt.shard))
                self.rows[self.rows.index(yielded[-1])] = None
                self._release(self.held.pop(yielded[-1]))
        self.yielded = len(yielded)
        waiting.extendleft(yielded)
        if yielded:
            self.state = self.state._replace(answers=slots.only_taken(self.rows, self.state.answers))

    def _want(self, answer: PartialAnswer, held: _Held) -> int:
        """Pages that an answer lacks for its next call, with `exact` for all its calls."""
        calls = answer.limit if self.config.exact else len(answer.tokens) + self.config.tokens_per_call
        tokens = len(answer.request.prompt) - 1 + min(calls, answer.limit)
        return max(-(-tokens // self.size) - len(held.table), 0)

    def _place(
        self, answer: PartialAnswer, version: int, runs: list[_Run], copies: list[tuple[int, int, int]]
    ) -> int | None:
        """A row for an answer, with pages, in the shard of its prompt; None if there is not enough of either.

        What has to go through the model is added to `runs`, and pages to be copied, (shard, from, to), to `copies`.
        """
        key, rows = _key(answer.request), slots.of_shards(self.rows, self.shards, False)
        left, tokens = self.left.get((key, answer.number), (None, []))
        if tokens != answer.tokens[: len(tokens)]:  # it does not go on as it began
            self._release(self.left.pop((key, answer.number))[0])
            left = None
        roomiest = max(range(self.shards), key=lambda s: bool(rows[s]) * (1 + len(self.free[s])))
        prompt = self.prompts.get(key) or _Prompt(roomiest, [], version)
        if not rows[prompt.shard]:
            return None
        held = left or _Held(prompt, [])
        if left:
            del self.left[key, answer.number]
        else:
            prompt.answers.append(held)  # so that it stays, whatever has to go
        whole = 0 if key in self.prompts else (len(answer.request.prompt) - 1) // self.size
        live = sum(h.prompt.shard == prompt.shard for h in self.held.values())
        spare = live * -(-self.config.tokens_per_call // self.size)  # or it would yield at the next call
        pages = self._taken(prompt.shard, self._want(answer, held), spare)
        if pages is None:
            if left:
                self.left[key, answer.number] = left, tokens
            else:
                self._release(held)
            expect(live, "rollout.kv_tokens", self.pages * self.size * self.shards, "room for an answer at its longest")
            return None
        self.prompts[key] = prompt
        prompt.pages += pages[:whole]
        held.pages += pages[whole:]
        self._read(answer, held, whole, runs, copies)
        self.held[answer] = held
        return rows[prompt.shard][0]

    def _read(
        self, answer: PartialAnswer, held: _Held, whole: int, runs: list[_Run], copies: list[tuple[int, int, int]]
    ) -> None:
        """What is not in an answer's pages yet has to come there. whole: pages of its prompt that are new."""
        prompt, tokens = held.prompt, [*answer.request.prompt, *answer.tokens][:-1]
        prefix, shared = len(answer.request.prompt) - 1, len(prompt.pages) * self.size
        if not held.tokens:
            others = [other for other in prompt.answers if other is not held]
            if not others:  # or all that have read it had to go
                self.prefills += 1
                runs.append(_Run(held, tokens[:prefix], 0 if whole else shared, True))
            elif shared < prefix:
                copies.append((prompt.shard, others[0].pages[0], held.pages[0]))
                if not any(run.of_prompt and run.held.prompt is prompt for run in runs):
                    self._copied([copies.pop()])  # now: the other may have ended, and have to go
            held.tokens = prefix
        runs.append(_Run(held, tokens, held.tokens))

    def _taken(self, shard: int, n: int, spare: int = 0) -> list[int] | None:
        """n pages of a shard, None if it has not so many, and as many as are to be spared behind them."""
        free = self.free[shard]
        while len(free) < n + spare and (
            old := next((k for k, (h, _) in self.left.items() if h.prompt.shard == shard), None)
        ):
            self._release(self.left.pop(old)[0])
        return [free.pop() for _ in range(n)] if len(free) >= n + spare else None

    def _release(self, held: _Held) -> None:
        """An answer's pages are free again, and those of its prompt with the last of its answers."""
        prompt = held.prompt
        prompt.answers.remove(held)
        self.free[prompt.shard] += held.pages
        if not prompt.answers:
            self.free[prompt.shard] += prompt.pages
            self.prompts = {key: p for key, p in self.prompts.items() if p is not prompt}

    # --- prompts

    def _extend(self, weights: SamplerWeights, runs: list[_Run]) -> None:
        """Runs through the model, in calls of few sizes."""
        c = self.config
        whole = max(c.prefill_tokens // (self.block * self.shards), 1)
        for batch in [[run] for run in runs] if c.exact else [runs]:
            blocks = [deque(self._blocks(s, batch)) for s in range(self.shards)]
            while any(blocks):
                n = whole if c.exact or max(map(len, blocks)) > whole // 4 else max(whole // PART, 1)
                some = [[b.popleft() for _ in range(min(n, len(b)))] for b in blocks]
                arrays = self._arrays(some, n)
                self.state = self.state._replace(pools=_extend(c.model, weights.params, self.state.pools, *arrays))

    def _blocks(self, shard: int, runs: Iterable[_Run]) -> Iterable[tuple[list[int], list[int], int]]:
        """Tables, tokens and positions of a shard's runs, cut into blocks."""
        for run in runs:
            if run.held.prompt.shard == shard:
                for i in range(run.start, len(run.tokens), self.block):
                    yield run.held.table, run.tokens[i : i + self.block], i

    def _arrays(self, blocks: list[list[tuple]], n: int) -> tuple[np.ndarray, page_attention.Blocks]:
        """Blocks of all shards, padded to n each."""
        tokens = np.zeros((self.shards, n, self.block), np.int32)
        real, ends = np.zeros(tokens.shape, bool), np.full((self.shards, n), self.block, np.int32)
        table = np.full((self.shards, n, self.width), self.pages, np.int32)
        for s, of_shard in enumerate(blocks):
            for i, (pages, ids, start) in enumerate(of_shard):
                table[s, i, : len(pages)] = pages
                tokens[s, i, : len(ids)], real[s, i, : len(ids)], ends[s, i] = ids, True, start + self.block
        flat = lambda x: x.reshape(-1, *x.shape[2:])
        return flat(tokens), page_attention.Blocks(flat(table), flat(ends), flat(real))

    def _copied(self, copies: list[tuple[int, int, int]]) -> None:
        """Pages copied within their shards; a few at a time, so that there is one program."""
        n, total = self.max_rows, self.pages * self.shards
        for i in range(0, len(copies), n):
            some = [(s * self.pages + a, s * self.pages + b) for s, a, b in copies[i : i + n]]
            source, to = np.array(some + [(0, total)] * (n - len(some)), np.int32).T
            self.state = self.state._replace(pools=_copy(self.state.pools, source, to))

    # --- drawing

    def step(self, weights: SamplerWeights) -> list[ActiveGroup]:
        """One call of the decoding loop. Returns the groups that are done; their rows are free again."""
        c = self.config
        table, lengths = np.full((len(self.rows), self.width), self.pages, np.int32), np.zeros(len(self.rows), np.int32)
        for i, answer in enumerate(self.rows):
            if answer is not None:
                pages = self.held[answer].table
                table[i, : len(pages)], lengths[i] = pages, len(answer.request.prompt) - 1
        static = c.model, c.tokenizer.eos_ids, any(a.request.sampling.filtered for a in self.held)
        given = table, lengths, slots.forced(self.rows, c.tokens_per_call), c.record_experts
        self.state, drawn = _decode(*static, weights.params, self.state, *given)
        ended, answers = slots.harvest(self.rows, drawn, self.state.answers, weights.version, c.tokenizer)
        self.state = self.state._replace(answers=answers)
        for answer in ended:
            held, key = self.held.pop(answer), (_key(answer.request), answer.number)
            held.tokens = len(answer.request.prompt) - 1 + len(answer.tokens)
            if answer.finish == LENGTH or key in self.left or c.exact:
                self._release(held)
            else:
                self.left[key] = held, answer.tokens
        in_rows = {a.group for a in self.held}
        done = [g for g in self.groups if not g.is_open and g not in in_rows]
        for group in done:
            del self.groups[group]
        return done


def _key(request: Request) -> tuple:
    return request.prompt, request.seed, request.draw


def page_count(config: SlotConfig) -> int:
    """Pages of each shard: for `kv_tokens`, or for what its device has left, or for all rows at their longest."""
    shards, size = (
        sharding.rows(1, config.mesh),
        page_size(config.max_prompt_tokens, config.max_tokens, config.page_tokens),
    )
    if config.kv_tokens:
        answers = config.slots if config.exact else shards
        least = least_tokens(config.max_prompt_tokens, config.max_tokens, answers, shards, config.page_tokens)
        expect(config.kv_tokens >= least, "rollout.kv_tokens", config.kv_tokens, f"0 or at least {least}")
        return config.kv_tokens // (size * shards)
    longest = -(-(config.max_prompt_tokens + config.max_tokens) // size)
    most = longest * -(-config.slots // shards)
    device = jax.devices()[0] if config.mesh is None else config.mesh.devices.flat[0]
    if not (memory := device.memory_stats()):
        return most
    kv_dtype, tensor = config.kv_dtype or config.model.dtype, 1 if config.mesh is None else config.mesh.shape["tensor"]
    free = (memory["bytes_limit"] - memory["bytes_in_use"]) * SPARE
    pages = math.floor(free * tensor / (page_attention.token_bytes(config.model, kv_dtype) * size))
    expect(pages >= longest, "memory of the device", f"{free / 2**30:.1f} GiB", "room for the longest answer: see int8")
    return min(pages, most)


def make_slots(config: SlotConfig) -> Slots | PagedSlots:
    """Slots with the cache that a config names; auto: pages on GPU and TPU, for more than SHORT tokens."""
    long = config.max_prompt_tokens > 0 and config.max_prompt_tokens + config.max_tokens > SHORT
    auto = "pages" if long and platform() != "cpu" else "ring"
    return PagedSlots(config) if (auto if config.cache == "auto" else config.cache) == "pages" else Slots(config)
