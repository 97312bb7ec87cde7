"""Text as tokens, and the batches of a run, which depend on nothing but seed and step."""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "demo"))
from corpus import load_corpus, windows

MAX_BYTES = 1 << 30  # of each path
PIECE = 1 << 20  # characters that a tokenizer gets at a time


@dataclass(frozen=True)
class Text:
    source: str
    vocabulary: int
    context: int
    train: torch.Tensor  # tokens, uint8 or int32
    held_out: torch.Tensor

    def batch(
        self, seed: int, step: int, sequences: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets (B, context) of some of the sequences of all ranks in a step."""
        last = len(self.train) - self.context
        draws = [random.Random(f"{seed} {step} {i}").randrange(last) for i in sequences]
        return windows(self.train, torch.tensor(draws), self.context)

    def validation(self, sequences: Sequence[int], count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Some of `count` sequences that are spread evenly over the held-out text."""
        last = len(self.held_out) - self.context - 1
        starts = [last * i // max(1, count - 1) for i in sequences]
        return windows(self.held_out, torch.tensor(starts), self.context)

    def check_resumed(self, about: dict[str, Any]) -> None:
        """ValueError where a checkpoint is of another text."""
        for option, got in (("tokenizer", self.vocabulary), ("text", len(self.train))):
            if got != about[option]:
                raise ValueError(
                    f"--{option}: got {got} tokens, allowed: {about[option]}, the checkpoint's"
                )


def load_text(paths: tuple[Path, ...], tokenizer: Path | None, context: int) -> Text:
    """ValueError with one line for the user where there is no such text."""
    corpora = [load_corpus(path, context, MAX_BYTES) for path in paths or (None,)]
    source = ", ".join(corpus.source for corpus in corpora)
    train = torch.cat([corpus.train for corpus in corpora])
    held_out = torch.cat([corpus.held_out for corpus in corpora])
    if tokenizer is None:
        return Text(source, 256, context, train, held_out)
    encode, vocabulary = _tokenizer(tokenizer)
    text = Text(source, vocabulary, context, encode(train), encode(held_out))
    if min(len(text.train), len(text.held_out)) <= context:
        raise ValueError(
            f"--text: got {len(text.train)} tokens to train on and {len(text.held_out)} held out, "
            f"allowed: more than --context ({context}) of each"
        )
    return text


def _tokenizer(path: Path) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    """A function from bytes to tokens, and how many different ones there are."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ValueError(
            f"--tokenizer: got {path}, allowed: none, for the package tokenizers is missing"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises no narrower one
        raise ValueError(f"--tokenizer: got {path}, allowed: a tokenizer.json ({error})") from None

    def encode(data: torch.Tensor) -> torch.Tensor:
        text = data.numpy().tobytes().decode("utf-8", "replace")  # a cut may split a character
        pieces = [text[i : i + PIECE] for i in range(0, len(text), PIECE)]
        encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
        return torch.cat([torch.tensor(piece.ids, dtype=torch.int32) for piece in encoded])

    return encode, tokenizer.get_vocab_size()
