"""The functional interface, call-compatible with the original SonicMoE; and the experts alone.

Symbols: T tokens, H hidden size (d in the documents), I intermediate size (n), E experts, K experts
a token, L list length, R rows.

Tensors have one dtype: float32 or bfloat16 on the CPU, bfloat16 or float16 on CUDA; H and I are
multiples of 8. Ids and counts are int32 or int64, scores and weights of tokens any float dtype.
Autocast of x's device casts x and weights. All calls differentiate once.

ValueError is for a value, shape, layout or content that is not allowed, TypeError for a type or
dtype, RuntimeError for a missing extension, NotImplementedError for vmap, forward mode and second
derivatives; the text is "argument: got value, allowed: values". A NaN or +inf logit makes its
token's output NaN. CUDA skips ids out of range.

Weights come as frameworks store them: contiguous w1 (E, 2I, H) and w2 (E, H, I), or (E, I, H) for
an activation without a gate; biases b1 (E, 2I or I) and b2 (E, H). Each weight may also be the view
`.permute(1, 2, 0)` of such a tensor, which the original takes: (2I, H, E) or (I, H, E), (H, I, E).
H, the width of x, and the strides tell which. Gradients have the weight's form; nothing is copied.

`layout` says how w1 and b1 hold gate and up, and which way the weights lie:

- "interleaved", the default: rows g0, u0, g1, u1, ...
- "concatenated", or `concat_layout=True` as in the original: rows g0, g1, ..., u0, u1, ...
- "separate", which giving w1_up selects: w1 (E, I, H) and b1 (E, I) are the gate, w1_up (E, I, H)
  and b1_up (E, I) the up rows.
- "transposed": w1 (E, H, 2I or I), with columns g0, g1, ..., u0, u1, ..., and w2 (E, I, H).
- "transposed_interleaved": w1 (E, H, 2I or I), with columns g0, u0, g1, u1, ..., and w2 (E, I, H).

The layout alone decides where a square weight fits both ways. The view of a transposed w1 is
(H, 2I, E) or (H, I, E), that of w2 (I, H, E).

`recompute="preact"` keeps no pre-activation of the experts. Backward computes it again, by one more
up projection, with the same bits. "none", the default, keeps it.

`stream_id` is accepted and the current stream is used.
"""

import torch

from . import _autograd, _check, _layer, _ops, reference_routing
from ._main_grad import MainGrads
from .enums import ActivationType, is_glu
from .router import RouterConfig, Routing, checked_routing, resolve


def _expert_args(
    x: torch.Tensor,
    activation: ActivationType | str,
    layout: str | None,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    w1_main_grad: torch.Tensor | None,
    w2_main_grad: torch.Tensor | None,
    w1_up: torch.Tensor | None,
    b1_up: torch.Tensor | None,
    w1_up_main_grad: torch.Tensor | None,
    recompute: str,
    *,
    activation_name: str = "activation",
    concat_layout: bool = False,
    inference: bool = False,
    x_name: str = "x",
    x_shape: str = "(T, H)",
) -> _layer.ExpertArgs:
    """Checks activation, layout and forms of the weights, which it takes as they are stored."""
    kind = _check.activation(activation_name, activation)
    layout = _check.w1_layout(
        layout, concat_layout, kind, w1_up, b1_up=b1_up, w1_up_main_grad=w1_up_main_grad
    )
    hidden = _check.width(x_name, x, x_shape)
    w1_width = "2I" if layout != "separate" and is_glu(kind) else "I"
    w1_form = w1_width, "H", layout, hidden, x_name
    w2_form = "H", "I", layout, hidden, x_name
    return _layer.ExpertArgs(
        w1=_check.expert_weights("w1", w1, *w1_form),
        b1=b1,
        w2=_check.expert_weights("w2", w2, *w2_form),
        b2=b2,
        activation=kind,
        is_inference_mode=inference,
        layout=layout,
        w1_main_grad=_check.optional_weights("w1_main_grad", w1_main_grad, *w1_form),
        w2_main_grad=_check.optional_weights("w2_main_grad", w2_main_grad, *w2_form),
        w1_up=_check.optional_weights("w1_up", w1_up, *w1_form),
        b1_up=b1_up,
        w1_up_main_grad=_check.optional_weights("w1_up_main_grad", w1_up_main_grad, *w1_form),
        recompute=_check.recompute("recompute", recompute),
    )


def moe_TC_softmax_topk_layer(
    x: torch.Tensor,
    router_w: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    K: int,
    stream_id: int = 0,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
    *,
    layout: str | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    recompute: str = "none",
    router: RouterConfig | str | None = None,
    logit_bias: torch.Tensor | None = None,
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each token picks its K experts: output (T, H), router logits (T, E), frequency (E) int32.

    x (T, H), router_w (E, H), weights and biases as above; all biases or none. Gradients reach all
    of them, also from a loss on the logits. See :class:`sonicmoe.MoE` for the options.

    `router`, a :class:`sonicmoe.RouterConfig` or the name of a preset, takes the place of
    `is_softmax_over_topk` and `norm_topk_probs`. `logit_bias`, `selection_bias` and `expert_scale`
    (E) float32 are given with its options of those names, and else not. All but `selection_bias`
    have gradients. router_w may be float32 beside a 16-bit x: then the logits are float32 too.

    Backward adds the gradients of w1, w2 and w1_up to the fp32 tensors w1_main_grad, w2_main_grad
    and w1_up_main_grad, which have either form of their weight, and the weights get none.
    """
    experts = _expert_args(
        x, activation_type, layout, w1, b1, w2, b2, w1_main_grad, w2_main_grad,
        w1_up, b1_up, w1_up_main_grad, recompute,
        activation_name="activation_type", concat_layout=concat_layout,
        inference=is_inference_mode_enabled,
    )  # fmt: skip
    config = resolve(
        router, is_softmax_over_topk, norm_topk_probs, ("is_softmax_over_topk", "norm_topk_probs")
    )
    routing = checked_routing(
        config, logit_bias=logit_bias, selection_bias=selection_bias, expert_scale=expert_scale
    )
    return _layer.topk_layer(x, router_w, K, routing, *experts)


def moe_general_routing_inputs(
    x: torch.Tensor,
    router_scores: torch.Tensor,
    token_indices: torch.Tensor,
    expert_indices: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    E: int | None = None,
    stream_id: int = 0,
    activation_type: ActivationType | str = ActivationType.SWIGLU,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
    *,
    layout: str | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    recompute: str = "none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The caller routes, with lists of length L: output (T, H) and frequency (E) int32.

    Token `token_indices[i]` goes to expert `expert_indices[i]` with weight `router_scores[i]`
    (any float dtype, raised to fp32; differentiable). Lists may be in any order; duplicates add;
    an expert index below 0 or from E on is a sentinel that contributes nothing. `E` may be left
    out.
    Weights, biases and `main_grad` tensors as above.
    """
    experts = _expert_args(
        x, activation_type, layout, w1, b1, w2, b2, w1_main_grad, w2_main_grad,
        w1_up, b1_up, w1_up_main_grad, recompute,
        activation_name="activation_type", concat_layout=concat_layout,
        inference=is_inference_mode_enabled,
    )  # fmt: skip
    if E is not None:
        _check.integer("E", E)
        if E != experts.w2.shape[0]:
            raise ValueError(f"E: got {E!r}, allowed: {experts.w2.shape[0]}, the experts of w2")
    return _layer.routed_layer(x, router_scores, token_indices, expert_indices, *experts)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    recompute: str = "none",
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer whose router is the caller's: output (T, H) and frequency (E) int32.

    Token t of x (T, H) goes to the experts `ids[t]` with the weights `weights[t]`, both (T, K) with
    K from 1 to E. `ids` are int32 or int64; those below 0 or from E on are sentinels: not counted,
    their contribution and gradient zero. Duplicates add. `weights`, of any float dtype, are raised
    to fp32; their gradient comes back in their dtype. Frequency counts the tokens of each expert.

    Weights, biases, layouts and `main_grad` tensors as above.
    """
    of_experts = _expert_args(
        x, activation, layout, w1, b1, w2, b2, w1_main_grad, w2_main_grad,
        w1_up, b1_up, w1_up_main_grad, recompute,
    )  # fmt: skip
    return _layer.experts(x, ids, weights, *of_experts)


def experts_from_logits(
    x: torch.Tensor,
    logits: torch.Tensor,
    K: int,
    w1: torch.Tensor,
    w2: torch.Tensor,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    ids: torch.Tensor | None = None,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str | None = None,
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    recompute: str = "none",
    router: RouterConfig | str | None = None,
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer that scores the caller's logits (T, E): output (T, H) and frequency (E) int32.

    Each token goes to the K experts that its logits choose, or to those of `ids` (T, K): int32 or
    int64, sentinels and duplicates as in :func:`experts`. The softmax over the top-K runs over the
    K logits of a token's experts, without those of sentinels. Logits have the dtype of x or are
    float32, and their gradient too; autocast casts those that have the dtype of x. A NaN or +inf
    makes its token's output NaN; so does, with a softmax, a row of -inf, and with ids and the softmax over the top-K, a token whose experts all
    have -inf. See :class:`sonicmoe.MoE` for the options.

    `router`, `selection_bias` and `expert_scale` as in :func:`moe_TC_softmax_topk_layer`. The
    options `logit_bias` and `logits` change nothing, for the logits are there. With `ids` nothing
    is chosen, so that there is no `selection_bias`, and `groups` change nothing.

    Weights, biases, layouts and `main_grad` tensors as above.
    """
    of_experts = _expert_args(
        x, activation, layout, w1, b1, w2, b2, w1_main_grad, w2_main_grad,
        w1_up, b1_up, w1_up_main_grad, recompute,
    )  # fmt: skip
    config = resolve(router, softmax_over_topk, norm_topk_probs)
    routing = _of_logits(config, ids is None, selection_bias, expert_scale)
    return _layer.logits_layer(x, logits, ids, K, routing, *of_experts)


def with_main_grad(weight: torch.nn.Parameter) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A weight as the calls here take it, and the `main_grad` that they add its gradient to.

    Backward sets the weight's `grad_added_to_main_grad`, where it has that. Its hooks then get an
    uninitialized tensor, so that they run as for any gradient (Megatron's DDP needs them to).
    Without this call they get None. A frozen weight has no main_grad.
    """
    if getattr(weight, "overwrite_main_grad", False):
        raise ValueError(
            "weight.overwrite_main_grad: got True, allowed: False; zero main_grad before backward"
        )
    main_grads = MainGrads(w=("weight", weight))
    return main_grads.weights[0], main_grads.named.get("w_main_grad")


def _of_logits(
    config: RouterConfig,
    chooses: bool,
    selection_bias: torch.Tensor | None,
    expert_scale: torch.Tensor | None,
) -> Routing:
    """Of logits that are there, with all that was added to them."""
    routing = checked_routing(config, expert_scale=expert_scale)
    if chooses:
        return checked_routing(config, selection_bias=selection_bias)._replace(
            expert_scale=expert_scale
        )
    if selection_bias is not None:
        raise ValueError("selection_bias: got a tensor, allowed: None, for ids are given")
    return routing


def route(
    logits: torch.Tensor,
    K: int,
    *,
    router: RouterConfig | str | None = None,
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer makes of router logits (T, E): weights (T, K) fp32 and expert ids (T, K) int32.

    A token's experts are in the order in which they were chosen, best first. `router`,
    `selection_bias` and `expert_scale` as in :func:`experts_from_logits`; without `router` the
    softmax over the top-K. The weights have gradients for the logits and `expert_scale`, which
    plain PyTorch computes, forward mode included. :func:`experts` takes both results.
    """
    _check.logits("logits", logits)
    config = resolve(router, True, False)
    routing = _of_logits(config, True, selection_bias, expert_scale)
    weights, ids = _layer.top_k(logits, K, routing)
    wanted = logits.requires_grad or (expert_scale is not None and expert_scale.requires_grad)
    if (torch.is_grad_enabled() and wanted) or _autograd.in_forward_mode():
        # The same weights in operations that autograd knows: the difference is 0, with a history.
        # Other derivatives than a softmax's have the inverse of p and squares of their sum.
        z = logits if config.score == "softmax" else logits.double()
        known = reference_routing.score_ids(z, ids, router=config, expert_scale=expert_scale)
        weights = weights + (known - known.detach()).to(weights.dtype)
    return weights, ids


def grouped_experts(
    rows: torch.Tensor,
    counts: torch.Tensor | None,
    w1: torch.Tensor,
    w2: torch.Tensor,
    scores: torch.Tensor | None = None,
    b1: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
    *,
    offsets: torch.Tensor | None = None,
    activation: ActivationType | str = ActivationType.SWIGLU,
    layout: str | None = None,
    score_at: str = "after_down",
    w1_up: torch.Tensor | None = None,
    b1_up: torch.Tensor | None = None,
    w1_main_grad: torch.Tensor | None = None,
    w2_main_grad: torch.Tensor | None = None,
    w1_up_main_grad: torch.Tensor | None = None,
    recompute: str = "none",
    out: torch.Tensor | None = None,
    dx_out: torch.Tensor | None = None,
    zero_tail: bool = True,
    rows_hint: int | None = None,
) -> torch.Tensor:
    """The experts alone, on rows (R, H) that a dispatcher has put in expert order: output (R, H).

    `counts` (E) and `offsets` (E+1), int32 or int64 on the rows' device, say which rows an expert
    owns. Counts alone: rows follow each other from row 0 on. Offsets alone: expert e owns rows
    offsets[e] to offsets[e+1]-1. Both: counts[e] rows from offsets[e] on, so that segments may be
    padded. Segments that overlap an earlier one, or reach past R, raise ValueError on the CPU; on
    CUDA they lose those rows. Nothing waits for the device, and a CUDA graph may capture the call.

    Rows that no expert owns are never read. With `zero_tail` their output and gradients are zero,
    otherwise that memory is left as it was. An idle expert's gradients are zero.

    `scores` (R), of any float dtype, are raised to fp32; their gradient comes back in their dtype.
    s multiplies the activation, (s A) W2^T + b2, with `score_at="before_down"`, and the output,
    s (A W2^T + b2), with "after_down".

    Weights, biases, layouts and `main_grad` tensors as above.

    `out` (R, H): the result is written there, and a view of it with the result's history returned.
    `dx_out` (R, H): backward writes the gradient of rows there and returns that tensor. Both are
    contiguous, of the result's dtype, and share no memory with other arguments. Of two calls in one
    graph each needs a `dx_out` of its own. `rows_hint`: the number of rows to expect where R is a
    worst case; it guides the choice of tiles.
    """
    experts = _expert_args(
        rows, activation, layout, w1, b1, w2, b2, w1_main_grad, w2_main_grad,
        w1_up, b1_up, w1_up_main_grad, recompute,
        x_name="rows", x_shape="(R, H)",
    )  # fmt: skip
    _check.score_at("score_at", score_at)
    _check.flag("zero_tail", zero_tail)
    return _layer.grouped_experts(
        rows,
        counts,
        offsets,
        scores,
        experts,
        score_at=score_at,
        zero_tail=zero_tail,
        expected_rows=_check.expected_rows("rows_hint", rows_hint),
        out=out,
        dx_out=dx_out,
    )


def token_rounding(
    logits: torch.Tensor,
    K: int,
    *,
    rule: str = "nr",
    tile: int = 128,
    softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    seed: int = 0,
    offset: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds each expert's token count to a multiple of `tile`, for training.

    Router logits (T, E) -> scores fp32, token ids (ascending, then by expert), expert ids, lists of
    one static length for :func:`moe_general_routing_inputs`, padded with sentinels; and the counts
    (E) int32 after rounding. Gradients reach the logits through kept and added entries.

    `rule`: "nr" nearest, ties down; "sr" up with probability (f - floor) / tile; "nr_s" up with the
    share of score that rounding down would drop; "balance" nearest with the running error; "up";
    "down". The C++ names of the first three do too: "nearest", "stochastic", "nearest_scores".
    `seed` and `offset`, 64 bits each, fix the draws of "sr" and "nr_s": move `offset` on at every
    step.
    """
    _check.logits("logits", logits)
    _check.integer("K", K)
    _check.integer("tile", tile)
    _check.flag("softmax_over_topk", softmax_over_topk)
    _check.flag("norm_topk_probs", norm_topk_probs)
    seed, offset = _check.word("seed", seed), _check.word("offset", offset)
    draws = None
    if _check.draws("rule", rule):  # made where the logits are: a host copy cannot be captured
        draws = torch.full((2,), seed, dtype=torch.int64, device=logits.device)
        draws[1:].fill_(offset)  # draws[1] = offset waits for the stream
    made = _layer.token_rounding(logits, K, rule, tile, softmax_over_topk, norm_topk_probs, draws)
    scores, tokens, experts, counts = made[:4]
    return scores, tokens, experts, counts


def switch_loss(router_logits: torch.Tensor, expert_frequency: torch.Tensor) -> torch.Tensor:
    """The load-balancing loss E * sum_e (P_e / sum P)(f_e / sum f), an fp32 scalar.

    P (E) is the sum over tokens of the softmax of the logits (T, E), f the frequency, without
    gradient. 0 without tokens.
    """
    _check.logits("router_logits", router_logits)
    _check.counts("expert_frequency", expert_frequency)
    shape = tuple(router_logits.shape)
    if len(shape) != 2:
        raise ValueError(f"router_logits: got shape {shape}, allowed: (T, E)")
    _check.shaped("expert_frequency", expert_frequency, shape[1:], "(E)")
    return _layer.switch_loss(router_logits, expert_frequency)


def count_cumsum(
    x: torch.Tensor, E: int, do_cumsum: bool = True
) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
    """How often each expert 0 .. E-1 occurs in x, int32 or int64 of any shape.

    Counts (E) int32 and their inclusive sums (E) int32, or the counts alone. Ids below 0 or from E
    on are sentinels, which are not counted.
    """
    _ops.require()
    _check.ids("x", x)
    _check.integer("E", E)
    _check.number_of_experts("E", E)
    counts, cumsum = torch.ops.sonicmoe.count_cumsum(_layer.int32(x).flatten(), E)
    return (counts, cumsum) if do_cumsum else counts
