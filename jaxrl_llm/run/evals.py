"""Evaluation: answers to held-out problems and to suites, drawn as in training but from other seeds, and judged."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.config import Config, Suite
from jaxrl_llm.data import fitting
from jaxrl_llm.data.tokenizers import Tokenizer
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.run import folder, measures
from jaxrl_llm.sampler import groups, scoring, turns
from jaxrl_llm.types import EOS, LENGTH, Prompt, Reward, Rollouts, Task, expect

SEED_STREAM = 2**31  # evaluation seeds lie above the training ones, which config keeps below
# How an answer may have to be written to be read at all: the constant baseline takes the first that is accepted.
FORMS = ("\\boxed{{{}}}", "<answer>{}</answer>", "</think><answer>{}</answer>", "#### {}", "#{}", "Answer: {}", "{}")


@dataclass(frozen=True)
class Sample:
    """One answer and its verdict: a line of an evaluation's file."""

    problem: int  # its place among the suite's
    number: int  # of the answer
    prompt: str  # as the policy saw it
    question: str | None  # the part of it that a template stands around
    answer: Any  # the gold
    meta: dict[str, Any]
    text: str
    finish: str
    tokens: int
    parsed: str | None
    vote: str | None  # the same for answers that are equal; None: nothing was parsed
    value: float
    correct: bool
    outcome: str = "scored"


@dataclass(frozen=True)
class Asked:
    """A suite that is ready: its problems, in their template, those that fit."""

    suite: Suite
    prompts: tuple[Prompt, ...]
    reward: Callable[[Prompt, str, str], Reward]
    longest: int  # tokens that a prompt may have
    step: Callable | None = None  # of the task
    constant: tuple[bool, ...] = ()  # by problem: whether the best constant answer is right; (): not known
    stop: tuple[str, ...] | None = None  # in place of the engine's own
    settings: Mapping[str, Any] = field(default_factory=dict)  # what the file of its samples says of them


def held_out(learner: Learner) -> Asked:
    """The run's own held-out problems, as many as its config evaluates on."""
    c, test = learner.config, learner.task.test
    e = c.evaluation
    prompts = tuple(test[i] for i in range(min(e.problems, len(test))))
    suite = Suite(c.task, problems=e.problems, samples=e.samples)
    return Asked(suite, prompts, learner.task.reward, c.rollout.max_prompt_tokens, learner.task.step)


def opened(name: str, suite: Suite, template: Callable, tokenizer: Tokenizer, config: Config) -> Asked:
    """The suite's problems in a template, and which of them its best constant answer solves.

    Those whose prompt leaves no room for an answer, or has characters that the tokenizer does not know, are left out
    and counted on stderr. ValueError when none is left.
    """
    task, r = fitting.open_task(suite.task, template, f"evaluation.suites.{name}.task"), config.rollout
    room = config.model.max_positions - (suite.max_tokens or r.max_response_tokens)
    room = min(room, r.max_prompt_tokens) if r.servers else room
    prompts = tuple(task.test[i] for i in range(min(suite.problems, len(task.test))))
    lengths = [_length(tokenizer, p) for p in prompts]
    fit = tuple(p for p, n in zip(prompts, lengths, strict=True) if 0 < n <= room)
    if without := len(prompts) - len(fit):
        why = f"their prompts are longer than {room} tokens, or have characters without a token"
        print(f"{name}: {without} of {len(prompts)} problems are left out: {why}", file=sys.stderr)
    expect(fit, f"suite {name}", "no problem that can be asked", f"prompts of 1 to {room} tokens")
    longest = max(n for n in lengths if n <= room)
    return Asked(suite, fit, task.reward, longest, task.step, constant(fit, task.reward))


def _length(tokenizer: Tokenizer, prompt: Prompt) -> int:
    with suppress(ValueError):
        return len(tokenizer.encode_prompt(prompt))
    return 0


def constant(prompts: Sequence[Prompt], reward: Callable) -> tuple[bool, ...]:
    """Which problems the commonest gold answers, in the first of FORMS in which its own problem's verdict is right.

    Of a list of golds, which are alternatives, the first counts. () if there is no such form.
    """
    first = lambda x: x[0] if isinstance(x, list | tuple) and x else x
    golds = [None if p.answer is None else str(first(p.answer)) for p in prompts]
    for gold, _ in Counter(g for g in golds if g is not None).most_common(1):
        own = prompts[golds.index(gold)]
        for text in (form.format(gold) for form in FORMS):
            if reward(own, text, EOS).correct:
                return tuple(bool(reward(p, text, EOS).correct) for p in prompts)
    return ()


def sample(engine: Any, asked: Asked, seed: int, file: Path | None = None) -> list[Sample]:
    """`suite.samples` judged answers to each problem, in the problems' order.

    They depend on the seed, the problem's place and the answer's number alone. file: where the samples are written,
    problem by problem, as they come. What it has already, of an evaluation with the same settings, is not drawn again;
    ValueError if its settings or its problems are others.
    """
    suite, samples = asked.suite, asked.suite.samples
    chosen = {n: v for n in ("temperature", "top_p") if (v := getattr(suite, n)) is not None}
    drawn = {"sampling": replace(engine.sampling, **chosen), "max_tokens": suite.max_tokens or engine.max_tokens}
    drawn |= {"stop": engine.stop if asked.stop is None else asked.stop}
    if hasattr(engine, "max_prompt_tokens"):
        drawn["max_prompt_tokens"] = asked.longest
    engine = replace(engine, **drawn)
    found = {} if file is None else _begun(file, asked)
    left = deque(i for i in range(len(asked.prompts)) if i not in found)
    pending: deque = deque()

    def next_request() -> Any:
        if not left:
            return None
        draw = left.popleft()
        (ids,) = groups.encode_prompts(engine.tokenizer, (asked.prompts[draw],), asked.longest)
        return groups.make_request(engine, ids, samples, seed=SEED_STREAM + seed, draw=draw)

    def keep(problem: int, answers: Rollouts, rewards: Any) -> None:
        found[problem] = _samples(problem, answers, rewards.result(), asked.reward)
        if file is not None:
            with open(file, "a", encoding="utf-8") as out:
                out.writelines(map(_line, map(asdict, found[problem])))

    judge = Task((), (), asked.reward)
    for request, group in turns.sample(engine, asked.step, lambda r: asked.prompts[r.draw], next_request):
        answers = groups.to_rollouts(engine.tokenizer, (asked.prompts[request.draw],), (request,), (group,))
        pending.append((request.draw, answers, scoring.begin_scoring(judge, answers)))
        while pending and pending[0][-1].done():
            keep(*pending.popleft())
    while pending:
        keep(*pending.popleft())
    return [s for problem in sorted(found) for s in found[problem]]


def _samples(problem: int, answers: Rollouts, rewards: Sequence[Reward], judge: Callable) -> list[Sample]:
    p, votes = answers.prompts[0], _votes([r.parsed for r in rewards], getattr(judge, "same", None))
    about = p.text, p.question, p.answer, dict(p.meta)
    ended = zip(answers.texts, answers.finish.tolist(), answers.n_tokens.tolist(), strict=True)
    said = [(r.parsed, v, float(r.value), bool(r.correct), r.outcome) for r, v in zip(rewards, votes, strict=True)]
    return [Sample(problem, g, *about, *e, *s) for g, (e, s) in enumerate(zip(ended, said, strict=True))]


def _votes(parsed: Sequence[str | None], same: Callable[[str, str], bool] | None) -> list[str | None]:
    """One text for equal answers: equal once normalised, or, if the reward has a method `same`, as that says."""
    known: list[str] = []
    votes: list[str | None] = []
    for text in (None if p is None else measures.normalised(p) for p in parsed):
        vote = text if text is None or same is None else next((k for k in known if same(k, text)), text)
        known += [vote] if vote is not None and vote not in known else []
        votes.append(vote)
    return votes


# --- files


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str, ensure_ascii=False) + "\n"


def read(file: Path) -> tuple[dict[str, Any], list[Sample]]:
    """Settings and samples of an evaluation's file; a problem whose lines a kill has cut short is left out.

    Raises ValueError, naming file and line, for one that is none.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; expected the samples of jaxrl eval")
    settings, samples = None, []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if number == 1:
                settings = {"suite": row["settings"]["suite"]} | row["settings"]
            else:
                samples.append(Sample(**row))
        except (ValueError, TypeError, KeyError) as error:
            if number < len(lines) or number == 1:
                raise ValueError(f"{file}:{number}: {error}; expected a line of jaxrl eval's samples") from error
    told = Counter(s.problem for s in samples)
    return settings, [s for s in samples if told[s.problem] == settings.get("samples", told[s.problem])]


def write(file: Path, settings: Mapping[str, Any], samples: Sequence[Sample]) -> None:
    """The inverse of `read`; a kill leaves the file as it was, or whole."""
    file.parent.mkdir(parents=True, exist_ok=True)
    folder.write_whole(file, _line({"settings": settings}) + "".join(map(_line, map(asdict, samples))))


def _begun(file: Path, asked: Asked) -> dict[int, list[Sample]]:
    """The problems that the file has all answers of; it is left with those alone."""
    found: dict[int, list[Sample]] = defaultdict(list)
    if file.exists() and file.stat().st_size:
        settings, samples = read(file)
        now = json.loads(_line(asked.settings))
        differ, other = "; ".join(configs.differences(settings, now)), "or --out with another folder"
        expect(not differ, str(file), differ, f"the same settings, {other}")
        for s in samples:
            if s.problem < len(asked.prompts):
                text = asked.prompts[s.problem].text
                expect(s.prompt == text, f"{file}: problem {s.problem}", s.prompt[:80], f"{text[:80]!r}, {other}")
                found[s.problem].append(s)
    whole = {problem: group for problem, group in found.items() if len(group) == asked.suite.samples}
    write(file, asked.settings, [s for group in whole.values() for s in group])
    return whole


def prompt_of(s: Sample) -> Prompt:
    """The problem that a sample answers."""
    return Prompt(s.problem, s.prompt, s.answer, s.meta, s.question)


def rescored(samples: Sequence[Sample], reward: Callable[[Prompt, str, str], Reward]) -> list[Sample]:
    """The samples with the verdicts of another reward, or of the same one again."""
    out, by_problem = [], defaultdict(list)
    for s in samples:
        by_problem[s.problem].append(s)
    for problem, group in by_problem.items():
        blank, n = np.zeros((len(group), 1), np.int32), np.array([s.tokens for s in group])
        texts, finish = tuple(s.text for s in group), np.array([s.finish for s in group])
        answers = Rollouts((prompt_of(group[0]),), blank[:1], n[:1], blank, blank, n, finish, texts, np.zeros(1))
        out += _samples(problem, answers, scoring.score(Task((), (), reward), answers), reward)
    return out


# --- numbers


def by_problem(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Each problem's accuracy (avg@N, pass@1), pass@k for k = 2, 4, …, maj@k for k = 4, 8, … up to N; [P]."""
    n = max(s.number for s in samples) + 1
    correct = np.array([s.correct for s in samples]).reshape(-1, n)
    votes, powers = np.array([s.vote for s in samples], object).reshape(-1, n), [2**i for i in range(1, n.bit_length())]
    votes = np.array([[-1 if v is None else row.index(v) for v in row] for row in votes.tolist()])
    out = {"accuracy": correct.mean(axis=1)} | {f"pass@{k}": measures.pass_at_k(correct, k) for k in powers}
    return out | {f"maj@{k}": measures.majority_at_k(votes, correct, k) for k in powers if k > 2}


def summary(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over the problems of `by_problem`, then lengths (tokens; NaN where there is no such answer) and shares."""
    tokens, correct = (np.array([getattr(s, name) for s in samples]) for name in ("tokens", "correct"))
    mean = lambda x: float(np.mean(x)) if len(x) else float("nan")
    out = {name: float(values.mean()) for name, values in by_problem(samples).items()}
    out |= {"length": mean(tokens), "length/correct": mean(tokens[correct]), "length/wrong": mean(tokens[~correct])}
    return out | {"truncated": mean([s.finish == LENGTH for s in samples])}


def grouped(samples: Sequence[Sample], name: str) -> dict[str, list[Sample]]:
    """The samples by what their problems' meta says under `name` (source, level, …); without such, none."""
    out = defaultdict(list)
    for s in samples:
        if s.meta.get(name) is not None:
            out[str(s.meta[name])].append(s)
    return dict(sorted(out.items()))


# --- in the loop


def ready(learner: Learner) -> dict[str, Asked]:
    """The config's suites, opened."""
    c = learner.config
    template = c.algorithm.prompts.template
    return {n: opened(n, s, template, learner.tokenizer, c) for n, s in c.evaluation.suites.items()}


def scheduled(learner: Learner, engine: Any, suites: Mapping[str, Asked], step: int) -> dict[str, float]:
    """eval/NAME/… of the suites whose turn it is: before the first step, after the last, and as they say between."""
    c, row, start = learner.config, {}, time.perf_counter()
    for name, asked in suites.items():
        every = asked.suite.every or c.evaluation.every
        if step in (0, c.total_steps) or (every and step % every == 0):
            found = summary(sample(engine, asked, c.seed))
            found |= {"constant": float(np.mean(asked.constant))} if asked.constant else {}
            row |= {f"eval/{name}/{what}": value for what, value in found.items()}
    return row | ({"perf/suites_s": time.perf_counter() - start} if row else {})
