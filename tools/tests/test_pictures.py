"""tools/pictures.py, and the benchmarks whose receipts it draws."""

import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tools"), str(ROOT / "cli" / "tests")]
import activation_memory  # noqa: E402
import grouped_mm  # noqa: E402
import pictures  # noqa: E402
import tool  # noqa: E402


def receipt(name):
    return json.loads((ROOT / "receipts" / f"{name}.json").read_text())


def test_activation_memory_is_what_plans_say():
    """The receipt; n K and n E are constant; the input and the pre-activation are 2Td + 4TKn."""
    made = activation_memory.measure(Path(tool.BINARY))
    assert made == receipt("activation_memory")
    kept = {}
    for row in made["rows"]:
        tokens, hidden, n, experts, top_k = row["thiek"]
        assert (n * top_k, n * experts) == (4096, 65536)
        kept[n, row["recompute"]] = row["bytes"] - 2 * tokens * hidden
    assert sorted({n for n, _ in kept}) == [128, 256, 512, 1024, 2048]
    routing = 2 * 32768 * 512 + 24 * 32768 * 32 + 4 * (2 * 512 + 1) + 4 * (32768 + 1)
    for n in (128, 256, 512, 1024, 2048):
        assert kept[n, "none"] - kept[n, "preact"] == 4 * 32768 * 4096
        assert 0 < kept[n, "preact"] <= routing


def test_the_same_bytes_and_every_receipt_in_them():
    first = pictures.activation_memory(receipt("activation_memory"))
    assert first == pictures.activation_memory(receipt("activation_memory"))
    h200, beside = receipt("h200"), receipt("grouped_mm")
    drawn = pictures.throughput(h200, beside)
    assert drawn == pictures.throughput(h200, beside)
    assert [row["config"] for row in beside["rows"]] == list(grouped_mm.published())
    for row in beside["rows"][::11]:
        for name in row:
            if name.endswith("_tflops"):
                changed = [row | {name: 1.0} if other is row else other for other in beside["rows"]]
                assert pictures.throughput(h200, beside | {"rows": changed}) != drawn, name


def test_grouped_mm_computes_the_same(tmp_path, capsys):
    file = tmp_path / "grouped_mm.json"
    some = ["--device", "cpu", "--repeats", "2", "--json", str(file), "--thiek", "64,16,8,4,2"]
    assert grouped_mm.main(some) == 0
    (row,) = json.loads(file.read_text())["rows"]
    flops = 12 * 64 * 2 * 16 * 8
    ms = row["grouped_mm_backward_ms"]
    assert row["grouped_mm_backward_tflops"] == pytest.approx(flops / ms * 1e-9)
    assert capsys.readouterr().out.startswith("64,16,8,4,2 ")
    assert grouped_mm.main(some) == 0 and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        grouped_mm.main([*some, "--repeats", "3"])
    assert "which has another command, allowed" in capsys.readouterr().err
    layer = grouped_mm.Layer([64, 16, 8, 4, 2], "cpu")
    layer.sides["grouped_mm"] = lambda: 1.1 * layer.torchs()
    with pytest.raises(SystemExit, match="out: the sides differ by"):
        layer.check()
    assert torch.equal(layer.ours(), layer.ours())
