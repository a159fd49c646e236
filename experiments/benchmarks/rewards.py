r"""Verdicts of rewards.answers: false ones, and what hostile answers cost when workers hold them.

Without --data: answers of known verdict, of which a share is hostile (they would take for ever, all memory, or the
process; half of them have a gold of their own kind, so that the guards let them through to math-verify), are scored in
workers; the same is done without the hostile ones. Printed are both times, their bound, which
is the time without + hostile × cpu_s / workers + 1 s, both also as CPU time, the outcomes, the verdicts that changed
(none should), and the memory of the workers' zygote and of this process before and after.

With --data, a folder of *.jsonl with "answer": each file's golds against themselves, against rewritings of themselves
(false rejects) and against golds of other problems that are not equal to them as text (accepted).

Command: python experiments/benchmarks/rewards.py [--answers 10000] [--hostile 0.02] [--workers 2] [--burners 2]
     or: python experiments/benchmarks/rewards.py --data FOLDER [--others 10] [--most 1500]
"""

import json
import multiprocessing
import os
import random
import re
import resource
import time
from collections import Counter
from pathlib import Path

import tyro

from jaxrl_llm.rewards import answers, workers
from jaxrl_llm.types import EOS, Prompt

HOSTILE = [  # what stands in the box
    *("9^{9^{9^9}}", "9^9^9^9", "(10^8)!", "10^8!",),
    *("9^{9^{9^{9^9}}}+x", "5^{(5^{(5^{(5^5)})}-4)}", "((9!)!)!", "(3!)!!!!!!",),
    *("{" * 10_000, "{" * 10_000 + "x" + "}" * 10_000, "(" * 1000 + "x" + ")" * 1000,),
    *(r"\(" * 500_000, "-" * 5000 + "1",),
    *(r"\sqrt{" * 300 + "x" + "}" * 300, r"\frac{1}{" * 300 + "x" + "}" * 300, "x^{" * 300 + "2" + "}" * 300),
    *(r"\{" + ",".join(map(str, range(3000))) + r"\}", "+".join(f"x^{{{i}}}" for i in range(400)), "x!" * 300),
    *(r"(x+y+z+1)^{10000}", r"(x+1)^{10^6}(x-1)^{10^6}",),
    *(r"\sum_{k=1}^{10^{12}} \frac{1}{k^k}", r"\prod_{k=1}^{10^9} (x+k)",),
    *(r"\int_0^{10} e^{x^{x^x}} \sin(x^{x}) dx", r"\binom{10^9}{5\cdot 10^8}",),
    *(r"\int \frac{1}{x^{17}+x+1} dx", "1e999999999",),
    r"\begin{vmatrix}" + r"\\".join("&".join(f"x_{{{i}{j}}}" for j in range(8)) for i in range(8)) + r"\end{vmatrix}",
    *(r"\sqrt[3]{2+\sqrt[5]{3+\sqrt[7]{x+\sqrt[11]{13+x}}}}" * 12, r"\sin(" * 200 + "x" + ")" * 200,),
    *("9" * 1500 + "^{" + "9" * 400 + "}",),
    *(r"\lim_{x\to\infty} x^{x^{x}}/(x!)!", "x=" * 700 + "1", "|" * 501 + "x",),
    *(r"\log_{2}" * 200 + "x", "10^{-10^{10^{10}}}",),
    *(r"\left(" * 400 + "x", "∑" * 1000, r"\text{" * 400, "x_{" * 500,),
    *("1/" * 900 + "x", "\\" * 1999, r"e^{\pi^{e^{\pi^{e^\pi}}}}!",),
    *(r"\cos(9^{9^{9}})+x", r"\lfloor 9^{9^{9^{9}}}/7 \rfloor",),
    *(r"\gcd(9^{9^{9}},6^{6^{6^6}})", r"\zeta(9^{9^9})+\Gamma(9^{9^9})",),
]  # fmt: skip
GROUP = 8  # answers to a prompt, one after the other
GOLD = r"x^2+\sqrt{2}"
FORMS = [  # gold, a right answer and a wrong one, of two whole numbers
    ("{a}", "{a}", "{b}"),
    (r"\frac{{{a}}}{{{b}}}", "{a}/{b}", "{b}/{a}1"),
    (r"{a}\sqrt{{2}}", r"\sqrt{{2}} \cdot {a}", r"{b}\sqrt{{3}}"),
    ("x^2+{a}x+{b}", "{b}+x^2+x{a}", "x^2+{b}1x+{a}"),
    (r"[{a}, {a}{b})", r"\left[{a},{a}{b}\right)", "({a}, {a}{b})"),
    (r"\{{{a}, {b}\}}", "{b}, {a}", "{a}, {b}, 1{b}"),
    (r"({a}, {b})", r"\left({a},\,{b}\right)", "({b}, {a}1)"),
    (r"{a}\pi", r"\pi {a}", r"{b}\pi^2"),
]


def _spaced(gold: str) -> str | None:
    sound = re.search("[+,=]", gold) and not re.search(r"\d,\d{3}|text", gold)
    return re.sub(r"([+,=])", r" \1 ", gold) if sound else None


def _sized(gold: str) -> str | None:
    sound = "(" in gold and r"\left" not in gold
    return gold.replace("(", r"\left(").replace(")", r"\right)") if sound else None


RESTYLED = {
    "$gold$": lambda g: f"${g}$",
    r"\(gold\).": lambda g: rf"\({g}\).",
    "x = gold": lambda g: f"x = {g}" if re.fullmatch(r"[^=<>,]*\d[^=<>,]*", g) and "in" not in g else None,
    r"\dfrac": lambda g: g.replace(r"\frac", r"\dfrac") if r"\frac" in g else None,
    r"\left( \right)": _sized,
    "spaces": _spaced,
    "gold dollars": lambda g: f"{g} dollars" if g.isdecimal() else None,
    r"gold\text{ cm}": lambda g: rf"{g}\text{{ cm}}" if g.isdecimal() else None,
    "gold.0": lambda g: f"{g}.0" if g.isdecimal() else None,
    "thousands": lambda g: f"{int(g):,}" if g.isdecimal() and len(g) > 3 else None,
    "fraction of twice": lambda g: f"{2 * int(g)}/2" if g.isdecimal() else None,
}
WRONG = {
    "gold + 1": lambda g: f"{g}+1",
    "-gold": lambda g: f"-({g})" if re.fullmatch(r"[\d.]*[1-9][\d.]*", g) else None,
    "gold, 7": lambda g: f"{g}, 7",
    "0.9 gold": lambda g: str(0.9 * float(g)) if re.fullmatch(r"[\d.]*[1-9][\d.]*", g) else None,
    "1 + (gold - 1)": lambda g: f"1 + {int(g) - 1}" if g.isdecimal() else None,
}


def problems(n: int, hostile: float, seed: int = 0) -> list[tuple[Prompt, str, bool | None]]:
    """Prompts with groups of answers: right, wrong or (None) hostile."""
    rng, out = random.Random(seed), []
    for i in range(n):
        if i % GROUP == 0:
            a, b = rng.randint(3, 9), rng.randint(11, 999)
            gold, right, wrong = (form.format(a=a, b=b) for form in FORMS[i // GROUP % len(FORMS)])
        good = rng.random() < 0.5
        out.append((Prompt(i, "", gold), rf"So it is \boxed{{{right if good else wrong}}}.", good))
    for k, i in enumerate(rng.sample(range(n), round(n * hostile))):
        text = HOSTILE[5 * k % len(HOSTILE)]
        out[i] = Prompt(i, "", f"{text}{text}+x" if k % 2 else GOLD), rf"\boxed{{{text}}}", None
    return out


def score(asked: list[tuple[Prompt, str, bool | None]], reward: workers.Isolated) -> tuple[list, float]:
    start = time.monotonic()
    futures = [reward.submit(prompt, text, EOS) for prompt, text, _ in asked]
    return [f.result() for f in futures], time.monotonic() - start


def resident(pid: int | str = "self") -> float:
    """MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 1e6


def cpu_seconds(zygote: int) -> float:
    """Of it, its workers and those that have ended."""
    children = Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split()
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in (zygote, *children)]
    return sum(int(t) for stat in stats for t in stat[11:15]) / os.sysconf("SC_CLK_TCK")


def burn() -> None:
    while True:
        pass


def hostile_table(n: int, share: float, burners: int, cpu_s: float, size: int) -> None:
    """What the first half of the module's docstring says."""
    size = size or workers.cores()
    reward = workers.isolated(answers.reward, cpu_s=cpu_s, workers=size)
    reward(Prompt(0, "", "1"), r"\boxed{1}", EOS)  # the zygote starts
    mixed = problems(n, share)
    plain = [p for p in mixed if p[2] is not None]
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=burn, daemon=True) for _ in range(burners)]
    for process in others:
        process.start()
    zygote = workers._pool(size, os.getpid())._zygote.pid
    try:
        begun = cpu_seconds(zygote)
        without, free_s = score(plain, reward)
        before, middle = (resident(), resident(zygote)), cpu_seconds(zygote)
        out, taken = score(mixed, reward)
        cpu_free, cpu = middle - begun, cpu_seconds(zygote) - middle
    finally:
        for process in others:
            process.terminate()
    of_plain = [r for r, p in zip(out, mixed, strict=True) if p[2] is not None]
    wrong = sum(r.correct != p[2] for r, p in zip(without, plain, strict=True))
    changed = sum(a != b for a, b in zip(without, of_plain, strict=True))
    hostile = [r for r, p in zip(out, mixed, strict=True) if p[2] is None]
    bound = free_s + len(hostile) * cpu_s / size + 1.0
    print(f"{n} answers, {len(hostile)} hostile, {size} workers, {cpu_s} s of CPU an answer, {burners} burners")
    each = 1e3 * cpu_free / len(plain)
    print(f"without the hostile ones {free_s:8.2f} s   {cpu_free:8.2f} s of CPU, {each:.2f} ms an answer")
    print(f"with them                {taken:8.2f} s   {cpu:8.2f} s of CPU")
    print(f"bound                    {bound:8.2f} s   {cpu_free + len(hostile) * cpu_s + size:8.2f} s of CPU")
    print(f"verdicts: {wrong} false, {changed} changed, {sum(r.value != 0 for r in hostile)} hostile ones rewarded")
    print("hostile outcomes:", dict(Counter(r.outcome for r in hostile)))
    after = resident(), resident(zygote)
    print(f"resident MB: this process {before[0]:.1f} → {after[0]:.1f}, zygote {before[1]:.1f} → {after[1]:.1f}")


def rates(folder: Path, others: int, most: int, show: int, seed: int = 0) -> None:
    """What the second half of the module's docstring says; prints every verdict that differs from what is expected."""
    equal, rng = workers.isolated(answers.equal, cpu_s=1.0), random.Random(seed)
    columns = ("golds", "bad", "not self", "rewritten", "rejected", "wrong", "accepted", "pairs", "accepted", "ended")
    print(f"{'file':16}", *(f"{c:>9}" for c in columns))
    for file in sorted(folder.glob("*.jsonl")):
        rows = [answers.alternatives(json.loads(line)["answer"]) for line in file.read_bytes().splitlines()]
        rows = rng.sample(rows, min(len(rows), most))
        golds = [g for r in rows for g in r]
        bad = sum(bool(workers.isolated(answers.check_gold).submit(r).exception()) for r in rows)
        styled = {(g, f(answers.plain(g))) for g in golds for f in RESTYLED.values()}
        wrong = {(g, f(answers.plain(g))) for g in golds for f in WRONG.values()}
        mixed = ((r, o) for r in rows for o in rng.sample(rows, min(others, len(rows))) if not set(r) & set(o))
        pairs = {(g, h) for r, o in mixed for g in r for h in o}
        kinds = {(g, g) for g in golds}, styled, wrong, pairs
        asked = [{(g, a): equal.submit(g, a) for g, a in kind if a is not None} for kind in kinds]
        said = [{k: future.result() for k, future in kind.items()} for kind in asked]
        ended = sum(not isinstance(v, bool) for kind in said for v in kind.values())
        right = (True, True, False, False)
        differ = [[k for k, v in s.items() if (v is True) != r] for s, r in zip(said, right, strict=True)]
        counts = [len(rows), bad, len(differ[0])]
        counts += [n for i in (1, 2, 3) for n in (len(said[i]), len(differ[i]))] + [ended]
        print(f"{file.stem:16}", *(f"{n:9}" for n in counts), flush=True)
        for name, found in zip(("not itself", "rejected", "wrong, accepted", "other's, accepted"), differ, strict=True):
            for gold, answer in found[:show]:
                print(f"    {name}: {gold!r} {answer!r}")


def main(
    answers: int = 10_000,
    hostile: float = 0.02,
    burners: int = 0,
    cpu_s: float = 0.5,
    workers: int = 0,
    data: Path | None = None,
    others: int = 10,
    most: int = 1500,
    show: int = 8,
) -> None:
    """Print the table.

    Args:
        answers: how many are scored.
        hostile: the share of them that is hostile.
        burners: processes that compete for the cores.
        cpu_s: seconds of CPU an answer may take.
        workers: processes; 0 is one a core.
        data: a folder of problems; error rates on its golds are printed instead.
        others: golds of other problems that each gold is compared with.
        most: golds of a file, drawn from it.
        show: verdicts printed of each kind that is not as it should be.
    """
    if data:
        rates(data, others, most, show)
    else:
        hostile_table(answers, hostile, burners, cpu_s, workers)


if __name__ == "__main__":
    tyro.cli(main)
