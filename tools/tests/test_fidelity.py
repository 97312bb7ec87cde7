"""benchmarks/fidelity.py: its runs at a toy size, what it skips, and the gaps that it reports."""

import json
import math
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import fidelity  # noqa: E402


@pytest.fixture
def arguments(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}\n" for i in range(2000)))
    where = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "receipt.json")]
    some = ["--small", "--steps", "60", "--device", "cpu", "--processes", "1", "--seeds", "1"]
    return [*some, "--text", str(text), *where]


def test_toy_runs(arguments, tmp_path, capsys):
    """All in fp32 here, so that they agree; the nudged one shows, and learns like the others."""
    fp32 = tmp_path / "out" / "fp32-0.json"
    options = fidelity.make_parser().parse_args(arguments)
    options.out.mkdir()
    assert fidelity.run("fp32", 0, options).startswith("fp32-0: held-out loss ")
    before = fp32.read_text()
    assert fidelity.main(arguments) == 0
    said = capsys.readouterr().out
    assert "fp32-0:" not in said and said.endswith("4 of 4 runs are done\n")
    assert fp32.read_text() == before
    assert fidelity.main([*arguments, "--report"]) == 0
    made = json.loads((tmp_path / "receipt.json").read_text())
    assert len(made["runs"]) == 4 and all(len(run["losses"]) == 2 for run in made["runs"])
    for name in ("ours", "torch", "nudged"):
        row = made["summary"][name]
        assert row["held_out"]["mean"] < 5.0 and abs(row["held_out_gap"]["mean"]) < 1e-3
    assert 0 < made["summary"]["nudged"]["largest_early_gap"] < 1e-3
    assert made["summary"]["torch"]["largest_early_gap"] == 0  # the same operations
    assert "| our bf16 experts | 1 | " in capsys.readouterr().out


def result(run, seed, held_out, losses, first, **other):
    return {
        "run": run,
        "seed": seed,
        "held_out_loss": [[0, 9.0], [8, held_out]],
        "losses": losses,
        "first_losses": first,
        "text": "a",
        "device": "H100",
        "settings": {"steps": 8},
    } | other


def test_gaps(tmp_path, capsys):
    """Pairs of one seed; a seed without its fp32 run counts in the losses alone."""
    runs = [
        result("fp32", 0, 1.0, [5.0, 4.0, 3.0, 2.0], [5.0, 4.0]),
        result("fp32", 1, 2.0, [5.0, 4.0, 3.0, 1.0], [5.0, 4.0]),
        result("ours", 0, 1.01, [9.0, 9.0, 9.0, 2.5], [5.25, 4.0]),
        result("ours", 1, 2.03, [9.0, 9.0, 9.0, 1.5], [5.0, 3.5]),
        result("ours", 2, 4.0, [9.0, 9.0, 9.0, 2.0], [0.0, 0.0]),
    ]
    summed = fidelity.summary(runs)
    ours = summed["ours"]
    assert ours["seeds"] == [0, 1, 2] and "torch" not in summed
    assert ours["held_out"]["mean"] == pytest.approx((1.01 + 2.03 + 4.0) / 3)
    # Of 0.01 and 0.03: mean 0.02, deviation 0.02 / sqrt(2), over sqrt(2).
    assert ours["held_out_gap"]["mean"] == pytest.approx(0.02)
    assert ours["held_out_gap"]["standard_error"] == pytest.approx(0.01)
    assert ours["last_quarter_gap"] == {"mean": 0.5, "standard_error": 0.0}
    assert ours["largest_early_gap"] == 0.5 and "held_out_gap" not in summed["fp32"]
    assert (
        "| our bf16 experts | 3 | 2.3467 | +0.0200 ± 0.0100 | 2.0000 | +0.5000 ± 0.0000 | 5.0e-01 |"
        in (fidelity.table(summed))
    )

    folder = tmp_path / "out"
    folder.mkdir()
    for run in [*runs, result("torch", 0, 1.0, [1.0], [1.0], device="H200")]:
        (folder / f"{run['run']}-{run['seed']}.json").write_text(json.dumps(run))
    with pytest.raises(SystemExit):
        fidelity.main(["--report", "--out", str(folder), "--json", str(tmp_path / "made.json")])
    assert "whose runs differ in text, device or steps" in capsys.readouterr().err


def test_no_time_is_left(arguments, capsys, monkeypatch):
    """A run is begun only where one that takes as long as the longest would end in time."""
    options = fidelity.make_parser().parse_args([*arguments, "--minutes", "1"])
    fidelity.train_all(options, time.monotonic() - 61)
    assert capsys.readouterr().out == (
        "No time is left for another run; the next start goes on.\n0 of 4 runs are done\n"
    )


def test_the_study_is_what_it_claims():
    """2,000 steps of the demo's model, three seeds."""
    options = fidelity.make_parser().parse_args([])
    assert options.seeds == 3 and set(fidelity.RUNS) == set(fidelity.TITLES)
    settings = fidelity.settings_of(options, 2)
    assert settings == fidelity.Settings(steps=2000, seed=2)
    assert math.log2(fidelity.NUDGE - 1) == -20


@pytest.mark.parametrize(
    "more, text",
    [
        (["--report"], "allowed: a folder with a finished run"),
        (["--minutes", "0"], "got '0', allowed: numbers above 0"),
        (["--processes", "0"], "got '0', allowed: an int of at least 1"),
        (["--text", "none.txt"], "none.txt: no such file or folder"),
    ],
)
def test_refusals(arguments, more, text, capsys):
    with pytest.raises(SystemExit) as stop:
        fidelity.main([*arguments, *more])
    assert stop.value.code == 2 and text in capsys.readouterr().err
