"""SimpleRL-Zoo: GRPO with right or wrong as its only reward, a little KL and a little entropy.

Paper:   SimpleRL-Zoo, 2503.18892.
Claim:   the paper: in most settings, over ten base models, accuracy and response length rise much; a strict format
         reward hurts weak ones.
Command: jaxrl train experiments/simplerl_zoo.py
"""

from dataclasses import replace

from laptop_dapo import CONFIG as BASE

from jaxrl_llm.objective.algorithms import ALGORITHMS

CONFIG = replace(
    BASE,
    algorithm=ALGORITHMS["simplerl_zoo"],
    optimizer=replace(BASE.optimizer, lr=1e-5),
)
