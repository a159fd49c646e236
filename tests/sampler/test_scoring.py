"""What is told of a verifier that raises: here, in a thread, in a worker's process, or that is cancelled."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.rewards.workers import isolated, threaded
from jaxrl_llm.sampler import scoring
from jaxrl_llm.types import EOS, Prompt, Reward, Rollouts, Task


def deeper(text):
    return {}[text]


def verdict(prompt, text, finish):
    if prompt.id == 7:
        deeper(text)  # the line that is told
    return Reward(1.0, True)


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def odd(prompt, text, finish):
    raise Odd(1, 2)


def by_name(prompt, text, finish):
    return Reward("1", True)


def asked(*ids):
    blank, n = np.zeros((len(ids), 1), np.int32), np.ones(len(ids), np.int32)
    prompts, texts = tuple(Prompt(i, f"{i}?") for i in ids), tuple(f"to {i}" for i in ids)
    return Rollouts(prompts, blank, n, blank, blank * 1.0, n, np.full(len(ids), EOS), texts, np.zeros(len(ids)))


@pytest.mark.parametrize("where", [lambda fn: fn, threaded, isolated(workers=1)], ids=["here", "thread", "worker"])
def test_an_error_names_prompt_response_and_the_verifier_s_own_line(where):
    line = 1 + Path(__file__).read_text().splitlines().index("    return {}[text]")
    with pytest.raises(ValueError, match="reward of prompt 7 raised") as caught:
        scoring.score(Task((), (), where(verdict)), asked(3, 7))
    assert str(caught.value) == (
        f"reward of prompt 7 raised KeyError: 'to 7' at {__file__}:{line} (prompt '7?', response 'to 7')"
    )
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_error_that_cannot_leave_its_process_has_its_line_too():
    line = 1 + Path(__file__).read_text().splitlines().index("    raise Odd(1, 2)")
    with pytest.raises(ValueError, match=rf"raised RuntimeError: Odd: 1 and 2 at {__file__}:{line} "):
        scoring.score(Task((), (), isolated(odd, workers=1)), asked(3))


def test_a_value_that_is_no_number_is_shown():
    for where in (lambda fn: fn, isolated(workers=1)):
        with pytest.raises(ValueError, match=r"reward of prompt 3 is Reward\(value='1'.*expected a Reward with a fini"):
            scoring.score(Task((), (), where(by_name)), asked(3))


class Cancelled:
    def submit(self, prompt, text, finish):
        future = Future()
        if prompt.id == 7:
            future.cancel()
        else:
            future.set_result(Reward(1.0, True))
        return future


def test_a_cancelled_verdict_is_an_error_of_its_prompt():
    assert scoring.score(Task((), (), Cancelled()), asked(3))[0].correct
    with pytest.raises(ValueError, match=r"reward of prompt 7 raised CancelledError:  \(prompt '7\?'"):
        scoring.score(Task((), (), Cancelled()), asked(3, 7))


def test_a_verdict_that_comes_late_is_waited_for_and_may_raise():
    futures = [Future(), Future()]
    Late = type("Late", (), {"submit": lambda self, prompt, text, finish: futures[prompt.id]})
    verdicts = scoring.begin_scoring(Task((), (), Late()), asked(0, 1))
    futures[1].set_result(Reward(0.5, True))
    assert not verdicts.done()
    futures[0].set_exception(OSError("no more room"))
    with pytest.raises(ValueError, match="reward of prompt 0 raised OSError: no more room"):
        verdicts.result(0)
