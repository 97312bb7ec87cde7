"""Text as bytes: which files are read, how they are split, how batches are drawn."""

import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT_EVERY = 10  # every tenth file is held out; of a single file, its last tenth
MAX_BYTES = 64 << 20  # enough for any demo; keeps `--text /` from reading a whole disk


class CorpusError(ValueError):
    """There is no text to train on; the message is one line for the user."""


@dataclass(frozen=True)
class Corpus:
    source: str
    train: torch.Tensor  # uint8 (bytes of the training files)
    held_out: torch.Tensor  # uint8 (bytes of the held-out files)
    files: int


def _text_files(folder, suffix, skip_folders):
    """Files below the folder in a fixed order; hidden ones and skipped folders left out."""
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in skip_folders)
        for name in sorted(names):
            path = Path(here, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


def _read_text(path):
    """The file's bytes, or nothing if it cannot be read or is not UTF-8 text."""
    try:
        data = path.read_bytes()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in data else data


def load_corpus(path, context, max_bytes=MAX_BYTES):
    """Reads `path` (a file or folder), or Python's own standard library where it is None."""
    if path is None:
        path = Path(sysconfig.get_path("stdlib"))
        # Only what every installation has: Debian leaves the tests out, for example.
        skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
        files, source = _text_files(path, ".py", skip), "Python standard library"
    else:
        path = Path(path)
        if not path.exists():
            raise CorpusError(f"--text {path}: no such file or folder")
        files = _text_files(path, "", set()) if path.is_dir() else [path]
        source = str(path)

    parts, total = [], 0
    for file in files:
        data = _read_text(file)
        if data:
            parts.append(data[: max_bytes - total])
            total += len(parts[-1])
        if total >= max_bytes:
            break
    if not parts:
        raise CorpusError(f"--text {path}: no text in it (UTF-8, not empty)")
    if len(parts) == 1:
        cut = len(parts[0]) - len(parts[0]) // HELD_OUT_EVERY
        train, held_out = parts[0][:cut], parts[0][cut:]
    else:
        chosen = set(range(HELD_OUT_EVERY - 1, len(parts), HELD_OUT_EVERY)) or {len(parts) - 1}
        train = b"".join(part for i, part in enumerate(parts) if i not in chosen)
        held_out = b"".join(parts[i] for i in sorted(chosen))
    if min(len(train), len(held_out)) <= context:
        raise CorpusError(
            f"--text {path}: {len(train)} bytes to train on and {len(held_out)} held out;"
            f" each must be more than one context of {context}"
        )
    tensors = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (train, held_out))
    return Corpus(source, *tensors, files=len(parts))


def windows(text, starts, context):
    """(inputs, targets), both int64 (len(starts), context); targets are one byte ahead."""
    rows = text[starts[:, None] + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def training_batches(text, context, batch, seed):
    """Random windows, the same sequence for the same seed whatever the backend or device."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch,), generator=generator)
        yield windows(text, starts, context)


def held_out_batches(text, context, batch, count):
    """`count` windows spread evenly over the text."""
    starts = torch.linspace(0, len(text) - context - 1, count).long()
    return [windows(text, some, context) for some in starts.split(batch)]


def unigram_entropy(batches):
    """Entropy in nats of the target bytes: the best any model without context could reach."""
    counts = torch.cat([targets.flatten() for _, targets in batches]).bincount().double()
    p = counts[counts > 0] / counts.sum()
    return -(p * p.log()).sum().item()
