"""benchmarks/two_gpus.py: its sections about torchtitan, small and on two gloo processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_small(tmp_path):
    program = str(ROOT / "benchmarks" / "two_gpus.py")
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")
    where = ("--local-addr", "127.0.0.1")
    options = ("--device", "cpu", "--small", "--sections", "titan,minimal_async_ep")
    receipt = tmp_path / "two_gpus.json"
    done = subprocess.run(
        [sys.executable, *launch, *where, program, *options, "--json", str(receipt)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    sections = json.loads(receipt.read_text())["sections"]
    assert all(check["passed"] for check in sections["titan"]["checks"])
    assert len(sections["titan"]["checks"]) == 2
    assert len(sections["titan"]["milliseconds"]) == 6
    assert sections["minimal_async_ep"]["notes"] == [
        "not run: MinimalAsyncEP has CUDA kernels alone"
    ]
