"""Whether rewards cost a run its time: answers are judged in worker processes while others are drawn.

Of the demo's shapes with slots for a quarter of a batch, so that answers end all the time, batch by batch in turn: the
rollout with a verifier that takes no time, the same answers judged by one that takes `--cpu-ms` of CPU each, and both
at once, as a run does them. Bound: 1.15 × the longer of the two.
With --hostile that share of the answers is replaced by hostile ones before math-verify judges them; printed are whole
training steps with and without them. Bound: 1.2 ×. With --spin the verifier spins on them until the kernel ends it.

Command: python experiments/benchmarks/rollout_rewards.py [--cpu-ms 50] [--workers 1] [--batches 5]
     or: python experiments/benchmarks/rollout_rewards.py --hostile 0.02 --workers 2 [--spin]
"""

import hashlib
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import rewards
import tyro

from jaxrl_llm import config as configs
from jaxrl_llm.learner.learner import build, fresh_state
from jaxrl_llm.rewards import answers
from jaxrl_llm.rewards.workers import isolated
from jaxrl_llm.run import metrics, modes, trainer
from jaxrl_llm.run.modes import Position
from jaxrl_llm.sampler import scoring
from jaxrl_llm.types import EOS, Prompt, Reward

EXPERIMENT = Path(__file__).parents[1] / "laptop_dapo.py"


warm_up = answers.warm_up  # of the workers, before they are forked


def busy(prompt: Prompt, text: str, finish: str, cpu_ms: float = 50.0) -> Reward:
    """Computes for so long."""
    end = time.process_time() + cpu_ms / 1000
    while time.process_time() < end:
        pass
    return Reward(float(number(prompt, text) % 2), False, text)


def number(prompt: Prompt, text: str) -> int:
    """That of an answer, the same in every run."""
    return int.from_bytes(hashlib.blake2b(f"{prompt.text} {text}".encode(), digest_size=6).digest(), "big")


def mathematical(prompt: Prompt, text: str, finish: str, hostile: float = 0.0, spin: bool = False) -> Reward:
    """math-verify's verdict, of a share of the answers after they have become hostile."""
    n = number(prompt, text)
    if n % 10_000 < hostile * 10_000:
        while spin:
            pass
        text = rf"\boxed{{{rewards.HOSTILE[n // 10_000 % len(rewards.HOSTILE)]}}}"
    verdict = answers.reward(prompt, text, finish, last=True)
    return replace(verdict, value=float(n % 2))  # an advantage in every group


def free(prompt: Prompt, text: str, finish: str) -> Reward:
    return Reward(0.0, False)


def table(rows: dict[str, list[float]], reference: float, bound: float) -> None:
    for name, seconds in rows.items():
        print(f"  {name:<34} {np.median(seconds):6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})")
    ratio = np.median(list(rows.values())[-1]) / reference
    print(f"  ratio {ratio:.3f}, bound {bound}: {'met' if ratio <= bound else 'NOT met'}")


def main(
    cpu_ms: float = 50.0,
    workers: int = 1,
    batches: int = 5,
    hostile: float = 0.0,
    spin: bool = False,
    cpu_s: float = 0.5,
) -> None:
    """
    Args:
        cpu_ms: of the verifier, for each answer; not with --hostile.
        workers: processes that judge.
        batches: batches, or training steps, of each kind.
        hostile: share of answers that are hostile.
        spin: whatever they are, the verifier never ends on them.
        cpu_s: after which the kernel ends it.
    """
    config = configs.load(EXPERIMENT)
    algorithm = replace(config.algorithm, group_filter=None)
    quarter = replace(config.rollout, slots=config.rollout.prompts * config.rollout.group_size // 4)
    learner = build(replace(config, algorithm=algorithm, rollout=quarter, prime=None))  # a policy that writes on and on
    limits = {"cpu_s": cpu_s, "workers": workers}
    judged_by = lambda reward: replace(learner, task=replace(learner.task, reward=reward))
    with jax.set_mesh(learner.mesh):
        state = fresh_state(learner)
        engine = trainer.make_engine(learner, state.params)
        if hostile:
            kinds = (partial(mathematical, hostile=share, spin=spin) for share in (0.0, hostile))
            steps(judged_by, state, engine, *(isolated(kind, **limits) for kind in kinds), batches)
        else:
            rollouts(judged_by, engine, isolated(partial(busy, cpu_ms=cpu_ms), **limits), batches)


def rollouts(judged_by, engine, judge, batches: int) -> None:
    rows = {"rollout alone": [], "rewards alone": [], "both, as a run does them": []}
    judge(Prompt(0, ""), "", EOS)  # starts the workers
    for i in range(batches + 1):
        at, kinds = Position(draw=i * 32), list(rows)
        for name, reward in ((kinds[0], free), (kinds[2], judge)):
            start = time.perf_counter()
            scored, _ = modes.sample_batch(judged_by(reward), engine, at, metrics.Stopwatch())
            rows[name].append(time.perf_counter() - start)
        start = time.perf_counter()
        scoring.score(judged_by(judge).task, scored.rollouts)
        rows[kinds[1]].append(time.perf_counter() - start)
    rows = {name: seconds[1:] for name, seconds in rows.items()}  # the first compiles
    print(f"{len(scored.rewards)} answers of {scored.rollouts.lengths.mean():.0f} tokens")
    table(rows, max(np.median(rows[name]) for name in list(rows)[:2]), 1.15)


def steps(judged_by, state, engine, judge, hostile, batches: int) -> None:
    rows, lost = {"step without hostile answers": [], "step with them": []}, 0
    for i in range(batches + 1):
        for name, reward in zip(rows, (judge, hostile), strict=True):
            learner = judged_by(reward)
            start = time.perf_counter()
            state, engine, _, scored, row = trainer.one_step(
                learner, state, engine, Position(draw=i * 32), modes.Sync(learner)
            )
            jax.block_until_ready(state.params)
            rows[name].append(time.perf_counter() - start)
            lost += row["reward/timed_out"]
    rows = {name: seconds[1:] for name, seconds in rows.items()}
    print(f"{len(scored.rewards)} answers a step, {lost / (batches + 1):.1f} of them timed out")
    table(rows, np.median(list(rows.values())[0]), 1.2)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
