"""What the tests share: one layer's data, the same computation by plain PyTorch, comparisons."""

from dataclasses import dataclass, fields

import pytest
import torch
import torch.nn.functional as F

from sonicmoe import ActivationType, functional, is_glu, reference
from sonicmoe._check import TRANSPOSED_LAYOUTS, W1_LAYOUTS
from sonicmoe._ops import layer_text, router_options

#: pytestmark of tests on a GPU.
NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]


def activation_layouts(*activations, layouts=W1_LAYOUTS):
    """Each activation in those of the layouts that it has: "separate" is for a gate."""
    return [(a, name) for a in activations for name in layouts if is_glu(a) or name != "separate"]


#: An activation with a gate and one without, each in the layouts that it has.
ACTIVATION_LAYOUTS = activation_layouts(ActivationType.SWIGLU, ActivationType.GELU_TANH)

#: The layouts with the same order of gate and up, whose weights lie the other way round.
UNTRANSPOSED = {"transposed": "concatenated", "transposed_interleaved": "interleaved"}

#: Options of the operators: top-K over the softmax of all experts' logits.
OVER_SOFTMAX = "router_order=score_then_select"


def router_text(k: int, router: str) -> str:
    """The options of the operators for one of ROUTERS."""
    return layer_text(top_k=k, **router_options(*ROUTERS[router]))


ROUTERS = {
    "softmax_over_topk": (True, False),
    "topk_over_softmax": (False, False),
    "topk_over_softmax_norm": (False, True),
}


@dataclass
class Layer:
    """Leaf tensors of one layer, weights as they are stored: (E, out, in), or (E, in, out)."""

    x: torch.Tensor
    router_w: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor | None
    w2: torch.Tensor
    b2: torch.Tensor | None
    w1_up: torch.Tensor | None = None  # then w1 and b1 are the gate
    b1_up: torch.Tensor | None = None

    def leaves(self) -> dict[str, torch.Tensor]:
        """Fresh leaves by name, for gradients of one run."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v.detach().requires_grad_() for k, v in tensors.items() if v is not None}

    def to(self, dtype: torch.dtype) -> "Layer":
        return Layer(*(None if t is None else t.to(dtype) for t in vars(self).values()))


def make_layer(
    activation=ActivationType.SWIGLU,
    bias=False,
    dtype=torch.float32,
    tokens=48,
    hidden=24,
    intermediate=16,
    experts=6,
    layout="interleaved",
) -> Layer:
    """Unit-scale data: h, a and y are of order one, so that no term hides behind another."""

    def normal(*shape, scale=1.0):
        return (torch.randn(shape) * scale).to(dtype)

    def weights(out, in_):
        shape = (in_, out) if layout in TRANSPOSED_LAYOUTS else (out, in_)
        return normal(experts, *shape, scale=in_**-0.5)

    width = 2 * intermediate if is_glu(activation) and layout != "separate" else intermediate
    layer = Layer(
        x=normal(tokens, hidden),
        router_w=normal(experts, hidden, scale=hidden**-0.5),
        w1=weights(width, hidden),
        b1=normal(experts, width) if bias else None,
        w2=weights(hidden, intermediate),
        b2=normal(experts, hidden) if bias else None,
    )
    if layout == "separate":
        layer.w1_up = weights(width, hidden)
        layer.b1_up = normal(experts, width) if bias else None
    return layer


def permuted(weights: torch.Tensor) -> torch.Tensor:
    return weights.permute(1, 2, 0)


def stored(weights: torch.Tensor) -> torch.Tensor:
    return weights


def turned(tensors):
    """Copies by name, with w1 and w2, or dw1 and dw2, the other way round; leaves stay leaves."""
    copies = {}
    for name, value in tensors.items():
        copy = value.detach().clone()
        copy = copy.mT.contiguous() if name.endswith(("w1", "w2")) else copy
        copies[name] = copy.requires_grad_(value.requires_grad)
    return copies


#: What callers make of weights as they are stored.
FORMS = {"stored": stored, "view": permuted}


def run(layer, k, activation, router, layout="interleaved", form=permuted):
    """(o, logits, counts, leaves) of the library."""
    leaves = layer.leaves()
    up = {}
    if layout == "separate":
        up = {"w1_up": form(leaves["w1_up"]), "b1_up": leaves.get("b1_up")}
    o, logits, counts = functional.moe_TC_softmax_topk_layer(
        leaves["x"],
        leaves["router_w"],
        form(leaves["w1"]),
        leaves.get("b1"),
        form(leaves["w2"]),
        leaves.get("b2"),
        k,
        activation_type=activation,
        is_softmax_over_topk=ROUTERS[router][0],
        norm_topk_probs=ROUTERS[router][1],
        layout=layout,
        **up,
    )
    return o, logits, counts, leaves


def run_plain(layer, ids, activation, router, layout="interleaved"):
    """The same by PyTorch in the layer's dtype, for experts that are chosen already: ids (T, K).

    In fp64, the exact answer to whatever rounding decided the choice.
    """
    leaves = layer.leaves()
    logits = F.linear(leaves["x"], leaves["router_w"])
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    over_topk, norm = ROUTERS[router]
    if over_topk:
        scores = wide.gather(1, ids).softmax(1)
    else:
        scores = wide.softmax(1).gather(1, ids)
        if norm:
            scores = scores / scores.sum(1, keepdim=True)
    tokens = torch.arange(len(ids)).repeat_interleave(ids.shape[1])
    o, counts = reference.routed_layer(
        leaves["x"],
        scores.flatten(),
        tokens,
        ids.flatten(),
        leaves["w1"],
        leaves.get("b1"),
        leaves["w2"],
        leaves.get("b2"),
        activation,
        layout=layout,
        w1_up=leaves.get("w1_up"),
        b1_up=leaves.get("b1_up"),
    )
    return o, logits, counts, leaves


def at_odd_address(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that starts one element behind a multiple of 16 bytes, as a part of a tensor may."""
    odd = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)
    assert odd.data_ptr() % 16 != 0 and odd.is_contiguous()
    return odd


def everything_of(call, moe, x, dout):
    """Output, loss and gradients of the module `moe`, called as `call`."""
    leaf = x.detach().requires_grad_()
    o, aux_loss = call(leaf)
    leaves = [leaf, *moe.parameters()]
    gradients = torch.autograd.grad((o, aux_loss), leaves, (dout, torch.ones_like(aux_loss)))
    return o.detach(), aux_loss.detach(), *gradients


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got.double() - exact.double()).norm().item()


def assert_as_good(name: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """At most twice the error of the plain computation in the same dtype.

    Tensors here are small and some plain results are exact by luck, so one unit in the last place
    of the storage type, relative to the whole tensor, is allowed in any case: that is less than
    the error of one rounding of each element, twice.
    """
    limit = 2 * error(plain, exact) + torch.finfo(ours.dtype).eps * exact.norm().item()
    assert ours.dtype == plain.dtype and ours.shape == plain.shape, name
    assert error(ours, exact) <= limit, f"{name}: error {error(ours, exact)}, limit {limit}"


def kept_bytes(function, parameters):
    """Storages that autograd packs while function() runs, parameters apart, and its result."""
    storages = {}
    own = {p.untyped_storage().data_ptr() for p in parameters}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sorted(storages.values()), result


def assert_close(got, want):
    """Dictionaries of the same tensors, but for sums in another order: each side has rounded each
    element once, by eps of it at most."""
    assert got.keys() == want.keys()
    for name in got:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape, name
        eps = torch.finfo(got[name].dtype).eps if got[name].is_floating_point() else 0
        limit = 2 * eps * want[name].double().norm().item()
        assert error(got[name], want[name]) <= limit, name


def assert_same(got, want):
    """Dictionaries of the same tensors, bit for bit."""
    assert got.keys() == want.keys()
    for name in got:
        assert torch.equal(got[name], want[name]), name
