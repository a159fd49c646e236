"""Where the project keeps on disk what is costly to find out again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$JAXRL_CACHE, or ~/.cache/jaxrl_llm."""
    return Path(os.environ.get("JAXRL_CACHE") or Path.home() / ".cache" / "jaxrl_llm")
