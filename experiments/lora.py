"""DAPO on a laptop with LoRA: only thin matrices beside the frozen base policy's are trained.

Paper:   LoRA, 2106.09685; the method's is DAPO, 2503.14476.
Claim:   held-out accuracy rises as it does when all parameters are trained, with 9 % of them in the optimiser.
Command: jaxrl train experiments/lora.py     (about three minutes on two cores)
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.models.shape import LoRA

CONFIG = replace(
    BASE,
    model=replace(BASE.model, lora=LoRA(rank=8, alpha=16.0)),
    optimizer=replace(BASE.optimizer, lr=2e-4),  # ten times that of all parameters
)
