"""Tokenizers in Hugging Face format: any `transformers` one, and two of the project's own: characters, byte pairs."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxrl_llm.data import hub
from jaxrl_llm.types import Prompt, expect

os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it warns that PyTorch is absent

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
PAD, EOS = "<pad>", "<eos>"
GENERATION = "generation_config.json"  # where Hugging Face keeps what ends an answer, one id or several
FILES = ("*token*.json", "tokenizer.model", "vocab.json", "merges.txt", "*.jinja", "config.json", GENERATION)
_one_at_a_time = threading.Lock()  # whether special tokens are recognised is a switch that Hugging Face's calls share


@dataclass(frozen=True)
class Tokenizer:
    """What the project asks of a tokenizer. Each of `eos_ids` ends an answer; decoding leaves special tokens in."""

    hf: Any  # transformers.PreTrainedTokenizerFast
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def size(self) -> int:
        return len(self.hf)

    @cached_property
    def _special(self) -> str:  # a regular expression of the special tokens' names
        return "|".join(re.escape(t.content) for t in self.hf.added_tokens_decoder.values() if t.special) or "(?!)"

    def encode(self, text: str, question: str | Sequence[str] | None = None) -> list[int]:
        """Token ids, none added. Raises ValueError for a character that no token stands for.

        A special token's name in the text stays text: "<eos>" is five characters. With a `question`, or several, that
        holds where one occurs; in the template around it the name is the token.
        """
        questions = [text if question is None else question] if isinstance(question, str | None) else question
        if not any(re.search(self._special, q) for q in questions):
            return self._ids(text, special=True)
        known = "|".join(map(re.escape, sorted(filter(None, questions), key=len, reverse=True)))
        ids, start = [], 0
        for found in re.finditer(f"{known or '(?!)'}|({self._special})", text):
            if found[1]:  # Hugging Face, too, encodes what stands between special tokens piece by piece
                ids += self._ids(text[start : found.start()], special=False) + self._ids(found[1], special=True)
                start = found.end()
        return ids + self._ids(text[start:], special=False)

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """What the policy sees of a prompt: its text, or its messages in the chat template, up to where it answers.

        Raises ValueError, naming the prompt, for messages that the template does not take, or without a template.
        """
        if not prompt.messages:
            return self.encode(prompt.text, prompt.question)
        try:
            expect(self.hf.chat_template, "chat_template", None, "one, for a prompt of messages")
            text = self.hf.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
        except Exception as error:  # of Jinja, and whatever the template itself raises
            why = " ".join(str(error).split())
            raise ValueError(f"prompt {prompt.id}: the tokenizer's chat template: {why}") from error
        return self.encode(text, [m["content"].strip() for m in prompt.messages])  # some templates strip it

    def encode_turn(self, messages: Sequence[Mapping[str, str]], ended: bool) -> list[int]:
        """What follows an answer in the chat template: messages, up to where the policy answers them.

        ended: the answer has its end-of-sequence token. Raises ValueError for a template that words earlier turns anew.
        """
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
        try:
            worded = lambda m, more: self.hf.apply_chat_template(m, add_generation_prompt=more, tokenize=False)
            start, whole = worded(before, False), worded([*before, *messages], True)
        except Exception as error:  # of Jinja, and whatever the template itself raises
            raise ValueError(f"messages of a turn: the chat template: {' '.join(str(error).split())}") from error
        expect(whole.startswith(start), "chat_template", whole, f"one whose dialogue begins with {start!r}")
        rest = start.rpartition("answer")[2]
        eos = next((e for e in map(self.decode, ([i] for i in self.eos_ids)) if rest.startswith(e)), "")
        text = (rest[len(eos) :] if ended else rest) + whole[len(start) :]
        return self.encode(text, [m["content"].strip() for m in messages])

    def _ids(self, text: str, special: bool) -> list[int]:
        try:
            with _one_at_a_time:
                return self.hf.encode(text, add_special_tokens=False, split_special_tokens=not special)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            missing = sorted(set(text) - set(self.hf.get_vocab()))
            raise ValueError(f"text: the tokenizer has no token for {missing[:1]} of {text!r}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self.hf.decode(ids, clean_up_tokenization_spaces=False)

    def save(self, folder: Path) -> None:
        self.hf.save_pretrained(folder)
        (Path(folder) / GENERATION).write_text(json.dumps({"eos_token_id": list(self.eos_ids)}) + "\n")


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


def byte_pairs(texts: Callable[[], Iterable[str]], size: int = 512) -> Tokenizer:
    """At most `size` tokens of byte-level BPE (1508.07909), learnt from texts(), which are cut as Qwen2 cuts them.

    <|endoftext|> ends an answer. Raises ValueError for a size without room for every byte.
    """
    from transformers import Qwen2Tokenizer

    expect(size >= 257, "size", size, "at least 257: the bytes and <|endoftext|>")
    return from_hf(Qwen2Tokenizer().train_new_from_iterator(texts(), size, show_progress=False))


def load(folder: Path | str) -> Tokenizer:
    """A tokenizer in Hugging Face format; its eos_ids are those of generation_config.json, if there is one.

    folder: or OWNER/NAME of the hub. Raises ValueError that names the folder when there is none or it lacks an EOS.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = hub.local(folder, FILES)
    file = folder / GENERATION
    # tokenizer.json says all there is; AutoTokenizer may give its parts to a class that cuts text in another way
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        eos_ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        return from_hf(kind.from_pretrained(folder), eos_ids)
    except Exception as error:  # of transformers: OSError, KeyError, its own
        why = " ".join(str(error).split())[:200]
        raise ValueError(f"{folder}: {why}; expected the files of a tokenizer that has an EOS token") from error


def misread(folder: Path, tokenizer: Tokenizer) -> str:
    """How `AutoTokenizer` reads the tokenizer of a checkpoint otherwise than it is; "" if it does not.

    It goes by the model's family: in a qwen2 it finds Qwen's way of cutting text, whatever tokenizer.json says.
    """
    from transformers import AutoTokenizer

    special, expected = set(tokenizer.hf.all_special_ids), "load it with transformers.PreTrainedTokenizerFast"
    text = tokenizer.decode([i for i in range(min(tokenizer.size, 10_000)) if i not in special])
    try:
        found = AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # whatever transformers raises
        return f"{folder}: AutoTokenizer cannot read its tokenizer ({type(error).__name__}); {expected}"
    try:
        same = found.get_vocab() == tokenizer.hf.get_vocab()
        same = same and found.encode(text, add_special_tokens=False) == tokenizer.encode(text)
    except Exception:  # of the tokenizers library
        same = False
    return "" if same else f"{folder}: AutoTokenizer takes its tokenizer for a {type(found).__name__}; {expected}"


def from_hf(hf: Any, eos_ids: int | Sequence[int] | None = None) -> Tokenizer:
    """eos_ids: every token that ends an answer, the usual one first, as `eos_token_id` of a generation_config.json.

    Default: `hf.eos_token_id` alone. Raises ValueError for none, and for one that is not in the vocabulary.
    """
    ids = hf.eos_token_id if eos_ids is None else eos_ids
    if ids is None:
        raise ValueError("tokenizer: eos_token is not set; expected one, or answers could not end")
    ids = tuple(dict.fromkeys([ids] if isinstance(ids, int) else ids))
    expect(ids and all(isinstance(i, int) and 0 <= i < len(hf) for i in ids), "eos_ids", ids, f"ids in [0, {len(hf)})")
    return Tokenizer(hf, ids, hf.pad_token_id if hf.pad_token_id is not None else ids[0])
