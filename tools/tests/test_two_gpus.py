"""benchmarks/two_gpus.py on two gloo processes, as far as it goes without GPUs."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import two_gpus  # noqa: E402
from two_gpus_world import check, target  # noqa: E402


def run(receipt, path, *options):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    program = (str(ROOT / "benchmarks" / "two_gpus.py"), "--device", "cpu", "--small")
    command = [sys.executable, *launch, *where, *program, "--json", str(receipt), *options]
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_small(tmp_path):
    """What needs neither a GPU nor torchtitan passes. Errors are told, and the rest runs."""
    (tmp_path / "torchtitan.py").write_text("raise ImportError('there is no torchtitan')\n")
    receipt = tmp_path / "made" / "two_gpus.json"
    done = run(receipt, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(receipt.read_text())
    sections = content["sections"]
    assert list(sections) == list(two_gpus.SECTIONS)
    assert two_gpus.failures(content) == ["titan: error", "minimal_async_ep: error"], done.stdout
    assert sections["titan"]["error"] == "ImportError('there is no torchtitan')"
    # Five tensors and the choices of each variant, beside those of one rank; two transports again.
    assert len(sections["agree"]["checks"]) == 5 + 6 * 5 + 2
    assert len(sections["times"]["targets"]) == 2
    assert min(case["least"] for case in sections["times"]["milliseconds"].values()) > 0
    for name in ("graph", "waits"):
        assert sections[name]["notes"][0].startswith("not run")
    assert content["devices"] == [content["devices"][0]] * 2 and content["versions"]["torch"]
    for text in ("FSDP2, gather, dw1", "gather, over one GPU", "2 failed: titan: error;"):
        assert text in done.stdout


def test_what_fails():
    bad = check("bits", 3, "2", False)
    slow = target("ratio", 1.5, 1.2, 1.1)
    fast = target("ratio", 1.5, 1.2, 1.4, larger=True)
    sections = {
        "agree": {"checks": [check("sums", 1, "1", True)], "targets": [slow, fast]},
        "graph": {"checks": [bad]},
        "waits": {"error": "Traceback"},
    }
    assert two_gpus.failures({"sections": sections}) == ["graph: bits", "waits: error"]
    assert not slow["met"] and fast["met"]
    text = "\n".join(sum((two_gpus.lines(*section) for section in sections.items()), []))
    for part in ("FAILED  bits", "ok      sums", "missed  ratio", "met     ratio", "ERROR"):
        assert part in text


@pytest.mark.parametrize(
    "options, text",
    [
        (["--sections", "times,sums"], "--sections: got 'sums', allowed: agree,"),
        ([], "WORLD_SIZE: "),
    ],
)
def test_refusals(options, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", *options])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        two_gpus.parsed()
    assert text in capsys.readouterr().err
