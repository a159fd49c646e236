"""The commands that make datasets: data prepare, curate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxrl_llm.cli.shared import load, use_devices
from jaxrl_llm.data.curate import Rules

_against = tyro.conf.arg(help="evaluation problems that may not be among them: files, folders, or prepared recipes.")
RULES, Chosen = Rules(), tyro.conf.OmitArgPrefixes[Rules]
Against = Annotated[tuple[str, ...], _against]
From = Annotated[tuple[Path, ...], tyro.conf.arg(name="from", help="a recipe's rows from files or folders of yours.")]


def prepare(
    source: tyro.conf.Positional[str], from_: From = (), name: str = "", root: Path | None = None, prompt: str = "",
    answer: str | None = None, response: str = "", split: str = "", bad: Literal["error", "skip"] | None = None,
    check: str | None = None, licence: str = "",
) -> None:  # fmt: skip
    """Examine a dataset's rows and write it as ArrayRecord.

    Experiments read it with datasets.tfds_data(NAME, …).

    Args:
        source: a JSONL, Parquet or Arrow file, a folder of such, OWNER/NAME of the Hugging Face hub, or a recipe:
            aime24, aime25, amc, asdiv, dapo17k, deepscaler, gsm8k, math, math500, minerva, olympiadbench, orz57k.
        name: of the dataset; the source's own if left out.
        root: the folder that it goes into; data in the project's cache if left out.
        prompt: column of the prompts; problem, question or prompt if left out.
        answer: column of the answers; '' where there are none, only responses to learn from.
        response: column of responses to learn from; response if left out.
        split: of all files; if left out, train, test or validation as they are named.
        bad: what to do about rows at fault; if left out skip for a recipe, else error.
        check: module:function that raises ValueError for an answer that cannot be verified; '' for none.
        licence: of the data, kept beside them.
    """
    from jaxrl_llm.config import values
    from jaxrl_llm.data import datasets, prepare, recipes, rows

    known = recipes.RECIPES.get(source) if not Path(source).exists() else None
    recipe = known or recipes.Recipe(source=source, check="")
    if from_ and known is None:
        raise ValueError(f"--from with {source}: no recipe; expected one of {', '.join(recipes.RECIPES)}")
    named = {"prompt": (prompt,) if prompt else recipe.prompt, "response": (response,) if response else recipe.response}
    named |= {} if answer is None else {"answer": (answer,) if answer else ()}
    recipe = replace(recipe, **named, check=recipe.check if check is None else check)
    recipe = replace(recipe, split=split or recipe.split, licence=licence or recipe.licence)
    files: dict[str, list[Path]] = {}
    for place in from_ or (recipe.hub or source,):
        for side, paths in rows.files(place, () if from_ else recipe.files, recipe.split).items():
            files.setdefault(side, []).extend(paths)
    files = dict(sorted(files.items(), key=lambda side: side[0] == "train"))
    where = root or datasets.cache_folder() / "data"
    name = name or Path(source.partition("@")[0]).stem
    verify = values.function(recipe.check, None) if recipe.check else None
    bad = bad or ("error" if known is None else "skip")
    report = prepare.prepare(name, files, recipe, where, bad=bad, check=verify)
    for side, counts in report["rows"].items():
        print(f"{side}: " + ", ".join(f"{n} {reason}" for reason, n in counts.items()))
    print(f"{report['folder']}   licence: {recipe.licence or 'unknown'}   findings: findings.jsonl")


def curate(
    sources: tyro.conf.Positional[tuple[str, ...]], out: Path, rules: Chosen = RULES, against: Against = (),
    prompt: str = "", answer: str = "", embed: str = "", score: str = "pass_rate", policy: Path | None = None,
    samples: int = 8, direct: str = "", direct_tokens: int = 16,
) -> None:  # fmt: skip
    """Choose problems: no duplicates, leaks or guesses, in a band.

    The rows that are dropped are in OUT.dropped.jsonl, each with its reason.

    Args:
        sources: JSONL, Parquet or Arrow files, folders of such, or OWNER/NAME of the Hugging Face hub.
        out: the JSONL file of the rows that are kept.
        prompt: column of the prompts; problem, question or prompt if left out.
        answer: column of the answers; answer if left out.
        embed: module:function from texts to their vectors, by which similar ones are dropped.
        score: column of a number by which the hardest are chosen, lowest first.
        policy: a run, whose newest checkpoint answers each problem that is left.
        samples: its answers to each.
        direct: text after the prompt that asks for the final answer at once; measures answers without reasoning.
        direct_tokens: room for such an answer.
    """
    from jaxrl_llm.config import values
    from jaxrl_llm.data import curate as curation
    from jaxrl_llm.data import prepare, recipes, rows

    if not sources:
        raise ValueError("sources is (); expected at least one file, folder or OWNER/NAME")
    recipe, asked = recipes.Recipe(), recipes.Recipe(answer=())
    recipe = replace(recipe, prompt=(prompt,) if prompt else recipe.prompt, answer=(answer or "answer",))
    paths = [p for source in sources for part in rows.files(source).values() for p in part]
    problems = []
    for name in against:
        if name in recipes.RECIPES and not Path(name).exists():
            problems += [(f"{name}: {p.meta['row']}", p.text) for p in recipes.load(name)]
            continue
        for path in (p for part in rows.files(name).values() for p in part):
            found = ((rows.place(path, n), prepare.examine(row, asked, {})) for n, row in rows.read(path))
            problems += [(place, row["prompt"]) for place, row in found if not isinstance(row, rows.Bad)]
    rates = None
    if policy is not None:
        use_devices(load(policy))
        from jaxrl_llm.run import passrate

        rates = passrate.measure(policy, samples, direct, direct_tokens)
    vectors = values.function(embed, None) if embed else None
    more = {"recipe": recipe, "embed": vectors, "rates": rates, "score": score}
    counts = curation.curate(paths, out, rules, problems, **more)
    for reason, n in counts.most_common():
        print(f"{n:>9} {reason}")
    print(f"{out}   dropped: {out.with_name(f'{out.stem}.dropped.jsonl')}")
