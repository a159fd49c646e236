"""Milliseconds of every loss, token selection and token-level advantage on 64 answers of up to 2048 tokens, float32.

A loss is timed as it is learnt with: the value of Σ w·x and its gradient, jitted. Selections and advantages are not
differentiated. GB/s divides the bytes that must move (each input read once, each output written once) by the time;
"add" is the machine's own rate, one array added to another. The last column compares with ppo_clip.

Command: python experiments/benchmarks/objectives.py [--runs 100]      (pins itself to one core)
"""

import os
from collections.abc import Callable
from functools import partial

CORE = {int(os.environ.get("BENCH_CORE", "0"))}
os.sched_setaffinity(0, CORE)  # before jax counts the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import time  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import tyro  # noqa: E402

from jaxrl_llm.objective import advantages, losses  # noqa: E402
from jaxrl_llm.objective.algorithms import call  # noqa: E402
from jaxrl_llm.objective.token_weights import token_weights  # noqa: E402

B, T, GROUP = 64, 2048, 8
LOSSES = (
    *(losses.ppo_clip, losses.reinforce, losses.gpg, losses.cispo, losses.sapo, losses.dcpo, losses.topr),
    *(losses.dppo_tv, losses.dppo_kl, losses.vespo, losses.gspo, losses.gspo_token, losses.luspo, losses.gmpo),
    *(losses.rspo, losses.opmd, losses.clip_cov, losses.kl_cov),
)
OF_TOKENS = (advantages.gae, advantages.length_adaptive_gae)
OF_ANSWERS = (
    *(advantages.token_rewards, advantages.reinforce_pp, advantages.reweight, advantages.distilled, advantages.whiten),
)
Arrays = dict[str, jax.Array]


def arrays() -> Arrays:
    """Answers of 256 to 2048 tokens, ratios mostly within 30 % of 1, an advantage an answer."""
    rng = np.random.default_rng(0)
    noise = lambda scale: jnp.asarray(rng.normal(size=(B, T)) * scale, jnp.float32)
    mask = jnp.asarray(np.arange(T) < rng.integers(T // 8, T + 1, (B, 1)))
    logp, adv = -jnp.abs(noise(1.0)), jnp.asarray(rng.normal(size=(B, 1)), jnp.float32)
    return {
        "logp": logp,
        "old_logp": logp - noise(0.15),
        "ref_logp": logp - noise(0.3),
        "teacher_logp": logp - noise(0.3),
        "adv": jnp.where(mask, adv, 0.0),
        "mask": mask,
        "weights": token_weights(mask, "token"),
        "log_router_ratio": -jnp.abs(noise(0.1)),
        "selected": mask & jnp.asarray(rng.random((B, T)) < 2e-3),
        "entropy": jnp.abs(noise(1.0)),
        "key": jax.random.key(0),
        "values": noise(0.3),
        "old_values": noise(0.3),
        "returns": noise(0.3),
        "kl": jnp.abs(noise(0.1)),
        "x": noise(1.0),
        "rewards": jnp.asarray(rng.integers(0, 2, B), jnp.float32),
    }


def learnt(x: Callable, live: str = "logp") -> Callable:
    """Value and gradient of Σ w·x in `live`."""
    loss = lambda value, given: jnp.sum(given["weights"] * call(x, given | {live: value}))
    return lambda given: jax.value_and_grad(loss)(given[live], given)


def cases() -> list[tuple[str, Callable, Arrays]]:
    """Name, function of a dict of arrays, and that dict; ppo_clip comes first."""
    have = arrays()
    tokens = have | {"rewards": advantages.token_rewards(have["rewards"], have["kl"], have["mask"])}
    groups = {"rewards": have["rewards"].reshape(-1, GROUP), "mask": have["mask"].reshape(-1, GROUP, T)}
    largest = partial(losses.select_cov, key=None)
    return [
        *((f.__name__, learnt(f), have) for f in LOSSES),
        ("kl", learnt(partial(losses.kl, old_logp=None)), have),
        ("kl unbiased", learnt(losses.kl), have),
        ("value_loss", learnt(losses.value_loss, "values"), have),
        ("select_cov", partial(call, largest), have),
        *((f.__name__, partial(call, f), have) for f in (losses.select_clip_cov, losses.top_entropy)),
        *((f.__name__, partial(call, f), tokens) for f in OF_TOKENS),
        *((f.__name__, partial(call, f), have) for f in OF_ANSWERS),
        ("reinforce_pp_baseline", partial(call, advantages.reinforce_pp_baseline), groups),
        ("add", lambda given: given["logp"] + given["adv"], have),
    ]


def read(fn: Callable, given: Arrays) -> Arrays:
    """Those of the arrays that the function's result depends on."""
    jaxpr = jax.make_jaxpr(fn)(given).jaxpr
    used = {id(v) for equation in jaxpr.eqns for v in equation.invars}
    return {name: given[name] for name, v in zip(sorted(given), jaxpr.invars, strict=True) if id(v) in used}


def milliseconds(fn: Callable, given: Arrays, runs: int) -> float:
    """Median time of the jitted function."""
    jitted, taken = jax.jit(fn), []
    for _ in range(runs + 3):
        start = time.perf_counter()
        jax.block_until_ready(jitted(given))
        taken.append(time.perf_counter() - start)
    return 1e3 * float(np.median(taken[3:]))


def main(runs: int = 100) -> None:
    """Print the table.

    Args:
        runs: timed calls of each function, after three that compile and warm up.
    """
    print(f"{B} × {T} float32 arrays of {4 * B * T / 1e6:.2f} MB, one core, median of {runs}")
    print(f"{'':22} {'ms':>7} {'MB moved':>8} {'GB/s':>6} {'times ppo_clip':>14}")
    base = None
    for name, fn, given in cases():
        moved = jax.tree.leaves((read(fn, given), jax.eval_shape(fn, given)))
        size = sum(x.size * x.dtype.itemsize for x in moved)
        ms = milliseconds(fn, given, runs)
        base = base or ms
        print(f"{name:22} {ms:7.3f} {size / 1e6:8.2f} {size / ms / 1e6:6.1f} {ms / base:14.2f}")


if __name__ == "__main__":
    tyro.cli(main)
