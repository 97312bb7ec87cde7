import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "hf_finetune.py"


def test_finetuning_example(tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--steps", "120", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first = re.search(r"counting by 1: (\d+)% right, by 2: (\d+)%", done.stdout)
    adapted = re.search(r"counting by 2 with adapters: (\d+)% right", done.stdout)
    assert int(first[1]) >= 95 and int(first[2]) <= 20
    assert int(adapted[1]) >= 95
