"""GPG: the plain policy gradient on group advantages, rescaled for the groups that say nothing.

Paper:   GPG, 2504.02546.
Claim:   the paper: without critic, reference, clip or KL it consistently beats GRPO, with text and with images.
Command: jaxrl train experiments/gpg.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(BASE, algorithm=ALGORITHMS["gpg"])
