"""What a sampler is asked and what it answers: plain host data, the same in process and over the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm import types
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.sampler.sampling import Sampling


@dataclass(frozen=True)
class Answer:
    """One response, complete or not. Each token has its log-prob and the version of the weights that drew it."""

    tokens: np.ndarray  # int32 [n], the end-of-sequence token included
    logp: np.ndarray  # float32 [n], of the distribution really drawn from
    versions: np.ndarray  # int32 [n]
    finish: str  # eos, stop, length; cancelled: ended from outside, and may be continued
    experts: np.ndarray | None = None  # [n,L,K], where the routers sent each token, if the sampler records it
    said: np.ndarray | None = None  # bool [n], tokens that an environment has said: see turns.py


FINISHES = (types.EOS, types.STOP, types.LENGTH, types.CANCELLED)
COLUMNS = {"tokens": np.int32, "logp": np.float32, "versions": np.int32}  # of an answer
MAX_STOPS, STOP_LENGTH = 64, 1024  # strings of a request, and characters of each: every token's text is searched
COLDEST, HOTTEST, LEAST_TOP_P = 1e-6, 1e6, 1e-6  # what divides logits may neither be subnormal nor overflow
WHOLE, REAL = (int, np.integer), (int, float, np.integer, np.floating)
ROUNDING = 1e-3  # nats that a log-prob may be above 0

NOTHING = Answer(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), types.CANCELLED)


@dataclass(frozen=True)
class Request:
    """One prompt and how its group is to be sampled.

    Answer g depends on (prompt, sampling, seed, draw, g) alone; g runs from 0. begun: what earlier calls have drawn,
    nothing or a part for each answer: those that are finished are returned as they are, cancelled ones are continued.
    """

    prompt: tuple[int, ...]  # token ids
    group: int = 1
    max_tokens: int = 256  # per answer, the end-of-sequence token and what was begun included
    sampling: Sampling = Sampling()
    stop: tuple[str, ...] = ()
    seed: int = 0
    draw: int = 0
    begun: tuple[Answer, ...] = ()
    budget: int = 0  # tokens that this call may add to an answer before it cancels it; 0: no bound


Group = tuple[Answer, ...]
# Gives the next request, or None when there is none for now; it is called again after each group that was answered.
NextRequest = Callable[[], Request | None]


def check(
    request: Request, *, vocab_size: int, max_prompt_tokens: int | None = None, max_tokens: int | None = None
) -> None:
    """Raises ValueError with the field of the request that cannot be served, by type and range."""
    r, s = request, request.sampling
    most = "" if max_prompt_tokens is None else f" to {max_prompt_tokens}"
    fits = len(r.prompt) and (max_prompt_tokens is None or len(r.prompt) <= max_prompt_tokens)
    types.expect(fits, "prompt", f"{len(r.prompt)} tokens", f"1{most}")
    _check_ids("prompt", r.prompt, vocab_size)
    wholes = [("group", 1, 31), ("max_tokens", 1, 31), ("budget", 0, 31), ("seed", 0, 32), ("draw", 0, 32)]
    for name, low, bits in wholes:
        _check_number(name, getattr(r, name), WHOLE, low, 2**bits - 1)
    types.expect(max_tokens is None or r.max_tokens <= max_tokens, "max_tokens", r.max_tokens, f"at most {max_tokens}")
    coldest, expected = s.temperature and COLDEST, f"0 (greedy) or a number in [{COLDEST:g}, {HOTTEST:g}]"
    _check_number("temperature", s.temperature, REAL, coldest, HOTTEST, expected)
    _check_number("top_k", s.top_k, WHOLE, 0, 2**31 - 1)
    _check_number("top_p", s.top_p, REAL, LEAST_TOP_P, 1, f"a number in (0, 1], at least {LEAST_TOP_P:g}")
    texts = all(isinstance(x, str) and 0 < len(x) <= STOP_LENGTH for x in r.stop)
    expected = f"at most {MAX_STOPS} strings, of 1 to {STOP_LENGTH} characters"
    types.expect(texts and len(r.stop) <= MAX_STOPS, "stop", r.stop, expected)
    types.expect(len(r.begun) in (0, r.group), "begun", f"{len(r.begun)} answers", f"none, or group = {r.group}")
    for answer in r.begun:
        _check_answer("begun", answer, vocab_size)
        most = r.max_tokens - (answer.finish == types.CANCELLED)  # one that continues has a token to come
        expected = f"at most {most} tokens, for max_tokens = {r.max_tokens}"
        types.expect(len(answer.tokens) <= most, "begun", len(answer.tokens), expected)


def _check_number(name: str, value: Any, kinds: tuple[type, ...], low: float, high: float, expected: str = "") -> None:
    fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    types.expect(fits, name, value, expected or f"a whole number from {low} to {high}")


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    ids = np.asarray(ids)
    whole = ids.ndim == 1 and ids.dtype.kind in "iu"
    shown = [int(ids.min()), int(ids.max())] if whole else f"an array of {ids.dtype}"
    types.expect(whole and shown[0] >= 0 and shown[1] < vocab_size, name, shown, f"token ids in [0, {vocab_size})")


def _check_answer(name: str, answer: Answer, vocab_size: int) -> None:
    """What holds for any answer, whoever sends it."""
    columns = [np.asarray(getattr(answer, column)) for column in COLUMNS]
    sizes = tuple(map(len, columns))
    types.expect(len(set(sizes)) == 1, name, sizes, "as many log-probs and versions as tokens")
    types.expect(answer.finish in FINISHES, f"{name} finish", answer.finish, f"one of {', '.join(FINISHES)}")
    types.expect(sizes[0] or answer.finish == types.CANCELLED, name, "no token", "one, in an answer that has ended")
    if sizes[0]:
        tokens, logp, versions = columns
        _check_ids(f"{name} tokens", tokens, vocab_size)
        low, high = float(logp.min()), float(logp.max())  # either is nan if one is
        types.expect(low > -np.inf and high <= ROUNDING, f"{name} logp", [low, high], "finite log-probs, none above 0")
        types.expect(versions.min() >= 0, f"{name} versions", int(versions.min()), "at least 0")


def check_group(
    request: Request, group: Group, *, vocab_size: int, versions: tuple[int, int] = (0, 2**31 - 1), cut: bool = False
) -> None:
    """Raises ValueError unless `group` may be what a sampler answers to `request`.

    versions: the least and the newest that it may have drawn with. cut: answers may have been ended from outside.
    """
    types.expect(len(group) == request.group, "group", f"{len(group)} answers", f"group = {request.group}")
    for number, answer in enumerate(group):
        name, n, finish = f"answer {number}", len(answer.tokens), answer.finish
        _check_answer(name, answer, vocab_size)
        begun, limit = request.begun[number] if request.begun else NOTHING, PartialAnswer(request, number).limit
        old = len(begun.tokens)
        same = all(np.array_equal(getattr(answer, c)[:old], getattr(begun, c)) for c in COLUMNS)
        types.expect(same and n <= limit, name, f"{n} tokens", f"those {old} that were begun, and at most {limit}")
        new = [int(v) for v in np.unique(answer.versions[old:])]
        inside = not new or (versions[0] <= new[0] and new[-1] <= versions[1])
        types.expect(inside, f"{name} versions", new, f"{versions[0]} to {versions[1]}, the versions pushed")
        if begun.finish != types.CANCELLED or finish == types.CANCELLED:
            goes_on = finish == begun.finish and n < request.max_tokens and (cut or n == limit)
            fits = goes_on if finish == types.CANCELLED else n == old and finish == begun.finish
        else:
            fits = {types.LENGTH: n == request.max_tokens, types.STOP: request.stop}.get(finish, True) and n > old
        types.expect(fits, name, f"{finish} after {n} tokens", f"an end that the request allows, limit {limit}")


class StopSearch:
    """Looks for stop strings in an answer's text, each token of which is decoded a few times, whatever its length.

    What is decoded begins at token `start`: text before it is complete and can be no part of a stop string that is
    still to come, and without it the tokens from `start` on decode to the same text.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Tokenizer):
        self.stop, self.tokenizer, self.start = stop, tokenizer, 0
        self.longest = max(map(len, stop))

    def find(self, tokens: Sequence[int], searched: int) -> int | None:
        """Tokens up to the one that completes a stop string, which is none of the first `searched`; None: no stop."""
        text_up_to = lambda n: self.tokenizer.decode(tokens[self.start : n])
        if any(s in text_up_to(len(tokens)) for s in self.stop):
            old = len(text_up_to(searched).rstrip("\ufffd"))  # an answer of several turns has stopped before
            new = lambda text: any(s in text and text.rfind(s) + len(s) > old for s in self.stop)
            if new(text_up_to(len(tokens))):
                return next(n for n in range(searched + 1, len(tokens) + 1) if new(text_up_to(n)))
        self._advance(tokens)
        return None

    def _advance(self, tokens: Sequence[int]) -> None:
        """Move `start` on, if there is a token that more than a stop string's characters follow."""
        text, kept = self.tokenizer.decode(tokens[self.start :]), 2 * self.longest + 16
        while kept + 4 < len(tokens) - self.start:
            for start in range(len(tokens) - kept, len(tokens) - kept - 4, -1):  # of 4 bytes one begins a character
                tail = self.tokenizer.decode(tokens[start:])
                if text.endswith(tail) and len(tail) - tail.count("\ufffd") >= self.longest:  # U+FFFD: not yet whole
                    self.start = start
                    return
            kept *= 2


class PartialAnswer:
    """An answer while it is being drawn, of a group that its `slots.ActiveGroup` sets."""

    group: Any

    def __init__(self, request: Request, number: int, script: tuple[int, ...] = ()):
        """script: the tokens it shall have, whatever would be drawn."""
        self.request, self.number, self.script = request, number, script
        begun = request.begun[number] if request.begun else NOTHING
        self.tokens, self.logp, self.versions = begun.tokens.tolist(), begun.logp.tolist(), begun.versions.tolist()
        self._n_begun, self.finish = len(self.tokens), begun.finish
        self._experts = [] if begun.experts is None else [begun.experts]  # of each call
        self._search: StopSearch | None = None

    @property
    def limit(self) -> int:
        """Tokens that the answer may have when this call is over."""
        r = self.request
        if self.script:
            return len(self.script)
        return min(r.max_tokens, self._n_begun + r.budget) if r.budget else r.max_tokens

    @property
    def open(self) -> bool:
        """Whether there is anything to be drawn."""
        return self.finish == types.CANCELLED and len(self.tokens) < self.limit

    def take(
        self, tokens: Sequence[int], logp: Sequence[float], version: int, tokenizer: Tokenizer,
        experts: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """Add what was drawn. A stop string, and then an end-of-sequence token or the limit, ends the answer."""
        searched = len(self.tokens)
        self.tokens += tokens
        self.logp += logp
        self.versions += [version] * len(tokens)
        self._experts += [] if experts is None else [experts]
        ended = self.tokens[-1] in tokenizer.eos_ids
        if self.request.stop:
            self._search = self._search or StopSearch(self.request.stop, tokenizer)
            # The text of an end-of-sequence token, "</s>" perhaps, is no part of the answer's.
            n = self._search.find(self.tokens[:-1] if ended else self.tokens, searched)
            if n is not None:
                self.tokens, self.logp, self.versions = self.tokens[:n], self.logp[:n], self.versions[:n]
                self.finish = types.STOP
                return
        if ended:
            self.finish = types.EOS
        elif len(self.tokens) >= self.request.max_tokens:
            self.finish = types.LENGTH

    def answer(self) -> Answer:
        ints = lambda x: np.array(x, np.int32)
        experts = np.concatenate(self._experts)[: len(self.tokens)] if self._experts else None
        return Answer(ints(self.tokens), np.array(self.logp, np.float32), ints(self.versions), self.finish, experts)
