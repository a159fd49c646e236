"""The sampler's slots as an engine of JetStream's orchestrator.

A request enters the orchestrator's Driver as one `DriverTicket` per answer. The Driver takes it for a text, hands it to
our `DriverTokenizer`, which passes it through, and to `prefill`, whose result is the ticket again; `insert` has the
answer wait for a row, and `generate` fills the rows, prompts included, and decodes. Tokens, log-probs and versions go
to the answer there; the Driver itself sees tokens alone, and learns from them when a slot is free.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import nullcontext, suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.models.transformer import ModelConfig
from jaxrl_llm.parallel import sharding
from jaxrl_llm.sampler.pages import PagedSlots, make_slots
from jaxrl_llm.sampler.requests import Group, PartialAnswer, Request, check
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.slots import MIN_PREFIX, ActiveGroup, SlotConfig, Slots, power_of_two
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.serving import jetstream
from jaxrl_llm.types import expect

js = jetstream.load()
GREEDY = Sampling(temperature=0.0)
Listen = Callable[[list[int]], None]
MAX_GROUP = 256  # answers of a request, or as many as there are slots: the prompt's view has a lane for each
BROKEN = (
    64  # errors in a row after which the device, and no request, is at fault: the process ends, to be started again
)
logger = logging.getLogger(__name__)


class DriverGroup(Future[Group]):
    """A request on its way through the Driver: the future of its group."""

    def __init__(self, request: Request, listen: Listen | None = None):
        """listen: gets new token ids of any answer, without the end-of-sequence token, in a thread of the Driver. What
        it raises fails the group."""
        super().__init__()
        self.set_running_or_notify_cancel()  # whoever waits cannot cancel it: only `end` frees the slots
        self.request, self.listen = request, listen
        self.lock, self.ended = threading.Lock(), False
        self.active = ActiveGroup(request, [CancellableAnswer(self, g) for g in range(request.group)])
        self.tickets = [DriverTicket(self, answer) for answer in self.active.answers if answer.open]
        self.unclosed = len(self.tickets)  # tickets with which the Driver has not done
        if not self.tickets:
            self.resolve()

    def end(self) -> None:
        """Cancels all answers where they are."""
        with self.lock:
            self.ended = True
        self.resolve()

    def fail(self, error: Exception) -> None:
        """Ends all answers; whoever waits gets the error."""
        logger.error("a request for a group of %d has failed", self.request.group, exc_info=error)
        with self.lock:
            self.ended = True
        with suppress(InvalidStateError):
            self.set_exception(error)

    def resolve(self) -> None:
        with suppress(InvalidStateError):  # it has been ended, or was done, a moment before
            self.set_result(self.active.result())


class CancellableAnswer(PartialAnswer):
    """An answer that another thread may cancel, and whose errors are its request's alone."""

    def __init__(self, owner: DriverGroup, number: int):
        super().__init__(owner.request, number)
        self.owner = owner

    @property
    def open(self) -> bool:
        return super().open and not self.owner.ended

    def take(self, *drawn: Any) -> None:
        try:
            with self.owner.lock:
                if not self.owner.ended:
                    super().take(*drawn)
        except Exception as error:  # of the tokenizer, which looks for stop strings
            self.owner.fail(error)


class DriverTicket(str):
    """One answer's way through the Driver, which sees an empty text, and where the Driver returns its results."""

    def __new__(cls, group: DriverGroup, answer: PartialAnswer) -> DriverTicket:
        ticket = super().__new__(cls)
        ticket.group, ticket.answer = group, answer
        return ticket

    def add_result(self, samples: list[Any]) -> None:
        if self.group.listen is not None and samples[0].token_ids:
            try:
                self.group.listen(samples[0].token_ids)
            except Exception as error:
                self.group.fail(error)

    def close(self) -> None:
        self.group.unclosed -= 1
        if not self.group.unclosed:
            self.group.resolve()


class DriverTokenizer(js.tokenizer_api.Tokenizer):
    """JetStream's view of a tokenizer. No beginning-of-sequence token is added to anything."""

    pad_id = eos_id = bos_id = stop_tokens = None  # properties of the abstract class; __init__ sets the values

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer, self.stop_tokens = tokenizer, set(tokenizer.eos_ids)
        self.pad_id = self.bos_id = tokenizer.pad_id
        self.eos_id = tokenizer.eos_ids[0]  # JetStream wants one; what ends an answer is `stop_tokens`

    def encode(self, s: str, **kwargs: Any) -> tuple[Any, int]:
        """Padded token ids and how many there are; a ticket comes back as it is."""
        if isinstance(s, DriverTicket):
            return s, len(s.group.request.prompt)
        padding = {k: v for k, v in kwargs.items() if k in ("prefill_lengths", "max_prefill_length", "jax_padding")}
        ids = np.array(self.tokenizer.encode(s), np.int32)
        return js.token_utils.pad_tokens(ids, self.bos_id, self.pad_id, is_bos=False, **padding)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        return self.tokenizer.decode(token_ids)


def manifest(params: Any) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of every leaf, by `keystr` of its path."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): (x.shape, np.dtype(x.dtype)) for path, x in leaves}


@jax.jit
def _finite(params: Any) -> list[jax.Array]:
    """Whether each leaf is finite."""
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return [jnp.isfinite(x).all() if floating(x) else jnp.array(True) for x in jax.tree.leaves(params)]


class Results(js.engine_api.ResultTokens):
    """What one call of `generate` has drawn for each slot, on the host already: tokens, and whether that is all."""

    def __init__(self, drawn: dict[int, tuple[list[int], bool]]):
        self._drawn = drawn

    copy_to_host_async = lambda self: None
    convert_to_numpy = lambda self: self

    def get_result_at_slot(self, slot: int) -> Any:
        """The slot's new tokens, [1, n], with an invalid one behind them when the answer has ended.

        No length is reported: the Driver would drop the tokens with which an answer reaches its limit.
        """
        tokens, ended = self._drawn.get(slot, ([], True))
        row = lambda values: np.array([values + [0] * ended], np.int32)
        return js.engine_api.SlotData(row(tokens), row([1] * len(tokens)), np.zeros(1, np.int32))


class JetStreamEngine(js.engine_api.Engine):
    """`Slots` with as many rows as the Driver has slots. A group's prompt is prefilled once, and kept once."""

    samples_per_slot, colocated_cpus, mesh = 1, None, None

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer, weights: SamplerWeights, **config: Any):
        """config: the further fields of `SlotConfig`; `max_prompt_tokens` is at least 1."""
        self.config, self.weights = SlotConfig(model, tokenizer, **config), weights
        most, self.mesh = self.config.max_prompt_tokens, self.config.mesh
        expect(most >= 1, "max_prompt_tokens", most, "at least 1")
        self.tickets: list[DriverTicket | None] = [None] * sharding.rows(self.config.slots, self.mesh)  # of the slots
        self.waiting: deque[CancellableAnswer] = deque()  # for a row
        self.suspects: list[DriverGroup] = []  # one of them has made a call fail
        self.errors = 0  # calls that have failed since one has not
        self.counts = {
            "prefills": 0,
            "yields": 0,
            "tokens": 0,
            "steps": 0,
        }  # the Driver's generating thread writes them

    def check(self, request: Request) -> None:
        """Raises ValueError if the request cannot be served."""
        c, most = self.config, max(MAX_GROUP, len(self.tickets))
        check(request, vocab_size=c.model.vocab_size, max_prompt_tokens=c.max_prompt_tokens, max_tokens=c.max_tokens)
        expect(request.group <= most, "group", request.group, f"at most {most}")

    def load_params(self) -> JetStreamEngine:
        """The engine itself: the Driver keeps what it gets, and `swap` replaces the weights."""
        return self

    def swap(self, leaves: dict[str, np.ndarray], version: int) -> None:
        """Other values for all parameters, by `keystr` of their paths, between two calls of `generate`.

        Returns when they are on the devices. Raises ValueError, and changes nothing, if a leaf is missing, unknown, of
        another shape or dtype, or not finite.
        """
        expect(0 <= version < 2**31, "version", version, "a number in [0, 2^31)")
        expected = manifest(self.weights.params)
        wrong, every = sorted(expected.keys() ^ leaves.keys())[:3], f"all of the {len(expected)} leaves of the model"
        expect(not wrong, "leaves", f"without, or with, {wrong}", every)
        for name, (shape, dtype) in expected.items():
            expect(leaves[name].shape == shape, f"{name} shape", leaves[name].shape, shape)
            expect(leaves[name].dtype == dtype, f"{name} dtype", leaves[name].dtype, dtype)
        # A copy, because a CPU device may go on reading the memory that it is given.
        put = lambda path, x: jax.device_put(leaves[jax.tree_util.keystr(path)].copy(), x.sharding)
        params = jax.tree_util.tree_map_with_path(put, self.weights.params)
        bad = [name for name, finite in zip(expected, jax.device_get(_finite(params)), strict=True) if not finite]
        expect(not bad, "leaves", f"not finite in {bad[:3]}", "finite numbers")
        self.weights = SamplerWeights(params, version)

    def prefill(self, *, padded_tokens: Any, true_length: int, existing_prefix: Any = None, **_: Any) -> DriverTicket:
        """The ticket as it is: `generate` prefills its group's prompt. Token ids in its place are decoded greedily.

        Raises ValueError for a prefix, and for token ids that cannot be served.
        """
        expect(existing_prefix is None, "existing_prefix", existing_prefix, "None")
        if isinstance(padded_tokens, DriverTicket):
            return padded_tokens
        prompt = tuple(np.asarray(padded_tokens)[:true_length].tolist())
        request = Request(prompt, max_tokens=self.config.max_tokens, sampling=GREEDY)
        self.check(request)
        return DriverGroup(request).tickets[0]

    def insert(self, prefix: DriverTicket, decode_state: Any, slot: int) -> Any:
        """The ticket's answer has that slot of the Driver, and a row as soon as one is free."""
        self.tickets[slot] = prefix
        self.waiting.append(prefix.answer)
        return decode_state

    def generate(self, params: Any, decode_state: Any) -> tuple[Any, Results]:
        """Up to `tokens_per_call` tokens for every answer that has not ended."""
        tickets = {i: t for i, t in enumerate(self.tickets) if t is not None and t.answer.open}
        old = {i: len(t.answer.tokens) for i, t in tickets.items()}
        self.waiting = deque(answer for answer in self.waiting if answer.open)
        with nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):  # in whichever thread
            if self.waiting or decode_state.busy:
                decode_state = self._advance(decode_state)
        drawn = {i: (t.answer.tokens[old[i] :], not t.answer.open) for i, t in tickets.items()}
        self.tickets = [t if t is not None and t.answer.open else None for t in self.tickets]
        self.counts["steps"] += 1
        self.counts["tokens"] += sum(len(tokens) for tokens, _ in drawn.values())
        return decode_state, Results(drawn)

    def _advance(self, slots: Any) -> Any:
        """Fills rows and decodes. An error fails the request that causes it, alone.

        The device's arrays may be lost then: there are new slots, and every answer goes on with the tokens that it has.
        Requests that may have caused it have the slots to themselves, one after the other, until they are answered; an
        error then is the request's own.
        """
        weights, before = self.weights, slots.prefills
        here = {t.answer.owner for t in self.tickets if t is not None and t.answer.open}
        self.suspects = [group for group in self.suspects if group in here]
        tried = self.suspects[0] if self.suspects else None
        queue = deque(answer for answer in self.waiting if tried in (None, answer.owner))
        later = [answer for answer in self.waiting if tried not in (None, answer.owner)]
        try:
            slots.fill(weights, queue)
            slots.step(weights)
        except Exception as error:
            self.errors += 1
            if self.errors == BROKEN:
                raise
            if tried:
                tried.fail(error)
            else:
                begun = {answer.owner for answer in set(self.waiting).difference(queue)}
                self.suspects = list(begun or here)
            for group in here:
                group.active = ActiveGroup(group.request, group.active.answers)
            self.waiting = deque(t.answer for t in self.tickets if t is not None and t.answer.open)
            return make_slots(self.config)
        self.errors, self.waiting = 0, deque([*queue, *later])
        self.counts["prefills"] += slots.prefills - before
        self.counts["yields"] += slots.yielded
        return slots

    def init_decode_state(self) -> Slots | PagedSlots:
        """Empty rows."""
        self.tickets, self.waiting, self.suspects = [None] * len(self.tickets), deque(), []
        return make_slots(self.config)

    def get_prefix_destination_sharding(self) -> None:
        """None: a ticket is no array, and stays where it is."""

    def get_tokenizer(self) -> Any:
        return js.tokenizer_pb2.TokenizerParameters()

    def build_tokenizer(self, metadata: Any) -> DriverTokenizer:
        return DriverTokenizer(self.config.tokenizer)

    @property
    def max_concurrent_decodes(self) -> int:
        return len(self.tickets)

    @property
    def max_prefill_length(self) -> int:
        """A power of two, because JetStream looks it up among its own sizes."""
        return power_of_two(self.config.max_prompt_tokens, MIN_PREFIX)
