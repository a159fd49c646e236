"""The optimiser: AdamW with warm-up, a schedule and clipping by the global norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.types import Optimizer


def schedule(config: Optimizer, steps: int) -> optax.Schedule:
    """Learning rate of each of `steps` optimiser steps."""
    decay_steps = max(1, steps - config.warmup)
    after = {
        "constant": optax.constant_schedule(config.lr),
        "linear": optax.linear_schedule(config.lr, 0.0, decay_steps),
        "cosine": optax.cosine_decay_schedule(config.lr, decay_steps),
    }[config.schedule]
    # warm-up is lr·1/warmup, lr·2/warmup, …: not 0, so that the first step already learns
    warm = optax.linear_schedule(config.lr / max(1, config.warmup), config.lr, max(1, config.warmup - 1))
    return optax.join_schedules([warm, after], [config.warmup]) if config.warmup else after


def make_optimizer(config: Optimizer, steps: int) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW."""
    c = config
    adamw = optax.adamw(schedule(c, steps), b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay)
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), adamw)


def reset_moments(opt_state: optax.OptState) -> optax.OptState:
    """The same state with Adam's moments and their count of steps at 0; the learning rate's count stays."""
    is_adam = lambda x: isinstance(x, optax.ScaleByAdamState)
    fresh = lambda x: jax.tree.map(jnp.zeros_like, x) if is_adam(x) else x
    return jax.tree.map(fresh, opt_state, is_leaf=is_adam)


def updates_applied(opt_state: optax.OptState) -> int:
    """Optimiser steps behind the learning rate's schedule: those that were skipped do not count."""
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    return int(next(x.count for x in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(x)))
