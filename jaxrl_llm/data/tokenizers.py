"""Tokenizers in Hugging Face format: any `transformers` one, and a character-level one of the project's own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that PyTorch is absent

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Tokenizer:
    """What the project asks of a tokenizer. `eos_ids` end an answer; decoding leaves special tokens in."""

    hf: Any  # transformers.PreTrainedTokenizerFast
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def size(self) -> int:
        return len(self.hf)

    def encode(self, text: str) -> list[int]:
        """Token ids, no special tokens added. Raises ValueError for a character that no token stands for."""
        try:
            return self.hf.encode(text, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            missing = sorted(set(text) - set(self.hf.get_vocab()))
            raise ValueError(f"text: the tokenizer has no token for {missing[:1]} of {text!r}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self.hf.decode(ids, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)


def characters(alphabet: str = ALPHABET) -> Tokenizer:
    """A token per character, after <pad> = 0 and <eos> = 1."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    vocab = {c: i for i, c in enumerate((PAD, EOS, *dict.fromkeys(alphabet)))}
    backend = Backend(models.WordLevel(vocab))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    return from_hf(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS))


def load(folder: Path | str) -> Tokenizer:
    """A tokenizer saved in Hugging Face format."""
    from transformers import AutoTokenizer

    return from_hf(AutoTokenizer.from_pretrained(folder))


def from_hf(hf: Any) -> Tokenizer:
    """Raises ValueError for a tokenizer without an end-of-sequence token."""
    if hf.eos_token_id is None:
        raise ValueError("tokenizer: eos_token is not set; expected one, or answers could not end")
    return Tokenizer(hf, (hf.eos_token_id,), hf.pad_token_id if hf.pad_token_id is not None else hf.eos_token_id)
