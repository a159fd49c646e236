"""The sampler's slots as an engine of JetStream's orchestrator.

A request enters the orchestrator's Driver as one `Ticket` per answer. The Driver takes it for a text, hands it to our
`Tokenizer`, which passes it through, and to `prefill`, whose result is the ticket again; `insert` has the answer wait
for a row, and `generate` fills the rows, prompts included, and decodes. Tokens, log-probs and the weights' version go
to the answer's draft there; the Driver itself sees tokens alone, and learns from them when a slot is free.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import types
from jaxrl_llm.data import tokenizers
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler.decode import LocalEngine
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.slots import MIN_PREFIX, ActiveGroup, Place, Slots, power
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.serving import jetstream

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
        self.lock, self.cancelled = threading.Lock(), False
        self.work = ActiveGroup(request, [JobDraft(self, g) for g in range(request.group)])
        self.tickets = [Ticket(self, draft) for draft in self.work.drafts if draft.open]
        self.future: Future[Group] = Future()
        self.future.set_running_or_notify_cancel()  # whoever waits cannot cancel it: only `cancel` frees the slots
        self.left = len(self.tickets)  # not yet closed by the Driver
        self._resolved = False
        if not self.tickets:
            self._resolve()

    def closed(self) -> None:
        """The Driver has done with one of the tickets."""
        self.left -= 1
        if not self.left:
            self._resolve()

    def cancel(self) -> None:
        """Ends all answers where they are."""
        with self.lock:
            self.cancelled = True
        self._resolve()

    def _resolve(self) -> None:
        with self.lock:
            if self._resolved:
                return
            self._resolved = True
        self.future.set_result(self.work.answers())


class JobDraft(PartialAnswer):
    """An answer that another thread may cancel."""

    def __init__(self, job: Job, number: int):
        super().__init__(job.request, number)
        self._job = job

    @property
    def open(self) -> bool:
        return super().open and not self._job.cancelled

    def take(self, *drawn: Any) -> None:
        with self._job.lock:
            if not self._job.cancelled:
                super().take(*drawn)


class Ticket(str):
    """One answer's way through the Driver, which sees an empty text, and where the Driver returns its results."""

    def __new__(cls, job: Job, draft: PartialAnswer) -> Ticket:
        ticket = super().__new__(cls)
        ticket.job, ticket.draft = job, draft
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
    """What one call of `generate` has drawn for each slot, on the host already."""

    def __init__(self, slots: dict[int, Any]):
        self._slots = slots

    def copy_to_host_async(self) -> None:
        pass

    def convert_to_numpy(self) -> Results:
        return self

    def get_result_at_slot(self, slot: int) -> Any:
        """The slot's new tokens, [1, n], with an invalid one behind them when the answer has ended."""
        return self._slots[slot] if slot in self._slots else _slot_data([], ended=True)


def _slot_data(tokens: list[int], ended: bool) -> Any:
    """No length is reported: the Driver would drop the tokens with which an answer reaches its limit."""
    end = [0] * ended
    row = lambda values: np.array([values], np.int32)
    return js.engine_api.SlotData(row(tokens + end), row([1] * len(tokens) + end), np.zeros(1, np.int32))


class DecodeState:
    """What the Driver holds between two calls: rows on the device, and the answers that wait for one."""

    def __init__(self, engine: LocalEngine):
        self.slots = Slots(engine)
        self.waiting: deque[Place] = deque()


class JetStreamEngine(js.engine_api.Engine):
    """`Slots` with as many rows as the Driver has slots. A group's prompt is prefilled once, and kept once."""

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
        sizes = {"max_tokens": max_tokens, "slots": slots, "max_prompt_tokens": max_prompt_tokens}
        sizes |= {"tokens_per_call": tokens_per_call}
        for name, value in sizes.items():
            types.expect(value >= 1, name, value, "at least 1")
        none = SamplerWeights(None)  # they come with each call
        self.sampler = LocalEngine(model, tokenizer, none, **sizes, kv_dtype=kv_dtype, mesh=mesh)
        self.weights = Weights(weights)
        self.slots: list[Ticket | None] = [None] * sharding.rows(slots, mesh)
        self.counts = {"prefills": 0, "tokens": 0, "steps": 0}  # the Driver's generating thread writes them

    def check(self, request: Request) -> None:
        """Raises ValueError if the request cannot be served."""
        s = self.sampler
        sizes = {"max_prompt_tokens": s.max_prompt_tokens, "max_tokens": s.max_tokens}
        check(request, vocab_size=s.model.vocab_size, **sizes)

    def load_params(self) -> Weights:
        return self.weights

    def prefill(self, *, params: Weights, existing_prefix: Any = None, padded_tokens: Any, true_length: int) -> Ticket:
        """The ticket as it is: `generate` prefills its group's prompt. Token ids in its place are decoded greedily.

        Raises ValueError for a prefix, and for token ids that cannot be served.
        """
        types.expect(existing_prefix is None, "existing_prefix", existing_prefix, "None")
        if isinstance(padded_tokens, Ticket):
            return padded_tokens
        prompt = tuple(np.asarray(padded_tokens)[:true_length].tolist())
        request = Request(prompt, max_tokens=self.sampler.max_tokens, sampling=GREEDY)
        self.check(request)
        return Job(request).tickets[0]

    def insert(self, prefix: Ticket, decode_state: DecodeState, slot: int) -> DecodeState:
        """The ticket's answer has that slot of the Driver, and a row as soon as one is free."""
        self.slots[slot] = prefix
        decode_state.waiting.append((prefix.job.work, prefix.draft))
        return decode_state

    def generate(self, params: Weights, decode_state: DecodeState) -> tuple[DecodeState, Results]:
        """Up to `tokens_per_call` tokens for every answer that has not ended."""
        under_way = {i: (t, len(t.draft.tokens)) for i, t in enumerate(self.slots) if t is not None and t.draft.open}
        slots, held = decode_state.slots, params.held
        waiting = decode_state.waiting = deque(place for place in decode_state.waiting if place[1].open)
        before = slots.prefills
        with self._context():
            if waiting or slots.busy:
                slots.fill(held, waiting)
                slots.step(held)
        drawn = {i: (t.draft.tokens[seen:], not t.draft.open) for i, (t, seen) in under_way.items()}
        self.slots = [t if t is not None and t.draft.open else None for t in self.slots]
        self.counts["steps"] += 1
        self.counts["prefills"] += slots.prefills - before
        self.counts["tokens"] += sum(len(tokens) for tokens, _ in drawn.values())
        return decode_state, Results({i: _slot_data(*new) for i, new in drawn.items()})

    def init_decode_state(self) -> DecodeState:
        """Empty slots."""
        self.slots = [None] * len(self.slots)
        return DecodeState(self.sampler)

    def _context(self) -> AbstractContextManager:
        """The mesh, in whichever thread."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def get_prefix_destination_sharding(self) -> None:
        """None: a ticket is no array, and stays where it is."""

    def get_tokenizer(self) -> Any:
        return js.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        return Tokenizer(self.sampler.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return len(self.slots)

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return power(
            self.sampler.max_prompt_tokens, MIN_PREFIX
        )  # one of JetStream's own sizes: it looks it up among them

    @property
    def mesh(self) -> Mesh | None:
        return self.sampler.mesh

    @property
    def colocated_cpus(self) -> None:
        return None
