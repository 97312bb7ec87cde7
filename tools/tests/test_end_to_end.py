"""benchmarks/end_to_end.py on two gloo processes, and its arithmetic."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import end_to_end  # noqa: E402
import end_to_end_model as stacks  # noqa: E402

FIELDS = set(
    "step_ms tokens_per_s_and_gpu mfu host_ms allocator_retries experts_most_over_mean "
    "bytes_before peak_bytes peak_reserved_bytes first_loss "
    "first_gradient_norm last_loss seconds".split()
)
# The program with experts with which rank 1 ends, and with some that raise.
BROKEN = """
import os, sys
sys.path.insert(0, {benchmarks!r})
import end_to_end, end_to_end_model as stacks

def refused(*sizes, **options):
    raise ValueError("there are no such experts")

def lost(*sizes, **options):
    if os.environ["RANK"] == "1":
        os._exit(9)
    return stacks.MoE(*sizes, **options)

stacks.VARIANTS |= {{"rounding": lost, "preact": refused}}
sys.exit(end_to_end.main())
"""


def run(program, receipt, *options, restarts=0):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    where = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    command = [sys.executable, *launch, *where, "--max-restarts", str(restarts), str(program)]
    command += ["--device", "cpu", "--small", "--json", str(receipt), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)


def test_small(tmp_path):
    """All variants train both stacks, and those that compute the same agree to fp32's rounding."""
    receipt = tmp_path / "made" / "end_to_end.json"
    done = run(BENCHMARKS / "end_to_end.py", receipt)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(receipt.read_text())
    assert list(content["sections"]) == list(stacks.STACKS)
    assert len(content["devices"]) == 2 and content["versions"]["torch"] and content["library"]
    assert content["command"].startswith("python -m torch.distributed.run --nproc-per-node 2")
    for name, result in content["sections"].items():
        variants = result["variants"]
        assert list(variants) == list(result["step_over_ours"]) == list(stacks.VARIANTS)
        for got in variants.values():
            assert set(got) == FIELDS
            assert 0 < got["step_ms"]["least"] <= got["step_ms"]["median"] and got["mfu"] > 0
            # Tokens are random, and so are logits, of variance 1: log sum exp is log V + 1/2, and
            # the mean of the chosen logits is within five deviations of 0.
            s = stacks.SMALL[name]
            near = pytest.approx(math.log(s.vocabulary) + 0.5, abs=5 / math.sqrt(2 * s.tokens))
            assert got["first_loss"] == near and got["last_loss"] == near
            assert got["last_loss"] != got["first_loss"]
            assert got["host_ms"] > 0 and got["allocator_retries"] == 0
        ours, shape = variants["ours"], result["shape"]
        assert 1 <= ours["experts_most_over_mean"] <= shape["experts"] / shape["top_k"]
        assert variants["grouped_mm"]["experts_most_over_mean"] == 0
        for what in ("first_loss", "first_gradient_norm", "last_loss"):
            # The same kernels in the same order of sums; other ones in fp32.
            assert ours[what] == variants["again"][what] == variants["preact"][what]
            assert variants["grouped_mm"][what] == pytest.approx(ours[what], rel=1e-6)
            assert variants["rounding"][what] != ours[what]  # other experts
        assert [c["passed"] for c in result["checks"]] == [True] * 6
        rate = 1e3 * stacks.SMALL[name].tokens / ours["step_ms"]["median"]
        assert ours["tokens_per_s_and_gpu"] == pytest.approx(rate, rel=1e-3)
        work = rate * result["flops_of_token"] / 989e12
        assert ours["mfu"] == pytest.approx(work, rel=1e-3)


def test_errors(tmp_path):
    """A lost rank costs one variant, for new processes go on with the next one. After the last
    restart the same ones do."""
    program, receipt = tmp_path / "broken.py", tmp_path / "end_to_end.json"
    program.write_text(BROKEN.format(benchmarks=str(BENCHMARKS)))
    receipt.write_text(json.dumps({"sections": {"7B": {"variants": {"ours": {"error": "old"}}}}}))
    done = run(program, receipt, "--stacks", "7B", restarts=1)
    assert done.returncode == 1, done.stdout + done.stderr
    content = json.loads(receipt.read_text())
    assert content["restarts"] == 1
    variants = content["sections"]["7B"]["variants"]
    assert list(variants) == list(stacks.VARIANTS)
    for name in ("ours", "grouped_mm", "again"):
        assert set(variants[name]) == FIELDS, done.stdout
    lost = variants["rounding"]["error"]
    assert lost == end_to_end.NOT_ENDED or lost.startswith(end_to_end.LOST)
    assert variants["preact"]["error"] == "ValueError('there are no such experts')"
    assert [c["name"] for c in content["sections"]["7B"]["checks"]] == [
        f"{name}, {what}"
        for name in ("grouped_mm", "again")
        for what in ("first_loss", "first_gradient_norm")
    ]
    assert "2 failed: 7B, rounding: error; 7B, preact: error" in done.stdout


@pytest.mark.parametrize(
    "count, error, ends, meets",
    [
        (0, "ValueError", True, True),
        (1, "ValueError", False, False),
        (0, end_to_end.LOST, True, False),
        (1, end_to_end.LOST, True, False),
    ],
)
def test_new_processes(count, error, ends, meets, monkeypatch):
    """After any error while torchrun has a restart left, and always where ranks no longer meet."""
    done = []
    world = SimpleNamespace(exchange=lambda text: done.append("meets"))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(count))
    monkeypatch.setattr(os, "_exit", lambda status: done.append(status))
    end_to_end.start_anew(world, error)
    assert done == ["meets"] * meets + [1] * ends


@pytest.mark.parametrize("passed, said", [(True, "all passed"), (False, "2 failed: 7B: a")])
def test_nothing_left(passed, said, tmp_path, monkeypatch, capsys):
    """After a failed check torchrun starts processes that find every variant done."""
    receipt = tmp_path / "end_to_end.json"
    checks = [{"name": "a", "passed": passed}]
    done = {"variants": {name: {} for name in stacks.VARIANTS}, "checks": checks}
    receipt.write_text(json.dumps({"sections": dict.fromkeys(stacks.STACKS, done)}))
    asked = {"json": receipt, "stacks": list(stacks.STACKS), "variants": list(stacks.VARIANTS)}
    monkeypatch.setattr(end_to_end, "parsed", lambda: SimpleNamespace(**asked))
    monkeypatch.setattr(end_to_end, "World", None)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("RANK", "0")
    assert end_to_end.main() == (0 if passed else 1)
    assert said in capsys.readouterr().out


def test_what_fails():
    ours = {"first_loss": 6.0, "first_gradient_norm": 0.5}
    variants = {
        "ours": ours,
        "preact": {"error": "refused"},
        "rounding": {"first_loss": 7.0, "first_gradient_norm": 0.7},
        "grouped_mm": {"first_loss": 6.0, "first_gradient_norm": 0.51},
    }
    made = end_to_end.checks(variants, "cuda")
    assert [(c["name"], c["passed"]) for c in made] == [
        ("grouped_mm, first_loss", True),
        ("grouped_mm, first_gradient_norm", False),
    ]
    sections = {"7B": {"variants": variants, "checks": made}}
    assert end_to_end.failures(sections) == [
        "7B, preact: error",
        "7B: grouped_mm, first_gradient_norm",
    ]
    assert end_to_end.checks({"grouped_mm": ours}, "cpu") == []


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("name", stacks.STACKS)
def test_weights(name, small):
    """What the formulas count is what the model has."""
    s = (stacks.SMALL if small else stacks.STACKS)[name]._replace(layers=2)
    with torch.device("meta"):
        model = stacks.Decoder(s, stacks.VARIANTS["grouped_mm"])
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(n for name, n in sizes.items() if ".c_fc." in name or ".c_proj." in name)
    assert s.weights == sum(sizes.values())
    idle = experts // s.experts * (s.experts - s.top_k)
    assert s.active == s.weights - idle - sizes["embedding.weight"]


def test_layers():
    """The 7B stack is whole on two GPUs, and Qwen3-30B-A3B's is not."""
    fitted = {name: s.fitted(2) for name, s in stacks.STACKS.items()}
    assert {name: s.layers for name, s in fitted.items()} == {"7B": 44, "Qwen3-30B-A3B": 8}
    assert stacks.STACKS["7B"].weights == pytest.approx(7.2e9, rel=0.01)
    assert stacks.STACKS["Qwen3-30B-A3B"].weights == pytest.approx(30.5e9, rel=0.01)
    kept = fitted["7B"]._replace(checkpoint="attention").bytes_of_rank(2)["kept_of_blocks"]
    assert kept > fitted["7B"].bytes_of_rank(2)["kept_of_blocks"]
    with pytest.raises(ValueError, match="sequences: got 4096, allowed: "):
        stacks.STACKS["7B"]._replace(sequences=4096).fitted(2)


@pytest.mark.parametrize(
    "options, text",
    [
        (["--stacks", "7B,8B"], "--stacks: got '8B', allowed: 7B, Qwen3-30B-A3B"),
        (["--variants", "fast"], "--variants: got 'fast', allowed: ours, grouped_mm, rounding"),
        (["--sequences", "4096"], "--sequences: got 4096, allowed: "),
        ([], "WORLD_SIZE: "),
    ],
)
def test_refusals(options, text, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["end_to_end.py", *options])
    monkeypatch.setenv("WORLD_SIZE", "2" if options else "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        end_to_end.parsed()
    assert text in capsys.readouterr().err
