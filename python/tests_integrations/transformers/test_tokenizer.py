"""examples/train_lm.py with a tokenizer of the package tokenizers."""

import json
import math
import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "train_lm.py"
SIZES = "--layers 1 --hidden 32 --heads 2 --experts 4 --intermediate 16 --context 32"


def test_training_on_words(tmp_path):
    text, tokenizer = tmp_path / "text.txt", Tokenizer(models.BPE())
    text.write_text("grün alpha beta gamma delta\n" * 2000)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train([str(text)], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--text", text, "--tokenizer", tmp_path / "tokenizer.json",
         "--out", out, "--device", "cpu", "--steps", "2", *SIZES.split()],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, last = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    vocabulary = tokenizer.get_vocab_size()
    assert 256 < vocabulary <= 300
    assert math.isclose(first["loss"], math.log(vocabulary), rel_tol=0.02)
    about = json.loads((out / "step-0000002" / "run.json").read_text())
    # Five words and a line's end in 29 bytes, nine tenths of the text.
    assert about["tokenizer"] == vocabulary and abs(about["text"] - 0.9 * 2000 * 6) < 10
    refused = subprocess.run(
        [sys.executable, EXAMPLE, "--tokenizer", text, "--text", text], cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"train_lm.py: --tokenizer: got {text}, allowed: a tokenizer")
