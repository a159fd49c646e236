"""Python as a tool: programs in <python>…</python>, what they print in <output>…</output>."""

from jaxrl_llm.environments.protocol import request
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.sandbox import LIMITS, Limits
from jaxrl_llm.types import Prompt

STOPS = ("</python>",)  # the stop string of its rollouts


def step(
    prompt: Prompt, text: str, finish: str, *,
    turns: int = 4, max_chars: int = 2000, limits: Limits = LIMITS, unsafe: bool = False,
) -> str | None:  # fmt: skip
    """What the program at the end of `text` prints, and the last line of its error; None: no program, or turns spent.

    Each program starts anew, in the sandbox: it knows nothing of those before it. Of a longer output `max_chars`
    characters are kept, half of them its end.
    """
    program = request(text, finish, "python", "output", turns)
    if program is None:
        return None
    done = sandbox.run(program, limits=limits, unsafe=unsafe)
    error = done.stderr.strip().rpartition("\n")[2] if done.ended == "exited" else done.ended.replace("_", " ")
    said = "\n".join(part for part in (done.stdout.strip(), error) if part).replace("</output>", " ").strip()
    if len(said) > max_chars:
        said = f"{said[: max_chars // 2]}\n…\n{said[-max_chars // 2 :]}"
    return f"\n<output>\n{said}\n</output>\n"
