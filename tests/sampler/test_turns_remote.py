"""Turns on samplers in other processes: what was said is ours alone, and goes to them as any part of an answer."""

import numpy as np
import pytest
from fake_backend import FakeBackend, running
from test_decode import TOKENIZER

from jaxrl_llm.sampler import groups
from jaxrl_llm.sampler.client import Client, RemoteEngine
from jaxrl_llm.sampler.requests import NOTHING, Answer
from jaxrl_llm.sampler.sampling import Sampling
from jaxrl_llm.types import CANCELLED, EOS, LENGTH, Prompt

pytestmark = pytest.mark.slow

LETTERS = np.array(TOKENIZER.encode("abcdefgh"), np.int32)


def turn(request, g, version):
    """Some letters behind what an answer has, as many as its draw and number say; then its end."""
    begun = request.begun[g] if request.begun else NOTHING
    if begun.finish != CANCELLED:
        return begun
    n = min(1 + (request.draw + 3 * g + len(begun.tokens)) % 5, request.max_tokens - len(begun.tokens))
    whole = len(begun.tokens) + n == request.max_tokens
    new = LETTERS[(request.draw + np.arange(n)) % 8]
    new[-1] = new[-1] if whole else TOKENIZER.eos_ids[0]
    more = lambda x, y: np.concatenate([x, np.broadcast_to(np.array(y, x.dtype), n)])
    columns = more(begun.tokens, new), more(begun.logp, -0.5), more(begun.versions, version)
    return Answer(*columns, LENGTH if whole else EOS)


class Turns(FakeBackend):
    """Has newer weights with each request that goes on."""

    def _answer(self, future, request):
        with self._lock:
            del self._timers[future]
            self.version += bool(request.begun)
        future.set_result(tuple(turn(request, g, self.version) for g in range(request.group)))


class Alone:
    """The same in this process."""

    tokenizer, sampling, max_tokens, stop = TOKENIZER, Sampling(), 20, ()

    def sample(self, next_request, latest=None):
        while (r := next_request()) is not None:
            yield r, tuple(turn(r, g, 0) for g in range(r.group))


def says(prompt, text, finish):
    return "kkk" if text.count("k") < 9 and (prompt.id or len(text) % 2) else None


@pytest.mark.parametrize("servers", [1, 2])
def test_turns_of_servers_are_those_of_this_process(servers):
    prompts, asked = tuple(Prompt(i, "abc"[: 1 + i % 3]) for i in range(7)), {"seed": 1, "max_prompt_tokens": 9}
    alone = groups.sample_groups(Alone(), prompts, 3, draws=np.arange(7), step=says, **asked)
    with running(Turns(0.01)) as one, running(Turns(0.02)) as two:
        client = Client([one.address, two.address][:servers])
        try:
            engine = RemoteEngine(client, None, TOKENIZER, Sampling(), 20)
            found = groups.sample_groups(engine, prompts, 3, draws=np.arange(7), step=says, **asked)
        finally:
            client.close()
    for name in ("tokens", "sampler_logp", "lengths", "finish", "said", "texts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
    assert set(found.finish) == {EOS, LENGTH}
    assert found.said.sum(axis=1).max() == 9
    assert (found.sampler_logp[found.said] == 0).all()
    assert (found.sampler_logp[found.generated] < 0).all()
    assert found.n_tokens.max() < found.lengths.max() <= 20
    for versions, said, n in zip(found.versions, found.said, found.lengths, strict=True):
        assert servers == 2 or (np.diff(versions[:n]) >= 0).all()
        firsts = np.flatnonzero(np.diff(said[:n].astype(int)) == 1) + 1
        assert (versions[firsts] == versions[firsts - 1]).all()  # what is said has the version that it was said to
    assert found.versions.max() > 1
