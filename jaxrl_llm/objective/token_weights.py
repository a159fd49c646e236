"""How much each token counts: the aggregation of a loss, over the whole optimiser batch."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxrl_llm.arrays import AnyArray

NORMS = ("token", "sequence", "prompt", "constant", "otm")


def token_weights(
    mask: Bool[AnyArray, "B T"],
    norm: str,
    *,
    group_size: int | None = None,
    max_len: float | None = None,
    row_valid: Bool[AnyArray, "B"] | None = None,
) -> Float[Array, "B T"]:
    """How much each token counts: the loss is Σ w·x. Compute it once, over the whole optimiser batch.

        token     Σ m·x / Σ m
        sequence  mean over rows of (Σ_t m·x / n_i)                    n_i = Σ_t m[i,t]
        prompt    mean over groups p of (Σ_{i∈p,t} m·x / Σ_{i∈p} n_i)
        constant  Σ m·x / (B·max_len)                                  max_len = 1: mean over rows of the token sum
        otm       Σ_i (Σ_t m·x / n_i) / P                              a sum over the group, not a mean

    Means are over the rows or groups with at least one trained token; only `constant` counts rows without any.
    mask: [B,T], True on the tokens that train;  norm: one of NORMS;  group_size: responses per prompt, consecutive
    rows (prompt, otm);  max_len: tokens (constant);  row_valid: [B], False on rows that only pad the batch and count
    nowhere, None if there are none.
    Returns w, float32 [B,T], 0 where mask is False; all 0 if no token is left.
    Raises ValueError on an unknown norm, a missing or non-positive group_size or max_len that the norm needs, or a B
    that group_size does not divide.
    token and prompt: arXiv 2503.14476; sequence: 2402.03300; constant: 2503.20783; otm: 2509.02333.
    """
    if norm not in NORMS:
        raise ValueError(f"norm is {norm!r}; expected one of {', '.join(NORMS)}")
    rows = mask.shape[0]
    if norm in ("prompt", "otm"):
        if group_size is None or group_size <= 0:
            why = f"norm={norm!r} needs a positive number of responses per prompt"
            raise ValueError(f"group_size={group_size!r}: {why}")
        if rows % group_size:
            raise ValueError(f"group_size={group_size}: does not divide the {rows} rows of mask")
    if norm == "constant" and (max_len is None or max_len <= 0):
        raise ValueError(f"max_len={max_len!r}: norm='constant' needs a positive number of tokens")

    valid = jnp.ones(rows, bool) if row_valid is None else jnp.asarray(row_valid)
    m = jnp.asarray(mask) & valid[:, None]
    lengths = m.sum(axis=1, keepdims=True)  # [B,1] tokens; integers, so that any order of summation is exact
    if norm == "token":
        denominator = lengths.sum()
    elif norm == "sequence":
        denominator = _product(lengths, (lengths > 0).sum())
    elif norm == "constant":
        denominator = _product(valid.sum(), max_len)
    else:
        group_tokens = lengths.reshape(-1, group_size).sum(axis=1)  # [P]
        per_row = jnp.repeat(group_tokens, group_size)[:, None] if norm == "prompt" else lengths
        denominator = _product(per_row, (group_tokens > 0).sum())
    # A denominator is 0 where no token trains, and no weight depends on it; 1 in its place avoids 0/0.
    return jnp.where(m, 1.0 / jnp.where(denominator == 0, 1.0, denominator), 0.0).astype(jnp.float32)


def _product(count, other) -> Array:
    """count·other in float32: tokens times rows can pass int32."""
    return jnp.asarray(count, jnp.float32) * other
