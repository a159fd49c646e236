"""Named datasets: where they are, under which licence, and how their columns become prompts and answers.

`jaxrl data prepare NAME` downloads one; with --from FILE it reads a file of yours, whose columns may also be called
problem, question or prompt, and answer. The licence is what the source says; read it before you publish.
"""

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_llm.data import datasets
from jaxrl_llm.types import Prompt, expect, nearest

QUESTIONS = ("problem", "question", "prompt")
GOLDS = "jaxrl_llm.rewards.answers:check_gold"


def same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Recipe:
    """How the rows of files become prompts.

    Of a column's names the first that a row has counts; a.b is b inside of a, 0 the first of a list, a+b both texts.
    `text` and `gold` change what stands there, `keep` tells of a row whether it belongs to the dataset.
    """

    hub: str = ""  # OWNER/NAME of the Hugging Face hub
    files: tuple[str, ...] = ()  # patterns of names in it; none: all
    prompt: tuple[str, ...] = QUESTIONS
    answer: tuple[str, ...] = ("answer",)  # none: rows of responses to learn from need no answer
    response: tuple[str, ...] = ("response",)
    id: tuple[str, ...] = ("id", "unique_id")
    split: str = ""  # of all files; empty: as they are named
    licence: str = ""
    source: str = ""  # who made it
    text: Callable[[Any], Any] = same
    gold: Callable[[Any], Any] = same
    keep: Callable[[Mapping[str, Any]], bool] | None = None
    meta: Mapping[str, Callable[[Mapping[str, Any]], Any]] = field(default_factory=dict)
    repeats: bool = False  # rows come again by design: they are left out, and are no fault
    check: str = GOLDS  # module:function that raises ValueError for an answer that cannot be verified; empty: none


def after_hashes(answer: Any) -> Any:
    """The final answer of a GSM8K solution, which follows '####', without commas inside of its number."""
    return answer.rpartition("####")[2].strip().replace(",", "") if isinstance(answer, str) else answer


def last_boxed(solution: Any) -> Any:
    r"""What stands in a solution's last \boxed{…} or \boxed x, braces matched; a text without one as it is."""
    if not isinstance(solution, str) or not (marks := list(re.finditer(r"\\f?boxed\s*", solution))):
        return solution
    text, depth = solution[marks[-1].end() :], 0
    for end, character in enumerate(text if text.startswith("{") else ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[1:end].strip()
    return None if text.startswith("{") else text.partition("$")[0].strip()  # None: a brace that nothing closes


def alternatives(answer: Any) -> Any:
    """A list of texts, also one written as text; of a single one, that one. Each counts as right."""
    try:
        listed = ast.literal_eval(answer) if isinstance(answer, str) and answer.startswith("[") else answer
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return answer
    if not isinstance(listed, list) or not all(isinstance(a, str) for a in listed):
        return answer  # of text [1, 2] is an interval
    return listed[0].strip() if len(listed) == 1 else [a.strip() for a in listed]


def whole(answer: Any) -> Any:
    """142.0 as the text 142."""
    return str(int(answer)) if isinstance(answer, float | int) and float(answer).is_integer() else answer


def without_unit(answer: Any) -> Any:
    """ASDiv's '9 (apples)' as 9."""
    return re.sub(r"\s*\([^()]*\)\s*$", "", answer) if isinstance(answer, str) else answer


def without_request(text: Any) -> Any:
    """A problem of DAPO-Math-17k without the request for an answer line that stands around each."""
    if not isinstance(text, str):
        return text
    text = re.sub(
        r"\ASolve the following math problem step by step\..*?answer to the problem\.\s*", "", text, flags=re.S
    )
    return re.sub(r"\s*Remember to put your answer on its own line after \"Answer:\"\.?\s*\Z", "", text)


def level(row: Mapping[str, Any]) -> int | None:
    """5 of 5, '5' and 'Level 5'."""
    found = re.search(r"\d+", str(row.get("level")))
    return int(found[0]) if found else None


LEVELS = {"level": level, "subject": lambda row: row.get("subject", row.get("type"))}

RECIPES: dict[str, Recipe] = {
    "gsm8k": Recipe(
        "openai/gsm8k", ("main/*.parquet",), gold=after_hashes, licence="MIT", source="Cobbe et al., 2110.14168"
    ),
    "math": Recipe(
        "EleutherAI/hendrycks_math", answer=("answer", "solution"), gold=last_boxed, licence="MIT", meta=LEVELS,
        keep=lambda row: level(row) in (3, 4, 5), source="Hendrycks et al., 2103.03874; levels 3 to 5",
    ),
    "orz57k": Recipe(
        "Open-Reasoner-Zero/orz_math_57k_collection", ("*.json",), prompt=("0.value", *QUESTIONS), split="train",
        answer=("1.ground_truth.value", "answer"), licence="MIT", source="Open-Reasoner-Zero, 2503.24290",
    ),
    "dapo17k": Recipe(
        "BytedTsinghua-SIA/DAPO-Math-17k", ("data/*.parquet",), prompt=("prompt.0.content", *QUESTIONS), split="train",
        answer=("reward_model.ground_truth", "answer"), text=without_request, repeats=True, licence="Apache-2.0",
        source="DAPO, 2503.14476; each problem once, of about 100 times",
    ),
    "deepscaler": Recipe(
        "agentica-org/DeepScaleR-Preview-Dataset", ("*.json",), split="train", licence="MIT", repeats=True,
        source="DeepScaleR, Agentica 2025",
    ),
    "asdiv": Recipe(
        "EleutherAI/asdiv", ("*.parquet",), split="train", gold=without_unit, licence="CC-BY-NC-4.0",
        prompt=("body+question", *QUESTIONS), source="Miao et al., 2106.15772",
        keep=lambda row: ";" not in str(row.get("answer")),  # several answers at once
    ),
    "aime24": Recipe("HuggingFaceH4/aime_2024", split="test", gold=whole, source="MAA, AIME 2024"),
    "aime25": Recipe("math-ai/aime25", split="test", gold=whole, licence="Apache-2.0", source="MAA, AIME 2025"),
    "amc": Recipe(
        "AI-MO/aimo-validation-amc", split="test", gold=whole, licence="Apache-2.0", source="MAA, AMC 12 of 2022, 2023"
    ),
    "math500": Recipe(
        "HuggingFaceH4/MATH-500", ("test.jsonl",), split="test", licence="MIT", meta=LEVELS,
        source="MATH (2103.03874), the 500 of Lightman et al., 2305.20050",
    ),
    "minerva": Recipe(
        "math-ai/minervamath", split="test", gold=alternatives,
        source="Lewkowycz et al., 2206.14858, from MIT OpenCourseWare (CC-BY-NC-SA-4.0)",
    ),
    "olympiadbench": Recipe(
        "Hothan/OlympiadBench", ("OE_TO_maths_en_COMP/*.parquet",), answer=("final_answer", "answer"), split="test",
        gold=alternatives, licence="Apache-2.0", source="He et al., 2402.14008; open-ended, text only, English",
    ),
}  # fmt: skip


def load(name: str, split: str | None = None, root: Path | str | None = None) -> tuple[Prompt, ...]:
    """Prompts of a recipe that has been prepared, `split` or else its test side if it has one.

    root: the folder of prepared datasets, the project's own if None. Raises ValueError, with the command that prepares
    it, when it is not there.
    """
    expect(name in RECIPES, "recipe", name, f"one of {', '.join(RECIPES)}; {nearest(name, list(RECIPES))}")
    folder = datasets.prepared(name, root=root)
    known = datasets.Rows(str(folder)).splits
    return tuple(datasets.Rows(str(folder), split or ("test" if "test" in known else known[0])))
