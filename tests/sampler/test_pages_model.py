"""The bookkeeping of pages against a memory that knows what stands in it: no device, thousands of calls."""

import random
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_decode import MODEL, TOKENIZER
from test_pages import nothing_leaks

from jaxrl_llm.sampler import core, decode, pages, slots
from jaxrl_llm.sampler.requests import Request
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.sampler.weights import SamplerWeights
from jaxrl_llm.types import CANCELLED, EOS, LENGTH

SIZE, EOS_ID = 4, TOKENIZER.eos_ids[0]


def token(request, number, position):
    """What an answer says at a position, whoever is asked and when."""
    rng = random.Random(f"{request.draw} {number} {position}")
    return EOS_ID if rng.random() < 0.03 else rng.randrange(2, 16)


class Memory:
    """Stands in for the programs: each place of a page holds the token that was read there."""

    def __init__(self, monkeypatch, made):
        self.places, self.made = {}, made
        state = SimpleNamespace(pools=None, answers=None, step=0)
        state._replace = lambda **fields: state
        monkeypatch.setattr(pages, "_init", lambda *sizes: state)
        monkeypatch.setattr(pages, "_extend", self.extend)
        monkeypatch.setattr(pages, "_copy", self.copy)
        monkeypatch.setattr(pages, "_decode", self.decode)
        for name, fake in (("inserted", None), ("repack_answers", None), ("only_taken", None)):
            monkeypatch.setattr(slots, name, lambda *args, fake=fake: fake)

    def page(self, row, rows, page):
        paged = self.made[-1]
        assert page < paged.pages, "a page that nobody has"
        return row * paged.shards // rows * paged.pages + int(page)

    def read(self, row, rows, table, position, token):
        """A token goes to its place; what it then sees of its row."""
        self.places[self.page(row, rows, table[position // SIZE]), position % SIZE] = token
        return [self.places.get((self.page(row, rows, table[p // SIZE]), p % SIZE)) for p in range(position + 1)]

    def extend(self, model, params, pools, tokens, blocks):
        rows, width = tokens.shape
        for row in range(rows):
            for j in range(width):
                if blocks.real[row, j]:
                    seen = self.read(row, rows, blocks.table[row], blocks.ends[row] - width + j, int(tokens[row, j]))
                    assert None not in seen, "a token reads what is not there yet"

    def copy(self, pools, source, to):
        total = self.made[-1].pages * self.made[-1].shards
        for a, b in zip(source.tolist(), to.tolist(), strict=True):
            for place in range(SIZE * (b < total)):
                self.places[b, place] = self.places.get((a, place))

    def decode(self, model, eos, filtered, params, state, table, lengths, forced, record):
        rows, steps = forced.shape
        tokens, logp = np.zeros((rows, steps), int), np.zeros((rows, steps), np.float32)
        count, live = np.zeros(rows, int), np.zeros(rows, bool)
        for row, answer in enumerate(self.made[-1].rows):
            if answer is None:
                continue
            said = [*answer.request.prompt, *answer.tokens]
            live[row] = True
            while live[row] and count[row] < steps:
                assert self.read(row, rows, table[row], len(said) - 1, said[-1]) == said, "not what the answer has said"
                said.append(token(answer.request, answer.number, len(said)))
                tokens[row, count[row]] = said[-1]
                count[row] += 1
                live[row] = said[-1] != EOS_ID and len(said) - len(answer.request.prompt) < answer.limit
        return state, core.Drawn(tokens, logp, count, live)


def continued(rng, request, group):
    """A request that goes on with a cancelled group; an environment may have said something, or a caller cut it."""
    parts = []
    for a in group:
        if a.finish == CANCELLED and rng.random() < 0.1:
            half = len(a.tokens) // 2
            a = replace(a, tokens=(a.tokens[:half] + 1) % 14 + 2, logp=a.logp[:half], versions=a.versions[:half])
        more = rng.randrange(3) if a.finish == CANCELLED and len(a.tokens) + 4 < request.max_tokens else 0
        said = [token(request, 9, len(a.tokens) + i) for i in range(more)]
        add = lambda x, values: np.concatenate([x, np.array(values, x.dtype)])
        nothing = [0] * more
        parts.append(
            replace(a, tokens=add(a.tokens, said), logp=add(a.logp, nothing), versions=add(a.versions, nothing))
        )
    return replace(request, begun=tuple(parts))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seed", range(40))
def test_every_answer_reads_its_own_past(seed, shards, monkeypatch):
    rng, made, init = random.Random(seed), [], pages.PagedSlots.__init__

    def recorded(self, config):
        made.append(self)
        init(self, config)

    monkeypatch.setattr(pages.PagedSlots, "__init__", recorded)
    Memory(monkeypatch, made)
    mesh = SimpleNamespace(shape={"data": shards, "fsdp": 1, "tensor": 1}) if shards > 1 else None
    version, longest = [0], 20 + 30
    engine = decode.LocalEngine(
        MODEL, TOKENIZER, SamplerWeights(None), Sampling(), 30, cache="pages", page_tokens=SIZE, max_prompt_tokens=20,
        slots=rng.choice([2, 4, 12]), tokens_per_call=rng.choice([1, 3, 8]), prefill_tokens=rng.choice([16, 300]),
        mesh=mesh, kv_tokens=rng.choice([1, 2, 6]) * shards * -(-longest // SIZE) * SIZE,
    )  # fmt: skip
    prompts = [tuple(rng.choices(range(2, 16), k=rng.randint(1, 20))) for _ in range(6)]
    fresh = deque(
        Request(rng.choice(prompts), rng.randint(1, 4), rng.randint(1, 30), draw=i, budget=rng.choice([0, 0, 5, 9]))
        for i in range(40)
    )
    going_on, done = deque(), {}

    def next_request():
        if rng.random() < 0.2:
            version[0] += 1
        queue = going_on if going_on and (not fresh or rng.random() < 0.5) else fresh
        return queue.popleft() if queue and rng.random() < 0.9 else None

    while fresh or going_on:
        for request, group in engine.sample(next_request, lambda: SamplerWeights(None, version[0])):
            if any(a.finish == CANCELLED for a in group):
                going_on.append(continued(rng, request, group))
            else:
                done[request.draw] = group
        nothing_leaks(made[-1])
    assert sorted(done) == list(range(40))
    assert {a.finish for group in done.values() for a in group} == {EOS, LENGTH}
