"""Training with ExpertParallel and FSDP2, DDP, checkpoints and torch.compile on two and four
processes, beside one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from distributed_training_checks import CHECKS, Model, loaded, same_state, state_of
from ranks import PASSED, outcome, run_checks

RANKS = (2, 4)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Two ranks first: four load what they have saved."""
    base = tmp_path_factory.mktemp("training")
    for ranks in RANKS:
        folder = base / str(ranks)
        folder.mkdir()
        run_checks(ranks, folder, CHECKS)
    return base


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(base, name, ranks):
    said = outcome(ranks, base / str(ranks), name)
    assert said == [PASSED] * ranks, "\n".join(said)


def test_one_process_loads(base):
    """What two ranks have saved, into a plain model."""
    model = Model()
    optimizer = loaded(model, base / "saved", no_dist=True)
    same_state(state_of(model, optimizer, full=True), torch.load(base / "full"))


def test_snippet(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "distributed.md"
    block = r"^<!-- torchrun -->\n```python\n(.*?)^```$"
    (code,) = re.findall(block, page.read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", script], text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall("^loss ", done.stdout, re.MULTILINE)) == 3, done.stdout
