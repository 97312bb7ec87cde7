"""Full-width layers on a GPU: published configurations, and shapes that models ship with.

Judged like benchmarks/moe-cute.py judges itself: at most twice the error of plain PyTorch in the same
type, both against fp64, or fp32 where fp64 does not fit.
"""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import NEEDS_HOPPER

from sonicmoe import ActivationType

pytestmark = NEEDS_HOPPER
ROOT = Path(__file__).parents[2]
SWIGLU = ActivationType.SWIGLU
PUBLISHED = {
    f"{size}-n{n}": (tokens, hidden, n, experts, top_k)
    for size, tokens, hidden, widths in (
        ("1.4B", 40960, 768, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("7B", 24576, 1536, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("30B", 32768, 4096, ((256, 256, 16), (512, 128, 8), (1024, 64, 4))),
        ("120B", 32768, 4096, ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))),
    )
    for n, experts, top_k in widths
}
# d, n, E, K, activation, router (softmax over top-K, renormalised), biases
MODELS = {
    "Mixtral-8x7B": (4096, 14336, 8, 2, SWIGLU, (False, True), False),
    "OLMoE-1B-7B": (2048, 1024, 64, 8, SWIGLU, (False, False), False),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 60, 4, SWIGLU, (False, False), False),
    "Qwen2-57B-A14B": (3584, 2560, 64, 8, SWIGLU, (False, False), False),
    "Qwen3-30B-A3B": (2048, 768, 128, 8, SWIGLU, (False, True), False),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8, SWIGLU, (False, True), False),
    "Qwen3-Next-80B-A3B": (2048, 512, 512, 10, SWIGLU, (False, True), False),
    "DeepSeek-V2": (5120, 1536, 160, 6, SWIGLU, (False, False), False),
    "Moonlight": (2048, 1408, 64, 6, SWIGLU, (False, True), False),
    "gpt-oss-20b": (2880, 2880, 32, 4, SWIGLU, (True, False), True),
    "GLM-4.7-Flash": (2048, 1536, 64, 4, SWIGLU, (False, True), False),
    "MiniMax-M2": (3072, 1536, 256, 8, SWIGLU, (False, True), False),
    "Granite-3.0-3B": (1536, 512, 40, 8, SWIGLU, (True, False), False),
    "Nemotron-3-Nano": (2688, 1856, 128, 6, ActivationType.RELU_SQ, (False, True), False),
    "Gemma-4-26B-A4B": (2816, 704, 128, 8, ActivationType.GEGLU_TANH, (False, True), False),
}


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # what it imports
    spec = importlib.util.spec_from_file_location("moe_cute", ROOT / "benchmarks" / "moe-cute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(bench, thiek, activation=SWIGLU, router=(True, False), bias=False, dtype="bf16"):
    torch.cuda.empty_cache()
    options = SimpleNamespace(
        thiek=list(thiek),
        activation=activation,
        dtype=dtype,
        topk_over_softmax=not router[0],
        norm_topk_probs=router[1],
        concat_layout=activation is not SWIGLU,
        add_bias=bias,
        seed=0,
    )
    leaves = bench.make_leaves(options)
    dout = (torch.randn(thiek[0], thiek[1], device="cuda") * 0.2).to(bench.DTYPES[dtype])
    assert bench.check(leaves, dout, options, {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(bench, name):
    judge(bench, PUBLISHED[name])


@pytest.mark.parametrize("name", MODELS)
def test_models(bench, name):
    hidden, intermediate, experts, top_k, activation, router, bias = MODELS[name]
    dtype = "fp16" if experts == 64 else "bf16"
    judge(bench, (2048, hidden, intermediate, experts, top_k), activation, router, bias, dtype)
