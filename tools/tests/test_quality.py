"""benchmarks/quality.py: its jobs, what it skips and resumes, and the numbers that it reports."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import quality  # noqa: E402
import quality_report  # noqa: E402
from lm import captured, checkpoint, parallel, training  # noqa: E402
from lm.data import load_text  # noqa: E402
from lm.model import LanguageModel  # noqa: E402

NAMES = [quality.job(f"{name}-0") for name in quality.SEVERAL + quality.ONCE]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """A product's bits may depend on the threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
    return ["--small", "--device", "cpu", "--text", str(text), "--out", str(tmp_path / "out")]


def parsed(arguments, *more):
    return quality.make_parser().parse_args([*arguments, *more])


def train(name, options):
    """One job, for no time at all where --minutes is set."""
    until = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    text, job = quality.load_text(options), quality.job(name)
    quality.check_study(options, text)
    with parallel.ranks_of(quality.settings_of(job, options)) as ranks:
        assert quality.train(job, options, text, ranks, until) == 0
    file = options.out / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else None


def untimed(lines):
    head, *points = lines
    return {k: v for k, v in head.items() if k not in ("tokens_per_s", "date", "command")}, points


def test_jobs():
    jobs = quality.jobs_of(3)
    names = [job.name for job in jobs]
    assert len(set(names)) == len(names) == 6 * 3 + 5
    assert [quality.job(name) for name in names] == jobs
    for group in ("top_k", "nr", "sr", "nr_s", "nr-half", "nr-quarter"):
        assert [name for name in names if name.rpartition("-")[0] == group] == [
            f"{group}-{seed}" for seed in range(3)
        ]
    assert {"balance-0", "up-0", "down-0"} < set(names) and "up-1" not in names


def test_the_study_is_what_it_claims():
    """100 M weights, 128 experts, 50 M tokens; 2, 1 and 1/2 tiles an expert."""
    options = quality.make_parser().parse_args([])
    rows, sequences = {}, set()
    for job in NAMES:
        s = quality.settings_of(job, options)
        s.check(1)
        rows[job.rows] = s.batch * s.context * s.top_k / s.experts / s.tile
        sequences.add(s.batch * s.accumulate)
        assert (s.routing, s.rounding) == (
            ("top_k", "nr") if job.rule == "top_k" else ("token_rounding", job.rule)
        )
    assert rows == {"full": 2, "half": 1, "quarter": 0.5} and len(sequences) == 1
    assert s.experts >= 128 and s.steps * sequences.pop() * s.context >= 50e6
    with torch.device("meta"):
        assert sum(p.numel() for p in LanguageModel(s, 256).parameters()) >= 100e6


def test_resumes_with_the_same_bits(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")  # as on a machine without git
    options, name = parsed(arguments), "nr_s-half-1"
    whole = train(name, options)
    assert [point["step"] for point in whole[1:]] == [2, 4, 6]
    assert whole[0]["tokens"] == whole[-1]["tokens"] == 6 * 4 * 32
    assert not (options.out / "work" / name).exists()

    # Stopped after a step, killed before the last checkpoint, and killed before the result.
    pieces, loaded = parsed(arguments, "--out", str(tmp_path / "pieces")), []
    load = training.Training.load
    monkeypatch.setattr(
        training.Training, "load", lambda made, at: (loaded.append(at.name), load(made, at))
    )
    with monkeypatch.context() as patch:
        patch.setattr(pieces, "minutes", 1e-9)
        assert train(name, pieces) is None
        assert quality.main([*arguments, "--out", str(pieces.out), "--plan", "--jobs", name]) == 0
        assert "16 rows an expert  has step-0000001\n0 of 1 done" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        validate = training.Training.validate
        until_5 = lambda made: validate(made) if made.done < 6 else 1 / 0  # noqa: E731
        patch.setattr(training.Training, "validate", until_5)
        with pytest.raises(ZeroDivisionError):
            train(name, pieces)
        dist.destroy_process_group()
    assert checkpoint.latest(pieces.out / "work" / name).name == "step-0000003"
    with monkeypatch.context() as patch:
        patch.setattr(quality_report, "lines_of", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(name, pieces)
        dist.destroy_process_group()
    assert untimed(train(name, pieces)) == untimed(whole)
    assert loaded == ["step-0000001", "step-0000003"]
    assert train("top_k-1", options)[1:] != whole[1:]


def test_pairs_begin_alike(arguments):
    """The same weights and batches: the first step of training, before any update, tells."""
    options, first = parsed(arguments), {}
    for name in ("top_k-1", "nr-1", "nr-half-1", "top_k-2"):
        s = quality.settings_of(quality.job(name), options)
        text = load_text(s.text, None, s.context)
        with parallel.ranks_of(s) as ranks:
            made = captured.Captured(s, text, ranks)
            batches = [text.batch(s.seed, 0, range(m * s.batch, (m + 1) * s.batch))[0]
                       for m in range(s.accumulate)]  # fmt: skip
            first[name] = (made.validate(), torch.cat(batches).tolist())
    assert first["top_k-1"] == first["nr-1"]
    assert first["nr-half-1"][1] == first["nr-1"][1] != first["top_k-2"][1]
    assert first["nr-half-1"][0] == first["nr-1"][0]
    assert first["top_k-2"][0] != pytest.approx(first["nr-1"][0], rel=1e-6)


def test_a_signal_and_what_is_done(arguments, tmp_path):
    """A start hears of a SIGTERM and stops; the next one skips what is done."""
    out = tmp_path / "out"
    line = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    endless = (  # where a signal does not end it, a minute does
        "import sys, quality; quality.SMALL['steps'] = 100_000; quality.SMALL['validate_every'] = "
        "100_000; sys.exit(quality.main(sys.argv[1:]))"
    )
    long = [sys.executable, "-c", endless, *arguments, "--out", str(tmp_path / "long")]
    long += ["--jobs", "sr-0", "up-0", "--minutes", "1"]
    where = {**environment, "PYTHONPATH": str(ROOT / "benchmarks")}
    with subprocess.Popen(long, stdout=subprocess.PIPE, text=True, env=where) as process:
        log = tmp_path / "long" / "work" / "sr-0" / "log.jsonl"
        until = time.monotonic() + 60
        while not (log.exists() and log.read_text()) and time.monotonic() < until:
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert said.splitlines() == [
        "sr-0: starts",
        "sr-0: stopped; the next start goes on",
        "0 of 2 jobs are done",
    ]
    assert (log.parent / "latest").exists()

    quality.check_study(parsed(arguments), quality.load_text(parsed(arguments)))
    (out / "nr-0.jsonl").write_text("{}\n")
    few = [*line, "--jobs", "nr-0", "up-0", "--quick"]
    done = subprocess.run(few, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nr-0:" not in done.stdout and "up-0: done, validation loss " in done.stdout
    assert (out / "nr-0.jsonl").read_text() == "{}\n"


def test_a_job_that_diverges(arguments, tmp_path, capsys, monkeypatch):
    """The next one runs all the same."""
    step = training.Training.step

    def diverges(made, stop):
        line, stop = step(made, stop)
        return line | {"loss": math.nan if made.s.routing == "top_k" else line["loss"]}, stop

    monkeypatch.setattr(training.Training, "step", diverges)
    assert quality.main([*arguments, "--jobs", "top_k-0", "nr-0"]) == 1
    said = capsys.readouterr().out
    assert "top_k-0: diverged (" in said and said.endswith("1 of 2 jobs are done\n")


def test_quick(arguments, capsys):
    """10 M tokens of each."""
    assert quality.main([*arguments, "--quick", "--plan"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:-1]] == [
        "top_k-0",
        "nr-0",
    ]
    options = quality.make_parser().parse_args(["--quick"])
    s = quality.settings_of(quality.job("nr-0"), options)
    assert s.steps * s.batch * s.accumulate * s.context >= 10e6


def losses_of(made, steps):
    lines = [made.step()[0] for _ in range(steps)]
    return [line[key] for line in lines for key in ("loss", "aux_loss", "grad_norm")]


@pytest.mark.parametrize("device", ["cpu", *["cuda"] * torch.cuda.is_available()])
@pytest.mark.parametrize("name", ["top_k-3", "sr-half-3"])
def test_a_captured_step_is_a_step(arguments, device, name, tmp_path):
    """Beside the step of train_lm.py, to the rounding of sums in another order; also resumed."""
    s = quality.settings_of(quality.job(name), parsed(arguments, "--device", device))
    text = load_text(s.text, None, s.context)
    with parallel.ranks_of(s) as ranks:
        plain, ours = training.Training(s, text, ranks), captured.Captured(s, text, ranks)
        want, got = losses_of(plain, 4), losses_of(ours, 4)
        folder, later = ours.save(), losses_of(ours, 2)
        resumed = captured.Captured(s, text, ranks)
        resumed.load(folder)
        again = losses_of(resumed, 2)
        validated = [made.validate() for made in (ours, resumed)]
        want += losses_of(plain, 2)
    limit = 1e-5 if device == "cpu" else 2**-6  # bf16 beside bf16
    assert got + later == pytest.approx(want, rel=limit)
    # Attention's gradient on a GPU adds up in no fixed order.
    same = 0.0 if device == "cpu" else 2**-6
    assert later == pytest.approx(again, rel=same, abs=0)
    assert validated[0] == pytest.approx(validated[1], rel=same, abs=0)


def test_no_time_is_left(arguments, capsys):
    assert quality.main([*arguments, "--jobs", "nr-0", "--minutes", "0.3"]) == 0
    assert capsys.readouterr().out == "0 of 1 jobs are done\n"


def test_lines_of():
    log = [{"step": i + 1, "loss": float(i), "aux_loss": 1.0, "tokens_per_s": i**2 * 10.0}
           for i in range(5)]  # fmt: skip
    log[1]["validation_loss"], log[4]["validation_loss"] = 7.0, 6.0
    head, first, last = quality_report.lines_of(log, 100)
    assert head == {"validation_loss": 6.0, "tokens_per_s": 40.0, "tokens": 500}
    point = {"step": 2, "tokens": 200, "validation_loss": 7.0, "loss": 0.5, "aux_loss": 1.0}
    assert first == point
    assert last == {**point, "step": 5, "tokens": 500, "validation_loss": 6.0, "loss": 3.0}


def put(folder, rule, rows, seed, losses, speed, device="H100"):
    head = {"rule": rule, "rows": rows, "seed": seed, "validation_loss": losses[-1],
            "tokens_per_s": speed, "device": device}  # fmt: skip
    points = [{"tokens": i, "validation_loss": loss} for i, loss in enumerate(losses)]
    name = "-".join((*quality_report.group_of(rule, rows), str(seed)))
    text = "".join(json.dumps(line) + "\n" for line in (head, *points))
    (folder / f"{name}.jsonl").write_text(text)


def test_report(tmp_path, capsys):
    (tmp_path / "study.json").write_text('{"settings": {}, "text": {}}')
    for seed, loss in enumerate((1.0, 1.2, 1.1)):
        put(tmp_path, "top_k", "full", seed, [2.0, loss], 100.0)
        put(tmp_path, "nr", "full", seed, [2.0, loss + (0.01, 0.02, 0.06)[seed]], 110.0 + 10 * seed)
    put(tmp_path, "nr", "full", 7, [2.0, 9.0], 120.0)  # without a partner
    put(tmp_path, "down", "full", 0, [2.0, 1.5], 90.0, device="H200")
    put(tmp_path, "nr", "half", 0, [2.0, 1.25], 50.0)
    receipt, picture = tmp_path / "made" / "quality.json", tmp_path / "made" / "quality.png"
    where = ["--out", str(tmp_path), "--json", str(receipt), "--picture", str(picture)]
    assert quality.main([*where, "--report"]) == 0
    content = json.loads(receipt.read_text())
    top, nr, down, half = content["groups"]
    assert top["difference"]["mean"] == 0 and top["deviation"] == pytest.approx(0.1)
    # Of 0.01, 0.02, 0.06: mean 0.03, variance (4 + 1 + 9) / 2 * 1e-4, over three.
    assert nr["difference"]["pairs"] == 3 and nr["seeds"] == [0, 1, 2, 7]
    assert nr["difference"]["mean"] == pytest.approx(0.03)
    assert nr["difference"]["standard_error"] == pytest.approx(math.sqrt(7e-4 / 3))
    # Of 10, 20, 30 %: deviation 10 %.
    assert nr["speed"]["mean"] == pytest.approx(0.2)
    assert nr["speed"]["standard_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert down["speed"] == {"pairs": 0, "mean": None, "standard_error": None}
    assert half["difference"]["mean"] == pytest.approx(0.25) and half["speed"]["pairs"] == 0
    shown = capsys.readouterr().out
    for line in (
        "| top-K | 3 | 1.1000 | – | 100 | – |",
        "| NR-f | 4 | 3.0975 | +0.0300 ± 0.0153 | 120 | +20.0 ± 5.8 |",
        "| DOWN | 1 | 1.5000 | +0.5000 | 90 | – |",
        "| NR-f, half rows | 1 | 1.2500 | +0.2500 | 50 | – |",
    ):
        assert line in shown
    first = picture.read_bytes()
    picture.unlink()
    assert quality.main([*where, "--draw"]) == 0 and picture.read_bytes() == first


def test_bands():
    """One curve lacks a point; one seed lacks top-K."""
    top = {0: 2.0, 10: 1.0, 20: 0.5}
    first, second = {0: 2.0, 10: 3.0, 20: 2.5}, {0: 4.0, 20: 4.5}
    curves = {("top_k", "full", 0): top, ("nr", "full", 0): first, ("nr", "full", 1): second}
    group = {"rule": "nr", "rows": "full", "seeds": [0, 1]}
    found = quality_report.bands(group, curves)
    assert found["loss"] == ([0, 20], [3.0, 3.5], [1.0, 1.0])
    assert found["difference"] == ([0, 10, 20], [0.0, 2.0, 2.0], [0.0] * 3)
    del curves["top_k", "full", 0]
    assert list(quality_report.bands(group, curves)) == ["loss"]


@pytest.mark.parametrize(
    "more, text",
    [
        (["--jobs", "nr"], "got 'nr', allowed: RULE-SEED"),
        (["--jobs", "nr-most-0"], "got 'nr-most-0', allowed: RULE-SEED"),
        (["--jobs", "ec-0"], "got 'ec-0', allowed: RULE-SEED"),
        (["--seeds", "0"], "got '0', allowed: an int of at least 1"),
        (["--minutes", "-1"], "got '-1', allowed: numbers from 0"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--report"], "allowed: a folder with a finished job"),
        (["--draw", "--json", "none.json"], "--json: got none.json, allowed: a receipt"),
        (["--text", "none.txt"], "none.txt: no such file or folder"),
    ],
)
def test_refusals(arguments, more, text, capsys):
    with pytest.raises(SystemExit) as stop:
        quality.main([*arguments, *more])
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_another_study(arguments, tmp_path, capsys, monkeypatch):
    assert quality.main([*arguments, "--minutes", "0.1"]) == 0
    (tmp_path / "text.txt").write_text("other words " * 100)
    monkeypatch.setitem(quality.SMALL, "steps", 5)
    with pytest.raises(SystemExit):
        quality.main([*arguments, "--minutes", "0.1"])
    assert "whose jobs have another steps, text, allowed: another" in capsys.readouterr().err
