"""Curation of 100,000 made problems with planted duplicates and leaks: what is found, what is dropped by mistake.

Command: python experiments/benchmarks/curation.py [problems]
"""

import json
import resource
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np

from jaxrl_llm.data.curate import Rules, curate

NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo", "Ida", "Jon", "Kim", "Leo", "Mia", "Ned", "Ola"]
THINGS = ["apples", "books", "coins", "stamps", "marbles", "pens", "cards", "shells", "stones", "tickets", "cakes"]
PLACES = ["at the market", "in a shop", "on the beach", "at school", "in the park", "from a friend", "on a farm"]
ASKED = ["How many are left?", "How many does each get?", "What is the total?", "What do they cost?"]
ACTS = ["buys", "finds", "loses", "sells", "counts", "gives away", "collects", "carries", "paints", "packs", "hides"]
WORDS = ["".join(w) for w in product(("ba", "ko", "li", "mu", "so"), ("ran", "tel", "mis", "dor"), ("", "o", "ik"))]


def problem(rng: np.random.Generator) -> str:
    """A story of two to four sentences and a question; stories share their words, and some their numbers."""
    pick = lambda of: str(of[rng.integers(len(of))])
    tell = lambda: f"{pick(NAMES)} {pick(ACTS)} {rng.integers(2, 100)} {pick(THINGS)} {pick(PLACES)}"
    extra = " ".join(pick(WORDS) for _ in range(rng.integers(3, 12)))
    return ". ".join(tell() for _ in range(rng.integers(2, 5))) + f". They call it {extra}. {pick(ASKED)}"


def changed(text: str, rng: np.random.Generator) -> str:
    """The same problem as another hand might copy it: case, marks, spaces, and up to two words of it."""
    words = text.split()
    for _ in range(rng.integers(0, 3)):
        places = [i for i, w in enumerate(words) if w.isalpha()]
        words[places[rng.integers(len(places))]] = "now"
    text = " ".join(words)
    text = text.upper() if rng.random() < 0.3 else text
    return text.replace(".", " . ").replace("?", "") if rng.random() < 0.5 else text


def run(folder: Path, n: int = 100_000) -> dict[str, float]:
    """Shares of planted rows found and of others dropped, seconds, and the process's largest memory in GB."""
    rng = np.random.default_rng(0)
    leaked, copied = n // 100, n // 50
    evaluations = [(f"exam:{i}", problem(rng)) for i in range(leaked)]
    rows = [(problem(rng), "") for _ in range(n - leaked - copied)]
    rows += [
        (changed(rows[i][0], rng), "near-duplicate") for i in rng.choice(len(rows), copied, replace=False).tolist()
    ]
    around = lambda t: f"Here is a task for you to think about. {t} Explain each step." if rng.random() < 0.3 else t
    rows += [(around(changed(t, rng)), "evaluation problem") for _, t in evaluations]
    order = [*range(n - leaked - copied), *(n - leaked - copied + rng.permutation(leaked + copied)).tolist()]
    file = folder / "raw.jsonl"
    file.write_text("".join(json.dumps({"prompt": rows[i][0], "answer": "1"}) + "\n" for i in order))
    planted = {str(line): rows[i][1] for line, i in enumerate(order, 1) if rows[i][1]}
    start = time.perf_counter()
    counts = curate([file], folder / "good.jsonl", Rules(), evaluations)
    seconds = time.perf_counter() - start
    dropped = [json.loads(line) for line in (folder / "good.dropped.jsonl").open()]
    found = {d["row"].rpartition(":")[2]: d["reason"] for d in dropped}
    shares = {
        f"found of {kind}": [line in found for line, k in planted.items() if k == kind]
        for kind in set(planted.values())
    }
    shares = {name: float(np.mean(of)) for name, of in shares.items()}
    wrong = sum(line not in planted for line in found) / (n - len(planted))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return shares | {"dropped by mistake": wrong, "kept": counts["kept"], "seconds": seconds, "GB": memory}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for name, value in run(Path(folder), int(sys.argv[1]) if sys.argv[1:] else 100_000).items():
            print(f"{name:<28} {value:.5g}")
