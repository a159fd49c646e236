"""The commands that make datasets: data prepare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

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
