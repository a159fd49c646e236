"""The sampler's core as an engine of JetStream's orchestrator.

A request enters the orchestrator's Driver as one `Ticket` per answer. The Driver takes it for a text, hands it to our
`Tokenizer`, which passes it through, and to `prefill`, whose result is the ticket again; `insert` puts the answer
into a row. Tokens, log-probs and the weights' version go to the answer's draft when the results of a step reach the
host; the Driver itself sees tokens alone, and learns from them when a slot is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import sharding, types
from jaxrl_llm.data import tokenizers
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.sampler import core, jetstream
from jaxrl_llm.sampler.decode import MIN_PREFIX, power, prefix_of, rows_of
from jaxrl_llm.sampler.requests import Draft, Group, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.weights import SamplerWeights

js = jetstream.load()
GREEDY = Sampling(temperature=0.0)
Listen = Callable[[list[int]], None]


class Job:
    """A request under way. `future` has its group when all answers are done, or when it is cancelled."""

    def __init__(self, request: Request, listen: Listen | None = None):
        """listen: gets new token ids of any answer, without the end-of-sequence token, in a thread of the Driver.

        It must not raise, or the process is killed.
        """
        self.request, self.listen = request, listen
        self.drafts = [Draft(request, g) for g in range(request.group)]
        self.tickets = [Ticket(self, draft) for draft in self.drafts if draft.open]
        self.future: Future[Group] = Future()
        self.future.set_running_or_notify_cancel()  # whoever waits cannot cancel it: only `cancel` frees the slots
        self.filled: core.Prefilled | None = None  # from the first ticket's prefill to the last one's insert
        self.outside = len(self.tickets)  # not yet inserted
        self.left = len(self.tickets)  # not yet closed by the Driver
        self._lock, self._resolved = threading.Lock(), False
        if not self.tickets:
            self._resolve()

    def take(self, ticket: Ticket, tokens: list[int], logp: list[float], version: int, tokenizer: Any) -> list[int]:
        """Adds what was drawn to the ticket's answer, unless it has ended; what of it counts."""
        with self._lock:
            if ticket.ended or not tokens:
                return []
            seen = len(ticket.draft.tokens)
            ticket.draft.take(tokens, logp, version, tokenizer)
            ticket.ended = not ticket.draft.open
            return ticket.draft.tokens[seen:]

    def closed(self) -> None:
        """The Driver has done with one of the tickets."""
        self.left -= 1
        if not self.left:
            self._resolve()

    def cancel(self) -> None:
        """Ends all answers where they are."""
        with self._lock:
            for ticket in self.tickets:
                ticket.ended = True
        self._resolve()

    def _resolve(self) -> None:
        with self._lock:
            if self._resolved:
                return
            self._resolved = True
        self.future.set_result(tuple(draft.answer() for draft in self.drafts))


class Ticket(str):
    """One answer's way through the Driver, which sees an empty text, and where the Driver returns its results."""

    def __new__(cls, job: Job, draft: Draft) -> Ticket:
        ticket = super().__new__(cls)
        ticket.job, ticket.draft, ticket.ended = job, draft, False
        return ticket

    def add_result(self, samples: list[Any]) -> None:
        if self.job.listen is not None and samples[0].token_ids:
            self.job.listen(samples[0].token_ids)

    def close(self) -> None:
        self.job.closed()


class Tokenizer(js.tokenizer_api.Tokenizer):
    """JetStream's view of a tokenizer. No beginning-of-sequence token is added to anything."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Padded token ids and how many there are; a ticket comes back as it is."""
        if isinstance(s, Ticket):
            return s, len(s.job.request.prompt)
        padding = {k: v for k, v in kwargs.items() if k in ("prefill_lengths", "max_prefill_length", "jax_padding")}
        ids = np.array(self.tokenizer.encode(s), np.int32)
        return js.token_utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **padding)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self.tokenizer.decode(token_ids)

    @property
    def pad_id(self) -> int:
        return self.tokenizer.pad_id

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_ids[0]

    @property
    def bos_id(self) -> int:
        bos = self.tokenizer.hf.bos_token_id
        return self.pad_id if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        return set(self.tokenizer.eos_ids)


class Weights:
    """The box that the Driver holds as parameters: what is in it may be swapped between two calls of `generate`."""

    def __init__(self, held: SamplerWeights):
        self._held, self._lock = held, threading.Lock()

    @property
    def held(self) -> SamplerWeights:
        with self._lock:
            return self._held

    def load(self, leaves: dict[str, np.ndarray], version: int) -> None:
        """Other values for all parameters, by `keystr` of their paths. Returns when they are on the devices.

        Raises ValueError, and changes nothing, if a leaf is missing, unknown, or of another shape or dtype.
        """
        types.expect(0 <= version < 2**31, "version", version, "a number in [0, 2^31)")
        old = self.held.params
        expected = manifest(old)
        missing, unknown = sorted(expected.keys() - leaves.keys()), sorted(leaves.keys() - expected.keys())
        types.expect(not missing, "leaves", f"nothing for {missing[:3]}", f"all of the {len(expected)} leaves")
        types.expect(not unknown, "leaves", unknown[:3], f"leaves of the model, such as {next(iter(expected))}")
        for name, (shape, dtype) in expected.items():
            new = leaves[name]
            types.expect(new.shape == shape, f"{name} shape", new.shape, shape)
            types.expect(new.dtype == dtype, f"{name} dtype", new.dtype, dtype)
        # A copy, because a CPU device may go on reading the memory that it is given.
        put = lambda path, x: jax.device_put(leaves[jax.tree_util.keystr(path)].copy(), x.sharding)
        params = jax.block_until_ready(jax.tree_util.tree_map_with_path(put, old))
        with self._lock:
            self._held = SamplerWeights(params, version)


def manifest(params: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every leaf, by `keystr` of its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): (x.shape, np.dtype(x.dtype)) for path, x in leaves}


class Results(js.engine_api.ResultTokens):
    """What one call of `generate` has drawn, and the tickets that were in the slots when it was made."""

    def __init__(self, engine: JetStreamEngine, drawn: core.Drawn, tickets: Sequence[Ticket | None], version: int):
        self._engine, self._drawn, self._tickets, self._version = engine, drawn, tickets, version
        self._slots: dict[int, Any] | None = None

    def copy_to_host_async(self) -> None:
        for x in self._drawn:
            x.copy_to_host_async()

    def convert_to_numpy(self) -> Results:
        """Hands the tickets what was drawn for them, the first time it is called."""
        if self._slots is None:
            tokens, logp, count, _ = jax.device_get(self._drawn)
            self._slots = {}
            for slot, ticket in enumerate(self._tickets):
                if ticket is not None:
                    n, tokenizer = count[slot], self._engine.tokenizer
                    drawn = tokens[slot, :n].tolist(), logp[slot, :n].tolist()
                    taken = ticket.job.take(ticket, *drawn, self._version, tokenizer)
                    self._engine.counts["tokens"] += len(taken)
                    self._slots[slot] = _slot_data(taken, ticket.ended)
        return self

    def get_result_at_slot(self, slot: int) -> Any:
        """The slot's new tokens, [1, n], with an invalid one behind them when the answer has ended."""
        slots = self.convert_to_numpy()._slots
        return slots[slot] if slot in slots else _slot_data([], ended=True)


def _slot_data(tokens: list[int], ended: bool) -> Any:
    """No length is reported: the Driver would drop the tokens with which an answer reaches its limit."""
    end = [0] * ended
    row = lambda values: np.array([values], np.int32)
    return js.engine_api.SlotData(row(tokens + end), row([1] * len(tokens) + end), np.zeros(1, np.int32))


_prefill = jax.jit(core.prefill, static_argnums=0)


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _init(model: ModelConfig, kv_dtype: str, slots: int, size: int, columns: int) -> core.DecodeState:
    """Empty slots, each with a prefix of its own."""
    return core.DecodeState(
        core.init_prefixes(model, kv_dtype, slots, size),
        core.init_own(model, kv_dtype, slots, columns),
        core.init_answers(slots),
    )


@partial(jax.jit, donate_argnums=0)
def _insert(
    state: core.DecodeState,
    prefix: Any,
    lengths: jax.Array,
    into: jax.Array,
    rows: core.Rows,
    own: Any,
    number: jax.Array,
) -> core.DecodeState:
    """A prompt and one answer into their slot. own: what the group's answers have been fed, if they were begun."""
    kv = state.own
    if own is not None:
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, number, 1), own)
        kv = core.insert_own(kv, state.answers.step, rows, own)
    prefixes = core.insert_prefixes(state.prefixes, prefix, lengths, into)
    return core.DecodeState(prefixes, kv, core.insert_rows(state.answers, rows))


@partial(jax.jit, static_argnums=(0, 1, 2, 3, 4), donate_argnums=6)
def _decode(
    model: ModelConfig,
    eos_ids: tuple[int, ...],
    filtered: bool,
    ways: int,
    steps: int,
    params: Any,
    state: core.DecodeState,
    keep: jax.Array,
) -> tuple[core.DecodeState, core.Drawn]:
    """`core.decode_k` where row i alone reads prefix i, and rows that are not kept are dead."""
    n = keep.shape[0]
    lane = jnp.broadcast_to(jnp.arange(n // ways), (ways, n // ways))
    state = replace(state, answers=replace(state.answers, live=state.answers.live & keep))
    return core.decode_k(model, eos_ids, filtered, params, state, lane[:, :, None], lane, jnp.full((n, steps), -1))


class JetStreamEngine(js.engine_api.Engine):
    """The core with a fixed number of slots. Slot i is row i, and its prompt is prefix i."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: tokenizers.Tokenizer,
        weights: SamplerWeights,
        *,
        slots: int = 64,  # answers decoded at once
        max_prompt_tokens: int = 1024,
        max_tokens: int = 1024,  # per answer
        tokens_per_call: int = 8,  # decoding steps per `generate`
        kv_dtype: str = "",  # float32, bfloat16 or int8; that of the activations if left out
        mesh: Mesh | None = None,
    ):
        sizes = {"slots": slots, "max_prompt_tokens": max_prompt_tokens, "max_tokens": max_tokens}
        for name, value in {**sizes, "tokens_per_call": tokens_per_call}.items():
            types.expect(value >= 1, name, value, "at least 1")
        self.model, self.tokenizer, self._mesh = model, tokenizer, mesh
        self.max_prompt_tokens, self.max_tokens, self.tokens_per_call = max_prompt_tokens, max_tokens, tokens_per_call
        self.kv_dtype = kv_dtype or model.dtype
        self.weights = Weights(weights)
        self.ways = sharding.rows(1, mesh)
        self.slots: list[Ticket | None] = [None] * sharding.rows(slots, mesh)
        self.counts = {"prefills": 0, "tokens": 0, "steps": 0}  # each is written by one thread of the Driver

    def check(self, request: Request) -> None:
        """Raises ValueError if the request cannot be served."""
        sizes = {"max_prompt_tokens": self.max_prompt_tokens, "max_tokens": self.max_tokens}
        check(request, vocab_size=self.model.vocab_size, **sizes)

    def load_params(self) -> Weights:
        return self.weights

    def prefill(self, *, params: Weights, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Ticket:
        """The ticket, its group's prompt prefilled. Token ids in its place are to be decoded greedily.

        Raises ValueError for a prefix, and for token ids that cannot be served.
        """
        types.expect(existing_prefix is None, "existing_prefix", existing_prefix, "None")
        ticket = padded_tokens
        if not isinstance(ticket, Ticket):
            prompt = tuple(np.asarray(padded_tokens)[:true_length].tolist())
            request = Request(prompt, max_tokens=self.max_tokens, sampling=GREEDY)
            self.check(request)
            ticket = Job(request).tickets[0]
        if ticket.job.filled is None and not ticket.ended:
            ticket.job.filled = self._filled(params, ticket.job)
            self.counts["prefills"] += 1
        return ticket

    def _filled(self, params: Weights, job: Job) -> core.Prefilled:
        """Keys and values of the prompt, and of what the answers were fed before."""
        prompt, group = job.request.prompt, job.drafts
        said = [d.tokens if d.open else [] for d in group]
        room = power(max(map(len, said)), MIN_PREFIX) if any(said) else 0
        begun = np.zeros((self.ways, len(group) if room else 1, room), np.int32)
        for g, tokens in enumerate(said if room else []):
            begun[0, g, : len(tokens)] = [prompt[-1], *tokens][: len(tokens)]
        prefix = prefix_of([prompt], self.ways, power(len(prompt) - 1, MIN_PREFIX))
        with self._context():
            return _prefill(self.model, params.held.params, prefix, self._first(len(prompt) - 1, 0), begun)

    def _first(self, value: int, fill: int) -> np.ndarray:
        """One value, and `fill` for the rows of a mesh that have nothing to do."""
        return np.array([value] + [fill] * (self.ways - 1), np.int32)

    def insert(self, prefix: Ticket, decode_state: core.DecodeState, slot: int) -> core.DecodeState:
        """The ticket's answer in that slot. An answer that has ended on its way only takes the slot."""
        self.slots[slot] = prefix
        job, draft, n = prefix.job, prefix.draft, len(self.slots)
        if prefix.ended:
            return decode_state
        own = job.filled.own if job.filled.own[0][0].shape[-1] else None
        lengths, into = self._first(len(job.request.prompt) - 1, 0), self._first(slot, n)
        with self._context():
            rows = rows_of([(slot, draft)], 1, n)
            decode_state = _insert(decode_state, job.filled.prefix, lengths, into, rows, own, np.int32(draft.number))
        job.outside -= 1
        if not job.outside:
            job.filled = None
        return decode_state

    def generate(self, params: Weights, decode_state: core.DecodeState) -> tuple[core.DecodeState, Results]:
        """Up to `tokens_per_call` tokens for every answer that has not ended."""
        tickets = [None if ticket is None or ticket.ended else ticket for ticket in self.slots]
        self.slots = tickets.copy()
        held, keep = params.held, np.array([ticket is not None for ticket in tickets])
        filtered = any(ticket.job.request.sampling.filtered for ticket in tickets if ticket is not None)
        static = (self.model, self.tokenizer.eos_ids, filtered, self.ways, self.tokens_per_call)
        with self._context():
            decode_state, drawn = _decode(*static, held.params, decode_state, keep)
        self.counts["steps"] += 1
        return decode_state, Results(self, drawn, tickets, held.version)

    def init_decode_state(self) -> core.DecodeState:
        """Empty slots."""
        n = len(self.slots)
        self.slots = [None] * n
        columns = -(-self.max_tokens // 8) * 8
        with self._context():
            return _init(self.model, self.kv_dtype, n, power(self.max_prompt_tokens - 1, MIN_PREFIX), columns)

    def _context(self) -> AbstractContextManager:
        """The mesh, in whichever thread."""
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def get_prefix_destination_sharding(self) -> None:
        """None: a ticket is no array, and stays where it is."""

    def get_tokenizer(self) -> Any:
        return js.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        return Tokenizer(self.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return len(self.slots)

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return power(self.max_prompt_tokens, MIN_PREFIX)  # one of JetStream's own sizes: it looks it up among them

    @property
    def mesh(self) -> Mesh | None:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None
