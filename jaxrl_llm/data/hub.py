"""Folders of Hugging Face files: one on this disk, or a repository of the hub, downloaded."""

import re
from collections.abc import Sequence
from pathlib import Path


def local(source: Path | str, patterns: Sequence[str], kind: str = "model") -> Path:
    """The folder `source`; if there is none, a download of the hub's repository of that name.

    source: a folder, or OWNER/NAME of a repository, with @REVISION for another than the newest. patterns: the files
    that are needed; no others are downloaded. kind: of the repository, model or dataset. Raises ValueError for what is
    neither, OSError for what cannot be downloaded: no network, no such repository, no access to it.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", str(source))
    if found is None or str(source).startswith("."):
        raise ValueError(f"{source}: no such folder; expected a folder, or OWNER/NAME of the Hugging Face hub")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(found[1], revision=found[2], allow_patterns=list(patterns), repo_type=kind))
    except Exception as error:  # of the hub's client, of HTTP, of the network
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        expected = "a folder of this disk, or a repository that the Hugging Face hub gives to this machine"
        raise OSError(f"{source}: no such folder, and not downloaded ({why}); expected {expected}") from error
