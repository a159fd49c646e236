"""The sampler's slots as an engine of JetStream's orchestrator.

A request enters the orchestrator's Driver as one `DriverTicket` per answer. The Driver takes it for a text, hands it to
our `Tokenizer`, which passes it through, and to `prefill`, whose result is the ticket again; `insert` has the answer
wait for a row, and `generate` fills the rows, prompts included, and decodes. Tokens, log-probs and versions go to the
answer there; the Driver itself sees tokens alone, and learns from them when a slot is free.
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
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.slots import MIN_PREFIX, ActiveGroup, SlotConfig, Slots, power_of_two
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.serving import jetstream

js = jetstream.load()
GREEDY = Sampling(temperature=0.0)
Listen = Callable[[list[int]], None]


class DriverGroup:
    """A request on its way through the Driver.

    `future` has the group when all answers are done, or when the request is cancelled.
    """

    def __init__(self, request: Request, listen: Listen | None = None):
        """listen: gets new token ids of any answer, without the end-of-sequence token, in a thread of the Driver.

        It must not raise, or the process is killed.
        """
        self.request, self.listen = request, listen
        self.lock, self.cancelled = threading.Lock(), False
        self.active = ActiveGroup(request, [CancellableAnswer(self, g) for g in range(request.group)])
        self.tickets = [DriverTicket(self, answer) for answer in self.active.answers if answer.open]
        self.future: Future[Group] = Future()
        self.future.set_running_or_notify_cancel()  # whoever waits cannot cancel it: only `cancel` frees the slots
        self.unclosed = len(self.tickets)  # tickets with which the Driver has not done
        self._resolved = False
        if not self.tickets:
            self._resolve()

    def ticket_closed(self) -> None:
        """The Driver has done with one of the tickets."""
        self.unclosed -= 1
        if not self.unclosed:
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
        self.future.set_result(self.active.result())


class CancellableAnswer(PartialAnswer):
    """An answer that another thread may cancel."""

    def __init__(self, owner: DriverGroup, number: int):
        super().__init__(owner.request, number)
        self._owner = owner

    @property
    def open(self) -> bool:
        return super().open and not self._owner.cancelled

    def take(self, *drawn: Any) -> None:
        with self._owner.lock:
            if not self._owner.cancelled:
                super().take(*drawn)


class DriverTicket(str):
    """One answer's way through the Driver, which sees an empty text, and where the Driver returns its results."""

    def __new__(cls, group: DriverGroup, answer: PartialAnswer) -> DriverTicket:
        ticket = super().__new__(cls)
        ticket.group, ticket.answer = group, answer
        return ticket

    def add_result(self, samples: list[Any]) -> None:
        if self.group.listen is not None and samples[0].token_ids:
            self.group.listen(samples[0].token_ids)

    def close(self) -> None:
        self.group.ticket_closed()


class Tokenizer(js.tokenizer_api.Tokenizer):
    """JetStream's view of a tokenizer. No beginning-of-sequence token is added to anything."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Padded token ids and how many there are; a ticket comes back as it is."""
        if isinstance(s, DriverTicket):
            return s, len(s.group.request.prompt)
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
        """JetStream wants one; what ends an answer is `stop_tokens`."""
        return self.tokenizer.eos_ids[0]

    @property
    def bos_id(self) -> int:
        bos = self.tokenizer.hf.bos_token_id
        return self.pad_id if bos is None else bos

    @property
    def stop_tokens(self) -> set[int]:
        return set(self.tokenizer.eos_ids)


class WeightsBox:
    """What the Driver holds as parameters; its contents may be swapped between two calls of `generate`."""

    def __init__(self, weights: SamplerWeights):
        self._weights, self._lock = weights, threading.Lock()

    @property
    def weights(self) -> SamplerWeights:
        with self._lock:
            return self._weights

    def load(self, leaves: dict[str, np.ndarray], version: int) -> None:
        """Other values for all parameters, by `keystr` of their paths. Returns when they are on the devices.

        Raises ValueError, and changes nothing, if a leaf is missing, unknown, or of another shape or dtype.
        """
        types.expect(0 <= version < 2**31, "version", version, "a number in [0, 2^31)")
        old = self.weights.params
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
            self._weights = SamplerWeights(params, version)


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


class DriverState:
    """What the Driver holds between two calls: rows on the device, and the answers that wait for one."""

    def __init__(self, config: SlotConfig):
        self.slots = Slots(config)
        self.waiting: deque[PartialAnswer] = deque()


class JetStreamEngine(js.engine_api.Engine):
    """`Slots` with as many rows as the Driver has slots. A group's prompt is prefilled once, and kept once."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: tokenizers.Tokenizer,
        weights: SamplerWeights,
        *,
        slots: int = 64,
        max_prompt_tokens: int = 1024,
        max_tokens: int = 1024,
        tokens_per_call: int = 8,
        kv_dtype: str = "",
        mesh: Mesh | None = None,
    ):
        """For the keywords see `SlotConfig`."""
        types.expect(max_prompt_tokens >= 1, "max_prompt_tokens", max_prompt_tokens, "at least 1")
        sizes = (slots, max_prompt_tokens, max_tokens, tokens_per_call)
        self.config = SlotConfig(model, tokenizer, *sizes, kv_dtype, mesh=mesh)
        self.weights = WeightsBox(weights)
        self.slots: list[DriverTicket | None] = [None] * sharding.rows(slots, mesh)
        self.counts = {"prefills": 0, "tokens": 0, "steps": 0}  # the Driver's generating thread writes them

    def check(self, request: Request) -> None:
        """Raises ValueError if the request cannot be served."""
        c = self.config
        limits = {"max_prompt_tokens": c.max_prompt_tokens, "max_tokens": c.max_tokens}
        check(request, vocab_size=c.model.vocab_size, **limits)

    def load_params(self) -> WeightsBox:
        return self.weights

    def prefill(
        self, *, params: WeightsBox, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> DriverTicket:
        """The ticket as it is: `generate` prefills its group's prompt. Token ids in its place are decoded greedily.

        Raises ValueError for a prefix, and for token ids that cannot be served.
        """
        types.expect(existing_prefix is None, "existing_prefix", existing_prefix, "None")
        if isinstance(padded_tokens, DriverTicket):
            return padded_tokens
        prompt = tuple(np.asarray(padded_tokens)[:true_length].tolist())
        request = Request(prompt, max_tokens=self.config.max_tokens, sampling=GREEDY)
        self.check(request)
        return DriverGroup(request).tickets[0]

    def insert(self, prefix: DriverTicket, decode_state: DriverState, slot: int) -> DriverState:
        """The ticket's answer has that slot of the Driver, and a row as soon as one is free."""
        self.slots[slot] = prefix
        decode_state.waiting.append(prefix.answer)
        return decode_state

    def generate(self, params: WeightsBox, decode_state: DriverState) -> tuple[DriverState, Results]:
        """Up to `tokens_per_call` tokens for every answer that has not ended."""
        under_way = {
            i: (t.answer, len(t.answer.tokens)) for i, t in enumerate(self.slots) if t is not None and t.answer.open
        }
        slots, weights = decode_state.slots, params.weights
        waiting = decode_state.waiting = deque(answer for answer in decode_state.waiting if answer.open)
        before = slots.prefills
        with self._context():
            if waiting or slots.busy:
                slots.fill(weights, waiting)
                slots.step(weights)
        drawn = {i: (answer.tokens[old:], not answer.open) for i, (answer, old) in under_way.items()}
        self.slots = [t if t is not None and t.answer.open else None for t in self.slots]
        self.counts["steps"] += 1
        self.counts["prefills"] += slots.prefills - before
        self.counts["tokens"] += sum(len(tokens) for tokens, _ in drawn.values())
        return decode_state, Results({i: _slot_data(*new) for i, new in drawn.items()})

    def init_decode_state(self) -> DriverState:
        """Empty slots."""
        self.slots = [None] * len(self.slots)
        return DriverState(self.config)

    def _context(self) -> AbstractContextManager:
        """The mesh, in whichever thread."""
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def get_prefix_destination_sharding(self) -> None:
        """None: a ticket is no array, and stays where it is."""

    def get_tokenizer(self) -> Any:
        return js.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> Tokenizer:
        return Tokenizer(self.config.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return len(self.slots)

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """A power of two, because JetStream looks it up among its own sizes."""
        return power_of_two(self.config.max_prompt_tokens, MIN_PREFIX)

    @property
    def mesh(self) -> Mesh | None:
        return self.config.mesh

    @property
    def colocated_cpus(self) -> None:
        return None
