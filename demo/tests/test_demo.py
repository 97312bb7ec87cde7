"""The demo at tiny sizes: its options, its checks (also red), Ctrl-C, and what it measures."""

import math
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import report
import torch
import training
from corpus import CorpusError, held_out_batches, load_corpus, training_batches, unigram_entropy
from model import ByteModel
from train import make_variants
from training import Curve, Settings, Variant

TRAIN = Path(__file__).resolve().parents[1] / "train.py"
TINY = Settings(
    steps=3, batch=2, context=16, hidden=16, heads=2, intermediate=8, warmup=2, held_out_windows=4
)


class NeverStop:
    def check(self):
        pass


@pytest.fixture
def text(tmp_path):
    words = random.Random(0).choices(["alpha", "beta", "gamma", "delta\n"], k=4000)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(words))
    return path


def command(*options, **kwargs):
    return subprocess.run(
        [sys.executable, TRAIN, *map(str, options)], capture_output=True, text=True, **kwargs
    )


def train_tiny(variant, text, settings=TINY):
    curve = Curve(variant)
    corpus = load_corpus(text, settings.context)
    training.train(
        curve, settings, corpus, torch.device("cpu"), NeverStop(), progress=lambda curve: None
    )
    return curve


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "argument --steps: '0' is not a whole number >= 1"),
        (["--steps", "many"], "argument --steps: 'many' is not a whole number >= 1"),
        (["--seed", "-1"], "argument --seed: '-1' is not a whole number >= 0"),
        (["--backend", "other"], "argument --backend: invalid choice: 'other'"),
        (["--text", "/no/such/place"], "--text /no/such/place: no such file or folder"),
        (["--device", "abacus"], "--device abacus: "),
    ],
)
def test_bad_options_are_one_line(options, message):
    result = command(*options)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"train.py: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"", b"\x00\x01\x02" * 999, b"\xff\xfe" * 999, b"hi"])
def test_a_folder_without_enough_text_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    with pytest.raises(CorpusError, match=f"--text {re.escape(str(tmp_path))}: ") as caught:
        load_corpus(tmp_path, context=16)
    assert "\n" not in str(caught.value)


def test_no_more_is_read_than_asked_for(text):
    corpus = load_corpus(text, context=16, max_bytes=1000)
    assert (len(corpus.train), len(corpus.held_out)) == (900, 100)


def test_files_are_held_out_whole(tmp_path):
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([65 + i]) * 100)
    corpus = load_corpus(tmp_path, context=16)
    held_out = {65 + 9, 65 + 19}
    assert set(corpus.held_out.tolist()) == held_out
    assert set(corpus.train.tolist()) == {65 + i for i in range(20)} - held_out


def test_batches_repeat_and_targets_are_one_ahead(text):
    corpus = load_corpus(text, context=16)
    first, again, other = (training_batches(corpus.train, 16, 2, seed) for seed in (0, 0, 1))
    inputs, targets = next(first)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs, next(again)[0])
    assert not torch.equal(inputs, next(other)[0])


def test_unigram_entropy_of_a_fair_pair():
    held_out = held_out_batches(torch.tensor([0, 1] * 64, dtype=torch.uint8), 16, 2, 4)
    assert unigram_entropy(held_out) == pytest.approx(math.log(2))


def test_backends_start_alike_and_agree(text):
    curves = [train_tiny(variant, text) for variant in make_variants("both")]
    assert [curve.variant.name for curve in curves] == ["sonicmoe", "rounded", "torch"]
    agree = report.make_checks(curves, entropy=0.0)[0]
    assert "agree over 3 steps" in agree.what
    assert agree.passed
    assert agree.figure < 1e-5


def test_curves_that_differ_fail_the_check(text):
    ours, _, plain = make_variants("both")
    wrong = Variant("wrong", lambda moe, x: ours.run_moe(moe, 1.5 * x), same_as=plain.name)
    settings = replace(TINY, steps=20, learning_rate=0.1)
    curves = [train_tiny(variant, text, settings) for variant in (plain, wrong)]
    assert not report.make_checks(curves, entropy=0.0)[0].passed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_checks_fail_on_what_is_not_a_number(bad):
    ours, _, plain = make_variants("both")
    curves = [
        Curve(v, train_loss=[3.0, loss], held_out_loss=[(2, loss)], loss_without_experts=loss)
        for v, loss in ((ours, bad), (plain, bad))
    ]
    assert not any(check.passed for check in report.make_checks(curves, entropy=3.0))


def test_kept_bytes_count_storages_once_and_no_parameters():
    model = torch.nn.Linear(4, 3, bias=False)
    x = torch.ones(5, 4)

    def forward():
        return (model(x) + model(x[:2]).sum()).exp()  # x twice, once as a view; the exponential

    kept, by_moe = training.measure_kept_bytes(model, forward)
    assert kept == 4 * (5 * 4 + 5 * 3)
    assert by_moe == 0


def test_our_layer_keeps_only_x_h_and_routing():
    model = ByteModel(TINY, {})
    tokens = torch.zeros(2, TINY.context, dtype=torch.long)
    ours, _, plain = (
        training.measure_kept_bytes(model, lambda v=v: model(tokens, v.run_moe))
        for v in make_variants("both")
    )
    t, e = tokens.numel(), TINY.experts
    rows = t * TINY.top_k
    x_and_h = 4 * t * TINY.hidden + 4 * rows * 2 * TINY.intermediate
    routing = 24 * rows + 8 * (e + 1) + 4 * (t + 1)
    aux_loss = 4 * t * e + 4 * e  # it needs the logits and the counts
    assert TINY.layers * x_and_h < ours[1] <= TINY.layers * (x_and_h + routing + aux_loss)
    assert ours[1] < plain[1]
    assert ours[0] < plain[0]


def test_zeroed_experts_come_back(text):
    model = ByteModel(TINY, {})
    variant = make_variants("torch")[0]
    moe, x = model.blocks[0].moe, torch.randn(2, 16, TINY.hidden)
    with training.experts_zeroed(model):
        assert variant.run_moe(moe, x)[0].abs().max() == 0
    assert variant.run_moe(moe, x)[0].abs().max() > 0


def test_a_short_run_reports_and_its_checks_turn_red(text, tmp_path):
    out = tmp_path / "out"
    result = command("--text", text, "--steps", 2, "--device", "cpu", "--out", out)
    assert result.returncode == 1, result.stderr
    assert "ok   torch and sonicmoe agree over 2 steps" in result.stdout
    assert "FAIL sonicmoe: nats below the byte-unigram entropy" in result.stdout
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_ends_with_what_there_is(text, tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, TRAIN, "--text", text, "--steps", "100000", "--out", out],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TQDM_MININTERVAL": "0"},
    ) as process:
        seen = ""
        while "loss=" not in seen:  # a step has been made
            piece = process.stderr.read(1)
            assert piece, seen
            seen += piece
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert re.search(r"^sonicmoe +[1-9]", stdout, re.MULTILINE), stdout
    assert "Interrupted" in stdout
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_rounding_trains_other_routing_and_evaluates_the_same():
    ours, rounded, _ = make_variants("both")
    torch.manual_seed(0)
    model = ByteModel(replace(TINY, experts=4), {**rounded.moe_options, "tile": 16})
    tokens = torch.randint(256, (2, TINY.context))
    plain = ByteModel(replace(TINY, experts=4), ours.moe_options)
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(model(tokens, rounded.run_moe)[0], plain(tokens, ours.run_moe)[0])
    model.eval()
    assert torch.equal(model(tokens, rounded.run_moe)[0], plain(tokens, ours.run_moe)[0])
