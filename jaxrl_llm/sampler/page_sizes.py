"""How large things are: without jax, for whoever only checks a config."""


def power_of_two(n: int, least: int = 1) -> int:
    """The least power of two that is neither below n nor below `least`."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def page_size(prompt: int, answer: int, given: int = 0) -> int:
    """Tokens of a page: a 64th of the longest prompt and answer, between 16 and 128, unless it is given."""
    return given or min(max(power_of_two(-(-(prompt + answer) // 64)), 16), 128)


def least_tokens(prompt: int, answer: int, answers: int, shards: int, page_tokens: int = 0) -> int:
    """That pages have to hold for so many answers of the longest kind, over all shards."""
    size = page_size(prompt, answer, page_tokens)
    return shards * -(-answers // shards) * -(-(prompt + answer) // size) * size
