"""What is not allowed, and the exact words that say so."""

import re

import pytest
import torch

from sonicmoe import ActivationType, KernelBackendMoE, MoE, enums, functional, is_glu, reference

T, D, N, E, L = 6, 16, 8, 4, 5
ACTIVATIONS = f"an ActivationType, {enums.allowed_activations()}"


def view(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).permute(1, 2, 0)


def topk_inputs(dtype=torch.float32):
    return {
        "x": torch.randn(T, D, dtype=dtype),
        "router_w": torch.randn(E, D, dtype=dtype),
        "w1": view(E, 2 * N, D, dtype=dtype),
        "b1": None,
        "w2": view(E, D, N, dtype=dtype),
        "b2": None,
        "K": 2,
        "stream_id": 0,
    }


def list_inputs():
    inputs = topk_inputs()
    del inputs["router_w"], inputs["K"]
    return inputs | {
        "router_scores": torch.rand(L),
        "token_indices": torch.arange(L),
        "expert_indices": torch.arange(L),
        "E": E,
    }


TOPK = [
    ({"x": 3}, TypeError, "x: got int, allowed: a tensor"),
    ({"b1": 3}, TypeError, "b1: got int, allowed: a tensor"),
    ({"w1": None}, TypeError, "w1: got NoneType, allowed: a tensor"),
    (
        {"x": torch.ones(T, D).double()},
        TypeError,
        "x: got torch.float64, allowed: torch.float32, torch.bfloat16, torch.float16",
    ),
    (
        {"w1": view(E, 2 * N, D, dtype=torch.bfloat16)},
        TypeError,
        "w1: got torch.bfloat16, allowed: torch.float32, the dtype of x",
    ),
    (
        topk_inputs(torch.float16),
        ValueError,
        "dtype: got f16, allowed: f32, bf16 (on the CPU)",
    ),
    (
        {"w2": view(E, D, N).to("meta")},
        ValueError,
        "w2: got a tensor on meta, allowed: cpu, where x is",
    ),
    ({"x": torch.ones(D)}, ValueError, "x: got shape (16,), allowed: (T, H)"),
    (
        {"x": torch.ones(T, 24)},
        ValueError,
        "w1: got shape (16, 16, 4) with strides (16, 1, 256), allowed: a contiguous (E, 2I, H), or "
        "its view (2I, H, E) by .permute(1, 2, 0), where H is 24, the width of x",
    ),
    (
        {"router_w": torch.ones(3, D)},
        ValueError,
        "router_w: got shape (3, 16), allowed: (E, d) = (4, 16)",
    ),
    (
        {"router_w": torch.ones(E, 2 * D)[:, :D]},
        ValueError,
        "router_w: got strides (32, 1), allowed: a contiguous (E, d)",
    ),
    (
        {"w1": view(E, N, D)},
        ValueError,
        "w1: got shape (4, 8, 16), allowed: (E, 2n, d) = (4, 16, 16)",
    ),
    (
        {"activation_type": ActivationType.RELU},
        ValueError,
        "w1: got shape (4, 16, 16), allowed: (E, n, d) = (4, 8, 16)",
    ),
    (
        {"w1": torch.ones(2 * N, D, E)},
        ValueError,
        "w1: got shape (16, 16, 4) with strides (64, 4, 1), allowed: a contiguous (E, 2I, H), or "
        "its view (2I, H, E) by .permute(1, 2, 0), where H is 16, the width of x; "
        "layout='transposed' or 'transposed_interleaved' takes a contiguous (E, H, 2I)",
    ),
    (
        {"w2": torch.ones(D, N)},
        ValueError,
        "w2: got shape (16, 8) with strides (8, 1), allowed: a contiguous (E, H, I), or its view "
        "(H, I, E) by .permute(1, 2, 0), where H is 16, the width of x",
    ),
    (
        {"w2": view(E, D, 12)},
        ValueError,
        "intermediate: got 12, allowed: multiples of 8 from 8 to 1048576",
    ),
    ({"b1": torch.ones(E, 2 * N)}, ValueError, "b2: got None, allowed: b1 and b2, or neither"),
    ({"b2": torch.ones(E, D)}, ValueError, "b1: got None, allowed: b1 and b2, or neither"),
    (
        {"b1": torch.ones(E, N), "b2": torch.ones(E, D)},
        ValueError,
        "b1: got shape (4, 8), allowed: (E, 2n) = (4, 16)",
    ),
    (
        {"b1": torch.ones(E, 2 * N), "b2": torch.ones(E, N)},
        ValueError,
        "b2: got shape (4, 8), allowed: (E, d) = (4, 16)",
    ),
    ({"K": 0}, ValueError, "K: got 0, allowed: 1 to E (4)"),
    ({"K": 5}, ValueError, "K: got 5, allowed: 1 to E (4)"),
    ({"K": 2.0}, TypeError, "K: got 2.0, allowed: an int"),
    ({"K": True}, TypeError, "K: got True, allowed: an int"),
    (
        {"activation_type": "tanh"},
        ValueError,
        f"activation_type: got 'tanh', allowed: {ACTIVATIONS}",
    ),
    (
        {"activation_type": 3},
        TypeError,
        f"activation_type: got 3, allowed: {ACTIVATIONS}",
    ),
]

LISTS = [
    ({"E": 5}, ValueError, "E: got 5, allowed: 4, the experts of w2"),
    ({"E": 4.0}, TypeError, "E: got 4.0, allowed: an int"),
    (
        {"token_indices": torch.tensor([0, 1, 2, 3, T])},
        ValueError,
        "token_indices: got 6 at position 4, allowed: 0 to 5",
    ),
    (
        {"token_indices": torch.tensor([0, 1, -1, 3, 4]).int()},
        ValueError,
        "token_indices: got -1 at position 2, allowed: 0 to 5",
    ),
    (
        {"token_indices": torch.tensor([0, 2**32, 2, 3, 4])},  # not wrapped around to 0
        ValueError,
        "token_indices: got 4294967296 at position 1, allowed: 0 to 5",
    ),
    (
        {"token_indices": torch.arange(4)},
        ValueError,
        "token_indices: got shape (4,), allowed: (L) = (5,)",
    ),
    (
        {"expert_indices": torch.arange(4)},
        ValueError,
        "expert_indices: got shape (4,), allowed: (L) = (5,)",
    ),
    (
        {"router_scores": torch.rand(L, 1)},
        ValueError,
        "router_scores: got shape (5, 1), allowed: (L)",
    ),
    (
        {"router_scores": torch.arange(L)},
        TypeError,
        "router_scores: got torch.int64, allowed: any floating dtype",
    ),
    (
        {"token_indices": torch.rand(L)},
        TypeError,
        "token_indices: got torch.float32, allowed: torch.int32, torch.int64",
    ),
    ({"expert_indices": [0] * L}, TypeError, "expert_indices: got list, allowed: a tensor"),
    (
        {"router_scores": torch.rand(L, device="meta")},
        ValueError,
        "router_scores: got a tensor on meta, allowed: cpu, where x is",
    ),
]

FLAGS = ("add_bias", "softmax_over_topk", "norm_topk_probs", "concat_layout",
         "gradient_accumulation_fusion")  # fmt: skip
MODULE = [
    *(({name: "no"}, TypeError, f"{name}: got 'no', allowed: True, False") for name in FLAGS),
    (
        {"num_experts_per_tok": 5},
        ValueError,
        "num_experts_per_tok: got 5, allowed: 1 to num_experts (4)",
    ),
    (
        {"num_experts_per_tok": 0},
        ValueError,
        "num_experts_per_tok: got 0, allowed: 1 to num_experts (4)",
    ),
    ({"num_experts": 0}, ValueError, "num_experts: got 0, allowed: 1 to 65536"),
    ({"num_experts": 65537}, ValueError, "num_experts: got 65537, allowed: 1 to 65536"),
    (
        {"hidden_size": 1048584},
        ValueError,
        "hidden_size: got 1048584, allowed: multiples of 8 from 8 to 1048576",
    ),
    (
        {"hidden_size": 12},
        ValueError,
        "hidden_size: got 12, allowed: multiples of 8 from 8 to 1048576",
    ),
    (
        {"intermediate_size": 0},
        ValueError,
        "intermediate_size: got 0, allowed: multiples of 8 from 8 to 1048576",
    ),
    ({"hidden_size": 16.0}, TypeError, "hidden_size: got 16.0, allowed: an int"),
    (
        {"activation_function": "tanh"},
        ValueError,
        f"activation_function: got 'tanh', allowed: {ACTIVATIONS}",
    ),
    (
        {"layout": "separate"},
        ValueError,
        "layout: got 'separate', allowed: 'interleaved', 'concatenated', for c_fc has one weight "
        "(moe_TC_softmax_topk_layer takes two tensors: w1 and w1_up)",
    ),
    (
        {"layout": "transposed"},
        ValueError,
        "layout: got 'transposed', allowed: 'interleaved', 'concatenated'",
    ),
    (
        {"layout": "interleaved", "concat_layout": True},
        ValueError,
        "concat_layout: got True, allowed: False, for layout is 'interleaved'",
    ),
]


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


def names(table):
    return [f"{'+'.join(change) if len(change) < 3 else 'all'}:{m[:40]}" for change, _, m in table]


@pytest.mark.parametrize("change, error, message", TOPK, ids=names(TOPK))
def test_topk_layer(change, error, message):
    functional.moe_TC_softmax_topk_layer(**topk_inputs())
    with refused(error, message):
        functional.moe_TC_softmax_topk_layer(**topk_inputs() | change)


@pytest.mark.parametrize("change, error, message", LISTS, ids=names(LISTS))
def test_lists(change, error, message):
    functional.moe_general_routing_inputs(**list_inputs())
    with refused(error, message):
        functional.moe_general_routing_inputs(**list_inputs() | change)


@pytest.mark.parametrize("change, error, message", MODULE, ids=names(MODULE))
def test_module(change, error, message):
    options = {
        "num_experts": E,
        "num_experts_per_tok": 2,
        "hidden_size": D,
        "intermediate_size": N,
        "activation_function": ActivationType.SWIGLU,
        "add_bias": False,
        "std": 0.02,
    }
    MoE(**options)
    with refused(error, message):
        MoE(**options | change)


def test_reference_refuses_more_experts_than_there_are():
    with refused(ValueError, "K: got 5, allowed: 1 to E (4)"):
        reference.route(torch.randn(3, 4), 5)


@pytest.mark.parametrize("backend", [KernelBackendMoE.sonicmoe, KernelBackendMoE.torch])
def test_module_inputs(backend):
    module = MoE(E, 2, D, N, ActivationType.SWIGLU, False, 0.02)
    with refused(ValueError, "x: got shape (2, 3, 24), allowed: (..., 16)"):
        module(torch.ones(2, 3, 24), backend)
    with refused(ValueError, "x: got shape (), allowed: (..., 16)"):
        module(torch.ones(()), backend)
    with refused(TypeError, "x: got list, allowed: a tensor"):
        module([1.0] * D, backend)


def test_backends():
    module = MoE(E, 2, D, N, ActivationType.SWIGLU, False, 0.02)
    with pytest.raises(ImportError, match="install accelerated-model-architectures"):
        module(torch.ones(T, D), KernelBackendMoE.scattermoe)
    with refused(
        TypeError,
        "kernel_backend_moe: got 'torch', allowed: KernelBackendMoE.sonicmoe, "
        "KernelBackendMoE.torch",
    ):
        module(torch.ones(T, D), "torch")


def test_count_cumsum():
    ids = torch.tensor([1, 2])
    for args, error, message in (
        (([1], 4), TypeError, "x: got list, allowed: a tensor"),
        ((ids.float(), 4), TypeError, "x: got torch.float32, allowed: torch.int32, torch.int64"),
        ((ids, 2.5), TypeError, "E: got 2.5, allowed: an int"),
        ((ids, 0), ValueError, "E: got 0, allowed: 1 to 65536"),
    ):
        with refused(error, message):
            functional.count_cumsum(*args)


def test_switch_loss():
    counts = torch.ones(4, dtype=torch.int32)
    with refused(ValueError, "router_logits: got shape (4,), allowed: (T, E)"):
        functional.switch_loss(torch.ones(4), counts)
    with refused(ValueError, "expert_frequency: got shape (4,), allowed: (E) = (3,)"):
        functional.switch_loss(torch.ones(2, 3), counts)
    types = "torch.float32, torch.bfloat16, torch.float16"
    for logits, frequency, message in (
        (
            torch.ones(2, 4),
            counts.float(),
            "expert_frequency: got torch.float32, allowed: torch.int32",
        ),
        (torch.ones(2, 4), None, "expert_frequency: got NoneType, allowed: a tensor"),
        (None, counts, "router_logits: got NoneType, allowed: a tensor"),
        (torch.ones(2, 4).long(), counts, f"router_logits: got torch.int64, allowed: {types}"),
    ):
        with refused(TypeError, message):
            functional.switch_loss(logits, frequency)


def test_operators_refuse_in_the_same_words():
    forward = torch.ops.sonicmoe.layer_forward
    x, router_w = torch.ones(T, D), torch.ones(E, D)
    w1, w2 = torch.ones(E, 2 * N, D), torch.ones(E, D, N)
    tensors = x, router_w, w1, None, w2, None
    with refused(ValueError, "top_k: got 9, allowed: 1 to experts (4)"):
        forward(*tensors, "top_k=9")
    with refused(ValueError, "activation.limit: got 7, allowed: inf (geglu has no limit)"):
        forward(*tensors, "top_k=2 activation=geglu(limit=7)")
    with refused(ValueError, "top_k: got 'two', allowed: an integer"):
        forward(*tensors, "top_k=two")
    with refused(
        ValueError,
        "layer: got 'topk=2', allowed: KEY=VALUE with a key of layer_fields(): tokens, hidden, ...",
    ):
        forward(*tensors, "topk=2")
    for key, value in (("experts", 4), ("tokens", 0), ("dtype", "bf16"), ("bias", "false")):
        message = f"layer: got {key}, allowed: options, for the other arguments say that"
        with refused(ValueError, message):
            forward(*tensors, f"{key}={value} top_k=2")
    draws = torch.tensor([1, 2])
    with refused(ValueError, "draws: got a tensor, allowed: None, for rounding_tile is 0"):
        forward(*tensors, "top_k=2", draws=draws)
    with refused(ValueError, "draws: got shape (1,), allowed: (seed, offset) = (2,)"):
        forward(*tensors, "top_k=2 rounding_tile=8", draws=draws[:1])
    with refused(ValueError, "draws: got int32, allowed: int64"):
        forward(*tensors, "top_k=2 rounding_tile=8", draws=draws.int())
    message = "allowed: projection, logits with token rounding"
    lists = torch.ones(3), torch.zeros(3).int(), torch.zeros(3).int()
    with refused(ValueError, f"router_input: got lists, {message}"):
        torch.ops.sonicmoe.routed_forward(x, *lists, *tensors[2:], "rounding_tile=8")
    ids = torch.zeros(T, 2).int()
    with refused(ValueError, f"router_input: got ids_and_weights, {message}"):
        torch.ops.sonicmoe.ids_forward(x, ids, torch.ones(T, 2), *tensors[2:], "rounding_tile=8")
    with refused(ValueError, "w1_up: got None, allowed: a tensor, for w1_layout is separate"):
        forward(*tensors, "top_k=2 w1_layout=separate")
    with refused(ValueError, "w1_up: got a tensor, allowed: None, for w1_layout is interleaved"):
        forward(*tensors, "top_k=2", w1_up=w1)
    for name in ("b1_up", "w1_up_main_grad"):
        message = f"{name}: got a tensor, allowed: None, for w1_layout is concatenated"
        with refused(ValueError, message):
            forward(*tensors, "top_k=2 w1_layout=concatenated", **{name: w1})
    message = "router_input: got lists, allowed: projection (other inputs have operators)"
    with refused(ValueError, message):
        forward(*tensors, "router_input=lists")
    with refused(ValueError, "layer: got top_k twice, allowed: once"):
        forward(*tensors, "top_k=2 top_k=2")


def test_activations_are_those_of_the_library():
    """Names, their order and which have a gate, as the library's own refusals tell them."""
    forward = torch.ops.sonicmoe.layer_forward
    x, router_w, w2 = torch.ones(T, D), torch.ones(E, D), torch.ones(E, D, N)

    def refusal(w1, activation):
        with pytest.raises(ValueError) as error:
            forward(x, router_w, w1, None, w2, None, f"top_k=2 activation={activation}")
        return str(error.value)

    w1 = torch.ones(E, 3 * N, D)
    names = ", ".join(a.value for a in ActivationType)
    assert refusal(w1, "tanh") == f"activation: got 'tanh', allowed: {names}"
    for activation in ActivationType:
        gated = "(E, 2n, d)" in refusal(w1, activation.value)
        assert gated == is_glu(activation), activation


@pytest.mark.parametrize(
    "text",
    ["swiglu()", "swiglu(limit=7", "swiglu(limit= 7)", "swiglu(limit=7,limit=7)", "swiglu(alpha=2)",
     "geglu(limit=7)", "swiglu(limit=1e99)", "swiglu(limit=1_0)", "swiglu(limit=+7)", "swiglu(7)",
     "swiglu(limit=7)x", "swiglu(limit=x)", "Swiglu(limit=7)", "(limit=7)", ""],
)  # fmt: skip
def test_texts_that_are_no_activation(text):
    with refused(ValueError, f"activation_function: got {text!r}, allowed: {ACTIVATIONS}"):
        MoE(4, 2, D, N, text, False, 0.1)
    with refused(ValueError, f"activation_type: got {text!r}, allowed: {ACTIVATIONS}"):
        functional.moe_TC_softmax_topk_layer(**topk_inputs(), activation_type=text)


@pytest.mark.parametrize(
    "text, message",
    [
        ("swiglu(limit=0)", "limit: got 0, allowed: numbers above 0, or inf"),
        ("swiglu_clamp_after(limit=-inf)", "limit: got -inf, allowed: numbers above 0, or inf"),
        ("swiglu_oai(alpha=1,limit=nan)", "limit: got nan, allowed: numbers above 0, or inf"),
        ("swiglu_oai(alpha=inf)", "alpha: got inf, allowed: finite numbers"),
        ("situ_glu(alpha=0)", "alpha: got 0, allowed: finite numbers above 0"),
        ("situ_glu(beta=-1)", "beta: got -1, allowed: finite numbers above 0"),
    ],
)
def test_parameters_that_are_not_allowed(text, message):
    """In Python's words and in the library's, which are the same."""
    with refused(ValueError, f"activation_type.{message}"):
        functional.moe_TC_softmax_topk_layer(**topk_inputs(), activation_type=text)
    tensors = torch.ones(T, D), torch.ones(E, D), torch.ones(E, 2 * N, D), None, torch.ones(E, D, N)
    with refused(ValueError, f"activation.{message}"):
        torch.ops.sonicmoe.layer_forward(*tensors, None, f"top_k=2 activation={text}")


def test_compiled_code_refuses_too():
    torch._dynamo.reset()
    compiled = torch.compile(functional.moe_TC_softmax_topk_layer, backend="aot_eager")
    inputs = topk_inputs() | {"b1": torch.ones(E, N), "b2": torch.ones(E, D)}
    with refused(ValueError, "b1: got shape (4, 8), allowed: (E, 2n) = (4, 16)"):
        compiled(**inputs)
