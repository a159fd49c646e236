"""The optimiser: AdamW or Adafactor, with warm-up, a schedule and clipping by the global norm."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.lax import bitcast_convert_type, broadcasted_iota
from jaxtyping import Array, BFloat16, Float, Int, UInt32

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
    """Clip by global norm, then AdamW, or Adafactor without momentum and parameter scaling (1804.04235).

    Either adds lr·weight_decay·parameter. Adafactor keeps sums over rows and columns in the place of the squared
    gradients of each matrix whose two longest axes have 128 places or more, and bounds by lr the
    root mean square of a step of each parameter, all layers of it together, before weight decay.
    """
    c, rate = config, schedule(config, steps)
    if c.kind == "adafactor":
        decay, scale = optax.add_decayed_weights(c.weight_decay), optax.scale_by_learning_rate(rate)
        chosen = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), decay, scale)
    else:
        chosen = optax.adamw(rate, b1=c.b1, b2=c.b2, eps=c.eps, weight_decay=c.weight_decay)
        chosen = in_bfloat16(chosen) if c.moments_dtype == "bfloat16" else chosen
    return optax.chain(optax.clip_by_global_norm(c.clip_norm), chosen)


def in_bfloat16(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same optimiser, which keeps its moments in bfloat16, rounded stochastically; a step computes in float32.

    Numbers of bfloat16 lie 2⁻⁸ to 2⁻⁷ of themselves apart. A step moves ν by (1 − b2)·(g² − ν): rounded to nearest, ν
    would stay where it is once that is less than half of the distance, at b2 = .95 up to 8 % off g², at .999 at a fifth
    to a third of it, and would never fall again. Rounded up or down with the probabilities that make the mean right, ν
    follows g² with an error of mean 0; where g² is constant, ν ends within 2⁻⁷ of it.
    """
    is_moment = lambda x: jnp.issubdtype(x.dtype, jnp.floating)

    def cast(state: Any, dtype: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype) if is_moment(x) else x, state)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(grads, cast(state, jnp.float32), params)
        leaves, tree = jax.tree.flatten(new)
        seed = _steps_taken(state) * len(leaves)
        leaves = [rounded(x, seed + i) if is_moment(x) else x for i, x in enumerate(leaves)]
        return updates, jax.tree.unflatten(tree, leaves)

    return optax.GradientTransformation(lambda params: cast(tx.init(params), jnp.bfloat16), update)


def rounded(x: Float[Array, "*n"], seed: Int[Array, ""] | int) -> BFloat16[Array, "*n"]:
    """x in bfloat16, each up or down to a neighbour, up with the probability of its distance to the lower one.

    Chance is a hash of seed and place: plain arithmetic that becomes part of the update's loop, where jax.random would
    make arrays several times as large as the moments.
    """
    place, stride = jnp.full(x.shape, _mixed(jnp.asarray(seed, jnp.uint32))), 1
    for axis in reversed(range(x.ndim)):
        place += broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    bits = bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) + (_mixed(place) >> 16)
    return bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def _mixed(x: UInt32[Array, "*n"]) -> UInt32[Array, "*n"]:
    """The finaliser of MurmurHash3: from one number to the next half of the bits change."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def reset_moments(opt_state: optax.OptState) -> optax.OptState:
    """The same state with the moments and their count of steps at 0; the learning rate's count stays."""
    holds_moments = lambda x: isinstance(x, optax.ScaleByAdamState | optax.FactoredState)
    fresh = lambda x: jax.tree.map(jnp.zeros_like, x) if holds_moments(x) else x
    return jax.tree.map(fresh, opt_state, is_leaf=holds_moments)


def updates_applied(opt_state: optax.OptState) -> int:
    """Optimiser steps behind the learning rate's schedule: those that were skipped do not count."""
    return int(_steps_taken(opt_state))


def _steps_taken(opt_state: optax.OptState) -> Int[Array, ""]:
    is_schedule = lambda x: isinstance(x, optax.ScaleByScheduleState)
    return next(x.count for x in jax.tree.leaves(opt_state, is_leaf=is_schedule) if is_schedule(x))
