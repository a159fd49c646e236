"""From sampled responses to what one optimiser step learns from."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Bool, Float

from jaxrl_llm.objective.token_weights import token_weights
from jaxrl_llm.types import LENGTH, AnyArray, Batch, Rollouts, Routing, expect


def bucket(n: int, smallest: int = 16) -> int:
    """The least of 16, 24, 32, 48, 64, … that holds n: few shapes, hence few compilations, at most a third wasted."""
    size = smallest
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def make_batch(
    rollouts: Rollouts,
    *,
    shape: tuple[int, int],
    drop_truncated: bool = False,
    kept: Bool[np.ndarray, "P"] | None = None,
    sharding: Sharding | None = None,
) -> Batch:
    """Prompts and responses as the arrays of one update, on the devices that `sharding` names; advantages are 0.

    Here, and nowhere else, targets are shifted against inputs by one token: `inputs` is the prompt's last token and
    then the response without its last, `targets` the response. `mask` comes from the sampler's lengths and finish
    reasons. `shape`: padded prefix and response tokens (S, T); ValueError when they are too small.
    `drop_truncated`: responses that reached the token limit are masked out (DAPO's overlong filtering). `kept`: groups
    that are False are masked out.
    """
    size, length = shape
    need = int(rollouts.prompt_lengths.max()) - 1, int(rollouts.lengths.max())
    fits = need[0] <= size and need[1] <= length
    expect(fits, "shape", shape, f"at least {need} tokens of prefix and response")
    fit = lambda x, n: np.pad(x[:, :n], ((0, 0), (0, max(0, n - x.shape[1])), *((0, 0),) * (x.ndim - 2)))
    before = np.arange(size) < rollouts.prompt_lengths[:, None] - 1
    last = np.take_along_axis(rollouts.prompt_tokens, rollouts.prompt_lengths[:, None] - 1, axis=1)
    targets = fit(rollouts.tokens, length)
    mask = np.arange(length) < rollouts.lengths[:, None]
    routing = None
    if (experts := rollouts.experts) is not None:
        none = np.iinfo(experts.dtype).max
        routing = Routing(sampler=np.where(mask[..., None, None], fit(experts, length), none).astype(experts.dtype))
    if drop_truncated:
        mask &= (rollouts.finish != LENGTH)[:, None]
    if kept is not None:
        mask &= np.repeat(kept, rollouts.group_size)[:, None]
    batch = Batch(
        prefix=np.where(before, fit(rollouts.prompt_tokens, size), 0),
        prefix_lengths=rollouts.prompt_lengths - 1,
        inputs=np.concatenate([np.repeat(last, rollouts.group_size, axis=0), targets[:, :-1]], axis=1),
        targets=targets,
        mask=mask,
        adv=np.zeros(mask.shape, np.float32),
        sampler_logp=np.where(mask, fit(rollouts.sampler_logp, length), 0).astype(np.float32),
        routing=routing,
    )
    return jax.device_put(batch, sharding)


def with_advantages(batch: Batch, adv: Float[AnyArray, "P G"] | Float[AnyArray, "B T"]) -> Batch:
    """The batch with an advantage per response spread over its tokens, or one per token. ValueError on other shapes."""
    adv = jnp.asarray(adv, jnp.float32)
    prompts, rows = batch.prefix.shape[0], batch.mask.shape[0]
    groups, tokens = (prompts, rows // prompts), batch.mask.shape
    expect(adv.shape in (groups, tokens), "adv.shape", adv.shape, f"{groups} or {tokens}")
    return replace(batch, adv=jnp.where(batch.mask, adv if adv.shape == tokens else adv.reshape(-1, 1), 0.0))


def with_weights(
    batch: Batch,
    norm: str,
    max_len: float | None,
    *,
    nll: bool = False,
    phase: Bool[AnyArray, "B T"] | None = None,
    phase_weights: str = "batch",
) -> Batch:
    """The batch with its token weights, computed over all of it before it is split into micro-batches.

    `nll`: adds `nll_weights`, 1/Σ n over correct responses. `phase`: only these tokens have weight; denominators count
    the tokens of the whole batch, or of the phase (`phase_weights`).
    """
    group = batch.inputs.shape[0] // batch.prefix.shape[0]
    counted = batch.mask & phase if phase is not None and phase_weights == "phase" else batch.mask
    in_phase = lambda weights: weights if phase is None else jnp.where(phase, weights, 0.0)
    weights = in_phase(token_weights(counted, norm, group_size=group, max_len=max_len))
    nll_weights = in_phase(token_weights(batch.mask & batch.correct[:, None], "token")) if nll else None
    return replace(batch, weights=weights, nll_weights=nll_weights)


def split_batch(batch: Batch, parts: int) -> Batch:
    """Every array with a new leading axis of `parts`; a prompt and all its responses stay in one part.

    A part takes every parts-th prompt, so that each device of a sharded batch holds its share of every part.
    Raises ValueError when `parts` does not divide the prompts.
    """
    prompts = batch.prefix.shape[0]
    if prompts % parts:
        raise ValueError(f"parts={parts}: does not divide the {prompts} prompts of the batch")

    def one(x: Array) -> Array:
        y = x.reshape(prompts // parts, parts, x.shape[0] // prompts, *x.shape[1:]).swapaxes(0, 1)
        return y.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    return jax.tree.map(one, batch)


def merge_parts(x: Array, prompts: int) -> Array:
    """The inverse of `split_batch` for one array of responses: [parts, B/parts, …] → [B, …]."""
    parts = x.shape[0]
    y = x.reshape(parts, prompts // parts, -1, *x.shape[2:]).swapaxes(0, 1)
    return y.reshape(parts * x.shape[1], *x.shape[2:])
