"""benchmarks/portable.py: its ratios, a whole run on the CPU, what it refuses."""

import argparse
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import portable  # noqa: E402


@pytest.fixture
def arguments(tmp_path):
    """A peak that nothing reaches, for what the benchmark compares runs on a CPU."""
    peak = tmp_path / "mma_peak"
    peak.write_text('#!/bin/sh\necho \'{"device": "none", "milliseconds": 100, "tflops": 1e9}\'\n')
    peak.chmod(0o755)
    where = ["--mma-peak", str(peak), "--json", str(tmp_path / "receipt.json")]
    return ["--small", "--device", "cpu", "--repeats", "2", *where]


def test_a_whole_run(arguments, tmp_path, capsys):
    assert portable.main(arguments) == 1  # the peak
    content = json.loads((tmp_path / "receipt.json").read_text())
    asked = [(config, asked) for _, config, _, asked in content["ratios"]]
    assert asked == [
        *portable.OF_PEAK.items(),
        *portable.OVER_SCATTERMOE.items(),
        *portable.OVER_GROUPED_MM.items(),
    ]
    assert content["ratios"][0][2] < 1e-3 and min(row[2] for row in content["ratios"]) > 0
    assert list(content["held"]) == list(portable.OF_PEAK)
    assert len(content["peaks"]) == 2 and content["device"] == "CPU"
    assert "up_proj over the peak" in capsys.readouterr().out


def test_ratios():
    results = {
        "up_proj": {"tflops": 300.0},
        "sm80.up_proj.128x256": {"tflops": 420.0},
        "sm80.up_proj.128x128": {"tflops": 450.0},
        "sm80.down_proj.128x128": {"tflops": 900.0},
        "forward": {"ms": 1.0},
        "backward": {"ms": 2.0},
    }
    assert portable.of_peak(results, 600.0) == 0.75
    # 6 T K n d = 1.78e11 take 1 ms forward, 2 * 1.78e11 at 227 TFLOP/s some 1.57 ms backward.
    thiek = [1, 178, 10**9, 1, 1]
    thiek[2] = 178 * 10**9 // (6 * 178)
    got = portable.over_scattermoe(results, thiek, "7B-n256")
    assert got == pytest.approx((1 + 2 * 178 / 227) / 3, rel=1e-6)
    row = {"sonicmoe_forward_ms": 1, "sonicmoe_backward_ms": 2}
    row |= {"grouped_mm_forward_ms": 2, "grouped_mm_backward_ms": 4}
    assert portable.over_grouped_mm(row) == 2


def test_what_is_held_and_what_is_interleaved(monkeypatch):
    commands = []

    def output(*command):
        commands.append([str(word) for word in command])
        Path(command[-1]).write_text(json.dumps({"results": [{"what": "up_proj", "ms": 1.0}]}))

    monkeypatch.setattr(portable, "output", output)
    options = argparse.Namespace(build=Path("build"), device="cuda", repeats=7)
    for held, how in ((True, ["--steady-state", "100"]), (False, ["--repeats", "7"])):
        found = portable.bench([8, 64, 32, 4, 2], options, held=held)
        assert found == {"up_proj": {"what": "up_proj", "ms": 1.0}}
        assert commands[-1][-4:-2] == how and "8,64,32,4,2" in commands[-1]


def test_what_it_refuses(arguments, tmp_path, capsys, monkeypatch):
    found = {"sm80.up_proj.128x128": {}, "sm90.up_proj.128x128": {}}
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"got sm90\.up_proj\."):
        patch.setattr(portable, "bench", lambda *_, **__: found)
        portable.main(arguments)
    assert not (tmp_path / "receipt.json").exists()
    with pytest.raises(SystemExit):
        portable.main(["--repeats", "0"])
    assert "--repeats: got '0'" in capsys.readouterr().err
