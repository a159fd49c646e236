"""A toy knowledge base: what its words are worth can only be found by searching for them.

kado is worth? <think></think><search>kado</search>
<result>
kado is worth 47
</result>
<answer>47</answer>
"""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np

from jaxrl_llm.data.datasets import cache_folder
from jaxrl_llm.data.tasks import held_out
from jaxrl_llm.environments import research, search
from jaxrl_llm.types import STOP, Prompt, Task, expect

BEHAVIOURS = ("clean", "misspell", "no_reasoning")


def task(words: int = 600, turns: int = 2, seed: int = 0, tool: bool = True) -> Task:
    """Questions for the worth of `words` made-up words, two digits each; an eighth of them is never asked in training.

    tool: without it nothing answers a search, and only guessing is left. Rewards are those of ReSearch. Traces search
    for the word (clean), misspell it and guess, or guess at once (no_reasoning). The index lies in the project's cache.
    """
    expect(16 <= words <= 2000, "words", words, "a whole number from 16 to 2000")
    expect(turns >= 1, "turns", turns, "at least 1")
    rng = np.random.default_rng(seed)
    letters = lambda of: of[rng.integers(len(of))]
    known = {}
    while len(known) < words:
        known["".join(letters("bdfgklmnprstvz") + letters("aeiou") for _ in range(2))] = int(rng.integers(10, 100))
    prompts = [Prompt(i, f"{w} is worth?", str(n), {"word": w}) for i, (w, n) in enumerate(known.items())]
    sides = [tuple(p for p in prompts if held_out(p.meta["word"]) == test) for test in (False, True)]
    step = partial(research.step, index=str(_index(known)), turns=turns, passages=1)
    score = partial(research.score, boxed=False)
    return Task(*sides, score, partial(_trace, step), BEHAVIOURS, step if tool else None)


def _index(known: dict[str, int]) -> Path:
    rows = "".join(json.dumps({"text": f"{word} is worth {n}"}) + "\n" for word, n in known.items())
    folder = cache_folder() / "lookup" / hashlib.blake2b(rows.encode(), digest_size=8).hexdigest()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = folder.with_name(f"{folder.name}.{np.random.default_rng().integers(2**32)}")
        passages = made.with_name(f"{made.name}.jsonl")
        passages.write_text(rows)
        search.build(passages, made)
        passages.unlink()
        try:
            made.rename(folder)
        except OSError:  # another process was quicker
            shutil.rmtree(made)
    return folder


def _trace(step: partial, prompt: Prompt, behaviour: str, seed: int) -> str | tuple[str, ...]:
    expect(behaviour in BEHAVIOURS, "behaviour", behaviour, f"one of {BEHAVIOURS}")
    rng, word = np.random.default_rng([seed, prompt.id]), prompt.meta["word"]
    guess = f"<answer>{rng.integers(10, 100)}</answer>"
    if behaviour == "no_reasoning":
        return f"<think></think>{guess}"
    if behaviour == "misspell":
        place = int(rng.integers(len(word)))
        others = "aeiou" if word[place] in "aeiou" else "bdfgklmnprstvz"
        word = word[:place] + rng.choice([c for c in others if c != word[place]]) + word[place + 1 :]
    asked = f"<think></think><search>{word}</search>"
    return asked, step(prompt, asked, STOP), f"<answer>{prompt.answer}</answer>" if behaviour == "clean" else guess
