"""The script that times options, with a program of our own in the place of `sonicmoe`."""

import json
import stat
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import option_costs

# Writes a report whose times say which variant it is, and in which process.
PROGRAM = """#!/usr/bin/env python3
import json, pathlib, sys
words = sys.argv
count = pathlib.Path(__file__).with_suffix(".count")
calls = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(calls))
def report(variant):
    slow = 1.5 if "situ" in variant or "sigmoid" in variant or "rounding" in variant else 1.0
    hot = 1 + 0.1 * calls  # so that layers of two processes must not be compared
    layer = 4.5 if "ids_and_weights" in variant else 9
    ops = {{"routing": 0.02 * slow * hot, "up_proj": slow * hot, "down_proj_dgrad": slow * hot,
           "up_proj_dgrad": 3 * hot, "up_proj_wgrad": 2 * hot, "down_proj": hot,
           "down_proj_wgrad": hot, "layer": layer * hot}}
    return {{"device": "fake", "results": [{{"what": k, "ms": v}} for k, v in ops.items()]}}
variants = [b for a, b in zip(words, words[1:]) if a == "--beside"]
made = report("") | {{"beside": [report(v) for v in variants]}}
pathlib.Path(words[words.index("--json") + 1]).write_text(json.dumps(made))
sys.exit({code})
"""


def program(folder, code=0):
    path = folder / "sonicmoe"
    path.write_text(PROGRAM.format(code=code))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(folder, *words, code=0):
    receipt = folder / "receipt.json"
    arguments = ["--program", str(program(folder, code)), "--json", str(receipt), *words]
    assert option_costs.main(arguments) == 0
    return json.loads(receipt.read_text())


def test_ratios_do_not_follow_the_clock(tmp_path):
    ratios = run(tmp_path)["ratios"]
    assert ratios["situ_glu, up_proj"]["value"] == pytest.approx(1.5)
    assert ratios["situ_glu with biases, down_proj_dgrad"] == {
        "value": pytest.approx(1.5), "asked": 1.08, "shapes": 9
    }  # fmt: skip
    assert ratios["swiglu_oai, up_proj"]["value"] == pytest.approx(1.0)
    assert ratios["fp32 logits"]["value"] == pytest.approx(1.0)
    assert ratios["sigmoid, renormalised, 24576,1536,256,128,8"]["value"] == pytest.approx(1.5)
    assert ratios["ids and weights over logits"] == {
        "value": pytest.approx(0.5), "asked": 1.0, "shapes": 9
    }  # fmt: skip
    rounding = ratios["token rounding and metadata, us more than top-K's"]
    hot = 1 + 0.1 * int((tmp_path / "sonicmoe.count").read_text())  # of the last process
    assert rounding["value"] == pytest.approx(10 * hot)


def test_a_start_goes_on_where_the_last_one_ended(tmp_path):
    first = run(tmp_path, "--only", "routers")
    assert list(first["shapes"]) == ["routers"] and "fp32 logits" not in first["ratios"]
    calls = int((tmp_path / "sonicmoe.count").read_text())
    again = run(tmp_path, "--only", "routers")
    assert again == first and int((tmp_path / "sonicmoe.count").read_text()) == calls
    assert "--beside" in first["shapes"]["routers"]["16384,2048,256,256,8"][0]["command"]


def test_a_file_of_another_program_is_refused(tmp_path, capsys):
    run(tmp_path, "--only", "token rounding")
    with pytest.raises(SystemExit):
        run(tmp_path, code=1)
    assert "another program" in capsys.readouterr().err


@pytest.mark.parametrize("place", [".", "sonicmoe/report.json"])
def test_a_report_that_cannot_be_written_is_refused_first(tmp_path, capsys, place):
    (tmp_path / "sonicmoe").touch()
    with pytest.raises(SystemExit):
        run(tmp_path, "--json", str(tmp_path / place))
    assert "allowed: a file that can be written" in capsys.readouterr().err
    assert not (tmp_path / "sonicmoe.count").exists()


def test_a_missing_program_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        option_costs.main(["--program", str(tmp_path / "none"), "--json", str(tmp_path / "r.json")])
    assert "--program: got" in capsys.readouterr().err
