"""examples/train_lm.py on one process and two, its signals, lost ranks, resuming and options."""

import contextlib
import math
import multiprocessing
import os
import pty
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_lm
from lm import report
from lm.data import load_text
from lm.model import LanguageModel
from lm.watch import Watch

PROGRAM = Path(train_lm.__file__)
SIZES = "--layers 2 --hidden 32 --heads 2 --experts 4 --intermediate 16 --context 32".split()
COMMON = [*SIZES, *"--batch 4 --warmup 4 --device cpu --lr 3e-3 --validation-sequences 6".split()]
TWO = [*COMMON, *"--steps 10 --validate-every 4 --checkpoint-every 5".split()]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As in the processes that tests start: a product's bits may depend on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta\n"], k=4000)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(words))
    return path


def train(text, out, *options):
    assert train_lm.main(["--text", str(text), "--out", str(out), *map(str, options)]) == 0
    return report.read(out / "log.jsonl")


def same(got, want, limit=0.0):
    """Two logs, but for times."""
    assert [line["step"] for line in got] == [line["step"] for line in want]
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"tokens_per_s"}:
            assert a[key] == pytest.approx(b[key], rel=limit, abs=0), f"{key}, step {a['step']}"


def half(out, to):
    """A copy that ends at step 5, with a later checkpoint that is not whole."""
    shutil.copytree(out, to)
    assert sorted(path.name for path in to.glob("step-*")) == ["step-0000005", "step-0000010"]
    (to / "latest").write_text("step-0000005")
    (to / "step-0000010" / ".metadata").unlink()
    return to


def _rank(rank, port, runs):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}
    for i, arguments in enumerate(runs):
        os.environ["MASTER_PORT"] = str(port + i)
        assert train_lm.main(arguments) == 0
    os._exit(0)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_two(*processes):
    """Exit codes of two processes (function, arguments)."""
    spawn = multiprocessing.get_context("spawn")
    started = [spawn.Process(target=target, args=arguments) for target, arguments in processes]
    for process in started:
        process.start()
    for process in started:
        process.join(timeout=120)
        process.kill()
        process.join()
    return [process.exitcode for process in started]


@pytest.fixture(scope="module")
def two(text, tmp_path_factory):
    """Logs of runs on two ranks."""
    folder = tmp_path_factory.mktemp("two")
    base = ["--text", str(text), *TWO]
    runs = [
        [*base, "--out", str(folder / "ep"), "--ep", "2"],
        [*base, "--out", str(folder / "dp"), "--activation-checkpointing"],
        [*base, "--out", str(folder / "bf16"), "--ep", "2", "--precision", "bf16"],
    ]
    port = free_port()
    assert on_two(*((_rank, (rank, port, runs)) for rank in range(2))) == [0, 0]
    half(folder / "ep", folder / "resumed")
    runs = [["--out", str(folder / "resumed"), "--resume"]]
    assert on_two(*((_rank, (rank, port, runs)) for rank in range(2))) == [0, 0]
    return folder


@pytest.fixture(scope="module")
def one(text, tmp_path_factory):
    """What two ranks compute, on one process."""
    folder = tmp_path_factory.mktemp("one")
    train(text, folder / "one", *TWO, "--accumulate", 2)
    return folder


def test_two_ranks_agree_with_one(one, two):
    want = report.read(one / "one" / "log.jsonl")
    for name in ("ep", "dp"):
        same(report.read(two / name / "log.jsonl"), want, limit=1e-5)
    narrow = report.read(two / "bf16" / "log.jsonl")
    # 8 bits of precision in each product and of the stream between blocks.
    assert [a["loss"] for a in narrow] == pytest.approx([b["loss"] for b in want], rel=2**-7)
    assert narrow[0]["loss"] != want[0]["loss"]


def test_resumed_curves(one, two, tmp_path):
    same(report.read(two / "resumed" / "log.jsonl"), report.read(two / "ep" / "log.jsonl"))
    want = report.read(one / "one" / "log.jsonl")
    for start in (one / "one", two / "ep"):
        out = half(start, tmp_path / start.name)
        for step in (98, 99):
            (out / f"step-00000{step}").mkdir()
        options = "--ep 1 --accumulate 2".split()
        assert train_lm.main(["--out", str(out), "--resume", *options]) == 0
        assert sorted(path.name[-2:] for path in out.glob("step-*")) == ["05", "10"]
        same(report.read(out / "log.jsonl"), want, limit=0 if start.name == "one" else 1e-5)


def test_draws_go_on_where_they_stopped(text, tmp_path):
    rounding = "--routing token_rounding --rounding sr --tile 16".split()
    want = train(text, tmp_path / "whole", *TWO, *rounding)
    out = half(tmp_path / "whole", tmp_path / "half")
    assert train_lm.main(["--out", str(out), "--resume"]) == 0
    same(report.read(out / "log.jsonl"), want)
    plain = train(text, tmp_path / "plain", *TWO)
    assert plain[0]["loss"] != want[0]["loss"]
    start = [*COMMON, "--steps", 1, "--lr", 0]
    losses = [train(text, tmp_path / n, *start, *o) for n, o in (("a", rounding), ("b", []))]
    assert losses[0][0]["validation_loss"] == losses[1][0]["validation_loss"]


def test_a_resumed_run_takes_other_options(text, tmp_path):
    want = train(text, tmp_path / "whole", *TWO, "--activation-checkpointing")
    logs = {}
    for decay in ("0.1", "90"):
        out = half(tmp_path / "whole", tmp_path / decay)
        options = ["--weight-decay", decay, "--no-activation-checkpointing"]
        assert train_lm.main(["--out", str(out), "--resume", *options]) == 0
        logs[decay] = report.read(out / "log.jsonl")
    same(logs["0.1"], want)
    same(logs["90"][:6], want[:6])  # the decay of step 6 shows in the loss of the next
    assert logs["90"][-1]["loss"] > 1.01 * want[-1]["loss"]


def test_the_steps_are_those_of_plain_pytorch(text, tmp_path):
    """The model without FSDP2, its gradients and AdamW by the book."""
    options = [*COMMON, "--steps", "4", "--accumulate", "2", "--out", str(tmp_path / "a")]
    log = train(text, tmp_path / "a", *options)
    s, _ = train_lm.parse(train_lm.make_parser(), ["--text", str(text), *options[:-2]])
    data = load_text(s.text, None, s.context)
    torch.manual_seed(s.seed)
    model = LanguageModel(s, data.vocabulary)
    decayed = {False: [], True: []}
    for p in model.parameters():
        decayed[p.ndim > 1].append(p)
    optimizer = torch.optim.AdamW(
        [{"params": p, "weight_decay": 0.1 * matrix} for matrix, p in decayed.items()],
        betas=(0.9, 0.95),
    )
    for line in log:
        for group in optimizer.param_groups:
            group["lr"] = line["lr"]
        total = 0.0
        for first in (0, 4):
            inputs, targets = data.batch(s.seed, line["step"] - 1, range(first, first + 4))
            logits, aux_loss = model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            ((loss + 0.01 * aux_loss) / 2).backward()
            total += loss.item() / 2
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert line["loss"] == pytest.approx(total, rel=1e-5)
        assert line["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert log[0]["lr"] < log[1]["lr"]
    inputs, targets = data.validation(range(6), 6)
    with torch.no_grad():
        loss = F.cross_entropy(model.eval()(inputs)[0].flatten(0, 1), targets.flatten())
    assert log[-1]["validation_loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_training_learns_and_tells(text, tmp_path, capsys):
    log = train(text, tmp_path / "a", *COMMON, "--steps", 60, "--validate-every", 20)
    assert [line["step"] for line in log] == list(range(1, 61))
    keys = {"step", "loss", "aux_loss", "grad_norm", "lr", "tokens_per_s"}
    assert all(line.keys() - {"validation_loss"} == keys for line in log)
    validated = {line["step"]: line["validation_loss"] for line in log if "validation_loss" in line}
    assert list(validated) == [20, 40, 60]
    # Bytes at random have log 256; single bytes of this text, drawn by their frequency, 2.2.
    assert log[0]["loss"] == pytest.approx(math.log(256), rel=0.02)
    assert validated[60] < 2.2
    assert (tmp_path / "a" / "curves.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr()
    assert "Done: 60 steps" in said.out and "step 20/60: loss" in said.out
    assert said.err == ""


def test_without_matplotlib_and_tqdm(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(text, tmp_path / "a", *COMMON, "--steps", 2, "--checkpoint-every", 1)
    said = capsys.readouterr().out
    assert said.count("matplotlib is missing") == said.count("tqdm is missing") == 1
    assert "step 2/2: loss" in said
    assert not (tmp_path / "a" / "curves.png").exists()


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        train_lm.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert (ended.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    return said.err.removeprefix("train_lm.py: ").strip()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--steps 0", "--steps: got '0', allowed: whole numbers from 1"),
        ("--seed -1", "--seed: got '-1', allowed: whole numbers from 0"),
        ("--lr nan", "--lr: got 'nan', allowed: numbers from 0"),
        ("--transport ring", "--transport: invalid choice: 'ring' (choose from "),
        ("--heads 3", "--heads: got 3, allowed: with --hidden 256 an even ratio"),
        ("--hidden 12 --heads 2", "--hidden: got 12, allowed: multiples of 8"),
        ("--intermediate 4", "--intermediate: got 4, allowed: multiples of 8"),
        ("--top-k 17", "--top-k: got 17, allowed: 1 to --experts (16)"),
        ("--tile 2000", "--tile: got 2000, allowed: 1 to 1024"),
        ("--ep 3", "--ep: got 3, allowed: divisors of the number of ranks (2)"),
        ("--ep 2 --experts 5", "--ep: got 2, allowed: divisors of --experts (5)"),
        (
            "--ep 2 --routing token_rounding",
            "--routing: got token_rounding, allowed: top_k with --ep above 1",
        ),
        ("--device cuda", "--device: got cuda, allowed: cpu, or a rank's own of ['cpu']"),
        ("--text /no/such", "--text /no/such: no such file or folder"),
        ("--tokenizer /no", "--tokenizer: got /no, allowed: "),
        ("--resume", "--resume: got --out "),
    ],
)
def test_bad_options_are_one_line(capsys, monkeypatch, tmp_path, options, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("sonicmoe.devices", lambda: ["cpu"])
    said = refusal(capsys, "--out", tmp_path, *options.split())
    assert said.startswith(message)


def test_a_checkpoint_is_not_overwritten(one, text, capsys, tmp_path):
    out, other = half(one / "one", tmp_path / "a"), tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[:-9])
    assert refusal(capsys, "--out", out).endswith(
        "which has the checkpoint step-0000005, allowed: another folder, or --resume to go on from "
        "it"
    )
    for options, message in (
        ("--hidden 64", "--hidden: got 64, allowed: 32, the checkpoint's"),
        ("--steps 5", "--steps: got 5, allowed: above 5, the checkpoint's"),
        ("--batch 3", "--batch: got 3, with --accumulate 2 and 1 ranks 6 sequences a step, "
         "allowed: 8 a step, the checkpoint's"),
        (f"--text {other}", "--text: got "),
    ):  # fmt: skip
        assert refusal(capsys, "--out", out, "--resume", *options.split()).startswith(message)


def test_minutes(text, tmp_path, capsys):
    log = train(text, tmp_path / "a", *COMMON, "--steps", 100000, "--minutes", 0.01)
    assert 1 < len(log) < 100000
    assert f"To go on from step {len(log)}" in capsys.readouterr().out


def test_divergence_is_no_success(text, tmp_path, capsys):
    arguments = ["--text", str(text), "--out", str(tmp_path / "a"), *COMMON, "--lr", "1e30"]
    assert train_lm.main([*arguments, "--steps", "9", "--checkpoint-every", "1"]) == 1
    assert re.search(r"diverged.*To go on from step \d", capsys.readouterr().out)


def until(log, step, process):
    """Waits for a step's line in a log."""
    for _ in range(1200):
        if log.exists() and f'"step": {step},' in log.read_text():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    raise AssertionError(f"no step {step}")


def test_ctrl_c_saves_and_resume_goes_on(text, tmp_path):
    out = tmp_path / "a"
    options = [*COMMON, "--steps", "150", "--validate-every", "40"]
    terminal, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 100))
    with subprocess.Popen(
        [sys.executable, PROGRAM, "--text", text, "--out", out, *options],
        stdout=subprocess.PIPE,
        stderr=its,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        os.close(its)
        until(out / "log.jsonl", 3, process)
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    bar = ""
    with contextlib.suppress(OSError):  # so ends a terminal
        while piece := os.read(terminal, 1 << 16):
            bar += piece.decode()
    assert process.returncode == 0, bar
    assert "Traceback" not in bar and "%|" in bar and "loss=" in bar
    step = len(report.read(out / "log.jsonl"))
    assert 3 <= step < 150
    assert f"Stopped after step {step}. To go on from step {step}: launch train_lm.py" in stdout
    assert train_lm.main(["--out", str(out), "--resume"]) == 0
    same(report.read(out / "log.jsonl"), train(text, tmp_path / "whole", *options))


def torchrun(text, out, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend",
         "c10d", "--rdzv-endpoint", "127.0.0.1:0", PROGRAM, "--out", out, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_torchrun_sigterm_saves_and_a_lost_rank_ends_the_run(text, tmp_path):
    out = tmp_path / "a"
    forever = "--ep 2 --steps 1000000 --checkpoint-every 1000000".split()
    with torchrun(text, out, "--text", text, *COMMON, *forever) as process:
        until(out / "log.jsonl", 3, process)
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=60)
    step = len(report.read(out / "log.jsonl"))
    assert f"Stopped after step {step}. To go on from step {step}" in stdout, stderr
    with torchrun(text, out, "--resume") as process:
        until(out / "log.jsonl", step + 2, process)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        began = time.monotonic()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - began < 20
    assert re.search(rf"^train_lm: lost rank 1\b.*To go on from step {step}: ", stderr, re.M)
    assert "it/s" not in stderr and "step/s" not in stderr and "\r" not in stdout + stderr


def _hangs(rank, port):
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    with Watch(1, lambda: "Go on."):
        if rank == 0:
            dist.all_reduce(torch.zeros(1))
        time.sleep(60)


def test_a_rank_that_hangs_ends_the_run(capfd):
    began, port = time.monotonic(), free_port()
    assert on_two((_hangs, (0, port)), (_hangs, (1, port))) == [1, 1]
    assert time.monotonic() - began < 40
    assert "no step has ended for --timeout (1) seconds. Go on." in capfd.readouterr().err
