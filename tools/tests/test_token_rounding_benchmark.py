"""benchmarks/moe-token-rounding.py: its shapes, what it skips, its numbers, the picture."""

import importlib
import json
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import timers  # noqa: E402
import token_rounding_report as report  # noqa: E402

benchmark = importlib.import_module("moe-token-rounding")


@pytest.fixture
def arguments(tmp_path):
    where = ["--json", str(tmp_path / "receipt.json"), "--picture", str(tmp_path / "gains.svg")]
    return ["--small", "--device", "cpu", "--repeats", "3", *where]


def content(tmp_path):
    return json.loads((tmp_path / "receipt.json").read_text())


def test_the_grid():
    """Sixteen published shapes and a longer sweep, each once; those with published gains first."""
    shapes = benchmark.grid()
    assert len(shapes) == len(set(map(tuple, shapes))) == 21
    assert [tuple(shape[1:5]) for shape in shapes[:3]] == list(report.PUBLISHED)
    assert all(shape[0] == 16384 and shape[5] == 128 for shape in shapes)
    assert max(shape[3] for shape in shapes) == 1024


def test_variants_agree():
    """With the router and without it a variant computes the same, and its rows are counted."""
    layer = benchmark.Layer([96, 16, 8, 8, 2, 8], "nr", "cpu")
    results = {}
    for variant in layer.variants:
        forward, backward = layer.parts(variant)
        out = forward()
        dx, *_, dw1, dw2 = backward(out) if variant[1] == "with_router" else backward(out)[:-1]
        results[variant] = out.detach(), dw1, dw2
        assert dx.shape == layer.x.shape
    for rule in ("top_k", "nr"):
        for a, b in zip(results[rule, "with_router"], results[rule, "experts"], strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(results["top_k", "experts"][0], results["nr", "experts"][0])
    rows = layer.rows()
    assert rows["top_k"]["rows"] == 96 * 2 and rows["top_k"]["padded_rows"] > 0
    assert rows["nr"]["padded_rows"] == 0 and rows["nr"]["rows"] % 8 == 0


def test_it_goes_on_where_it_was(arguments, tmp_path, capsys, monkeypatch):
    assert benchmark.main([*arguments, "--quick"]) == 0
    (tmp_path / "all.json").write_text((tmp_path / "receipt.json").read_text())
    both = content(tmp_path)["shapes"]
    assert [shape["thiekq"] for shape in both] == list(benchmark.SMALL)

    half = content(tmp_path) | {"shapes": both[:1]}
    (tmp_path / "receipt.json").write_text(json.dumps(half))
    measured = []
    measure = benchmark.measure
    monkeypatch.setattr(
        benchmark,
        "measure",
        lambda shape, options: (measured.append(shape), measure(shape, options))[1],
    )
    assert benchmark.main(arguments) == 0
    assert measured == [benchmark.SMALL[1]] and content(tmp_path)["shapes"][0] == both[0]
    last = content(tmp_path)["shapes"][1]
    assert last["command"].endswith("--repeats 3 --device cpu --thiekq 64,16,8,16,2,8")
    for routing in ("top_k", "nr"):
        for part in report.PARTS:
            assert last["variants"][routing][part]["both_ms"]["median"] > 0
    # Another shape that takes as long would end too late.
    capsys.readouterr()
    (tmp_path / "receipt.json").unlink()
    monkeypatch.setattr(
        benchmark, "measure", lambda *arguments: (time.sleep(0.1), measure(*arguments))[1]
    )
    assert benchmark.main([*arguments, "--minutes", str(0.15 / 60)]) == 0
    assert len(content(tmp_path)["shapes"]) == 1
    assert capsys.readouterr().out.endswith("the next start goes on.\n")


def made(thiekq, rule, rows, times):
    """A report of rows {routing: (rows, padded)} and times {(routing, part): rounds}."""
    variants = {
        name: {"rows": some, "padded_rows": padded}
        | {part: report.times_of(times[name, part]) for part in report.PARTS}
        for name, (some, padded) in rows.items()
    }
    gains = {
        part: report.gains_of(times["top_k", part], times[rule, part]) for part in report.PARTS
    }
    return {"thiekq": thiekq, "rule": rule, "variants": variants, "gains": gains}


def test_numbers_and_picture(tmp_path, capsys):
    fast, slow = [[1.0, 3.0], [1.0, 3.0], [2.0, 6.0]], [[1.5, 3.5], [2.0, 3.0], [3.0, 9.0]]
    times = {
        (r, part): slow if r == "top_k" else fast for r in ("top_k", "nr") for part in report.PARTS
    }
    shapes = [
        made([16384, 1536, 1024, e, 2, 128], "nr", {"top_k": (300, 100), "nr": (320, 0)}, times)
        for e in (128, 64)
    ]
    # Ratios of forward 1.5, 2, 1.5; of backward 7/6, 1, 1.5; of both 1.25, 1.25, 1.5.
    gains = shapes[0]["gains"]["experts"]
    assert gains["forward"] == {"median": pytest.approx(50), "deviation": pytest.approx(0)}
    assert gains["both"]["median"] == pytest.approx(25)
    assert gains["backward"]["median"] == pytest.approx(100 / 6)
    assert shapes[0]["variants"]["top_k"]["experts"]["both_ms"]["median"] == 5.0
    assert report.saved(shapes[0]) == pytest.approx(20)
    receipt, picture = tmp_path / "receipt.json", tmp_path / "gains.svg"
    receipt.write_text(json.dumps({"device": "H100", "shapes": shapes}))
    draw = ["--draw", "--json", str(receipt), "--picture", str(picture)]
    assert benchmark.main(draw) == 0
    lines = capsys.readouterr().out.splitlines()
    row = "20.0 | 5.000 | 4.000 | +25.0 ± 0.0 | +25.0 ± 0.0 |"
    assert lines[2] == f"| 1536, 1024, 64, 2 | nr | {row} – |"
    assert lines[3] == f"| 1536, 1024, 128, 2 | nr | {row} +9.4 |"
    first = picture.read_bytes()
    picture.unlink()
    assert benchmark.main(draw) == 0 and picture.read_bytes() == first


def test_a_timer_of_parts():
    first, second = timers.HostTimer()(lambda: 3, lambda got: sum(range(got * 100_000)))
    assert 0 <= first < second


@pytest.mark.parametrize(
    "more, text",
    [
        (["--draw"], "allowed: a file with shapes that were timed"),
        (["--minutes", "0"], "got '0', allowed: numbers above 0"),
        (["--thiekq", "64,16,8,8,9,8"], "got K = 9, allowed: 1 to E = 8"),
        (["--routing", "ec"], "invalid choice: 'ec'"),
    ],
)
def test_refusals(arguments, more, text, capsys):
    with pytest.raises(SystemExit) as stop:
        benchmark.main([*arguments, *more])
    assert stop.value.code == 2 and text in capsys.readouterr().err


def test_a_receipt_of_another_device(arguments, tmp_path, capsys):
    (tmp_path / "receipt.json").write_text('{"device": "H900", "shapes": []}')
    with pytest.raises(SystemExit):
        benchmark.main(arguments)
    assert "which has another device, versions, library, allowed" in capsys.readouterr().err
