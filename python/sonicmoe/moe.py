"""The MoE module."""

import functools
import math
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from . import _check, _layer, losses, reference, reference_losses
from ._autocast import autocast
from ._experts import Experts, in_own_names, weights
from ._main_grad import MainGrads
from ._router import (
    Router,
    add_counts,
    keep_fp32,
    keeping_fp32,
    plain_product,
    warn_of_constant_weights,
)
from .enums import ActivationType, KernelBackendMoE, is_glu
from .losses import LOSSES, checked_losses
from .router import Rounding, RouterConfig, Routing, resolve

if TYPE_CHECKING:  # slow to import
    from torch.distributed.tensor import DTensor

    from .distributed._style import _Parallel


class _Backend(NamedTuple):
    """Modules with the same functions, and the switch loss of what the layer has made."""

    layer: ModuleType
    losses: ModuleType
    switch_loss: Callable[..., torch.Tensor]


_BACKENDS = {
    KernelBackendMoE.sonicmoe: _Backend(_layer, losses, losses.unchecked_switch_loss),
    KernelBackendMoE.torch: _Backend(reference, reference_losses, reference_losses.switch_loss),
}


_OWN_PARTS = (Router, Experts)


def _as_dtensor(x: "DTensor", made: torch.Tensor) -> torch.Tensor:
    """A result as a DTensor like x."""
    return type(x).from_local(made, x.device_mesh, x.placements, run_check=False)


def _as_fp32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """What mixed precision (FSDP2's MixedPrecisionPolicy) has cast, as the layer takes it."""
    if tensor is None or tensor.dtype.itemsize >= 4:
        return tensor
    return tensor.float()


class MoE(nn.Module):
    """A Mixture-of-Experts layer: each token picks `num_experts_per_tok` of `num_experts` experts.

    Parameters: `router.weight` (E, d); `c_fc.weight` (E, 2n, d) for gated activations, else
    (E, n, d); `c_proj.weight` (E, d, n); with `add_bias` also `c_fc.bias` (E, 2n or n) and
    `c_proj.bias` (E, d). The 2n rows of `c_fc` alternate gate and up (`layout="interleaved"`, the
    default), or hold all gate rows, then all up rows (`layout="concatenated"`, or
    `concat_layout=True` as in the original). Expert weights start normal with deviation `std`,
    biases at zero.

    Scores are the softmax over the K largest logits; with `softmax_over_topk=False` the K largest
    of the softmax over all logits, divided by their sum if `norm_topk_probs`. `router`, a
    :class:`sonicmoe.RouterConfig` or the name of a preset, says other ways, in place of these two.
    Its options add the parameters `router.bias` (E) and `expert_scale` (E) and the buffer
    `selection_bias` (E). They are fp32 and stay so under `.to(dtype)`. The router's weight may be
    fp32 beside other weights of 16 bits (`moe.router.float()`): then the logits are fp32 too, as
    they are with `logits="f32"`. Under autocast to 16 bits the weight is cast as all others are,
    but for `logits="f32"`. Autocast to fp32 makes the logits fp32 and casts nothing.

    `losses` are weights by name, of "switch", "z" and "sequence_balance" (:mod:`sonicmoe.losses`);
    the loss that `forward` returns is their weighted sum. None: the switch loss alone.

    The buffer `tokens_per_expert` (E) int64, which is not in the state dict, counts the choices of
    training forwards, before token rounding and without padding. A forward that runs inside a
    backward pass does not count: activation checkpointing recomputes there.

    With `routing="token_rounding"` the layer rounds each expert's tokens to a multiple of `tile`
    while training (see :func:`sonicmoe.functional.token_rounding` for the rules of `rounding`); in
    `eval()` and in inference mode it is plain top-K. Draws come from PyTorch's generator.

    `router`, `c_fc` and `c_proj` may have hooks, parametrizations and adapters, and `router` may be
    any module that makes logits (T, E) of x (T, d): every forward calls them. Its logits have its
    bias in them. A plain linear router is not called: its product is a part of the layer, and so is
    an fp32 bias, but for token rounding. Parameters may be replicated DTensors, with x a replicated
    DTensor too. FSDP2 may shard the module, but none of the three alone.

    With `recompute="preact"` x and the routing are all that is kept for backward. It computes the
    pre-activation again, by one more up projection, with the same bits.

    With `gradient_accumulation_fusion` backward adds the gradients of `c_fc.weight` and
    `c_proj.weight` to the fp32 tensors `main_grad` that the caller has set on them, in fp32, and
    their `grad` stays None. Where a weight has `grad_added_to_main_grad`, as Megatron's have,
    backward sets that. Hooks then get an uninitialized tensor, or zeros if the weight's
    `zero_out_wgrad` is true. Where `overwrite_main_grad` is true, backward overwrites `main_grad`.
    """

    router: nn.Module
    c_fc: Experts
    c_proj: Experts
    expert_scale: nn.Parameter | None
    selection_bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation_function: ActivationType | str,
        add_bias: bool,
        std: float,
        *,
        softmax_over_topk: bool = True,
        norm_topk_probs: bool = False,
        concat_layout: bool = False,
        layout: str | None = None,
        routing: str = "top_k",
        rounding: str = "nr",
        tile: int = 128,
        gradient_accumulation_fusion: bool = False,
        router: RouterConfig | str | None = None,
        losses: dict[str, float] | None = None,
        recompute: str = "none",
    ) -> None:
        super().__init__()
        _check.integer("num_experts", num_experts)
        _check.integer("num_experts_per_tok", num_experts_per_tok)
        _check.integer("hidden_size", hidden_size)
        _check.integer("intermediate_size", intermediate_size)
        _check.flag("add_bias", add_bias)
        _check.flag("softmax_over_topk", softmax_over_topk)
        _check.flag("norm_topk_probs", norm_topk_probs)
        _check.flag("concat_layout", concat_layout)
        _check.flag("gradient_accumulation_fusion", gradient_accumulation_fusion)
        if activation_function == "silu":
            warnings.warn(
                "activation_function: got 'silu', which has no gate: the experts of models whose "
                "configuration says hidden_act='silu' have one, which is 'swiglu' here; "
                "ActivationType.SILU does not warn",
                stacklevel=2,
            )
        activation_function = _check.activation("activation_function", activation_function)
        if layout == "separate":
            raise ValueError(
                "layout: got 'separate', allowed: 'interleaved', 'concatenated', for c_fc has one "
                "weight (moe_TC_softmax_topk_layer takes two tensors: w1 and w1_up)"
            )
        allowed = _check.ONE_TENSOR_LAYOUTS
        layout = _check.w1_layout(layout, concat_layout, activation_function, allowed=allowed)
        _check.integer("tile", tile)
        _check.rounding_rule("rounding", rounding)
        if routing not in ("top_k", "token_rounding"):
            kind = ValueError if isinstance(routing, str) else TypeError
            raise kind(f"routing: got {routing!r}, allowed: 'top_k', 'token_rounding'")
        if isinstance(std, bool) or not hasattr(std, "__float__"):
            raise TypeError(f"std: got {std!r}, allowed: a number")
        if not 0 <= std < math.inf:
            raise ValueError(f"std: got {std}, allowed: finite numbers from 0 on")
        if not 1 <= tile <= 1024:
            raise ValueError(f"tile: got {tile}, allowed: 1 to 1024")
        _check.layer_sizes(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
        )
        config = resolve(router, softmax_over_topk, norm_topk_probs)
        config.check_sizes(num_experts, num_experts_per_tok)
        if routing == "token_rounding":
            config.check_token_rounding()
        if num_experts_per_tok == 1 and config.constant_for_one:
            warn_of_constant_weights(config, router)
        self.num_experts = num_experts
        self.top_k = num_experts_per_tok
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation_function = activation_function
        self.router_config = config
        self.losses = checked_losses(losses)
        self.layout = layout
        self.routing = routing
        self.rounding = rounding
        self.tile = tile
        self.gradient_accumulation_fusion = gradient_accumulation_fusion
        self.recompute = _check.recompute("recompute", recompute)
        #: Set by sonicmoe.distributed.ExpertParallel: how tokens reach the experts of other ranks.
        self.parallel: _Parallel | None = None

        width = 2 * intermediate_size if is_glu(activation_function) else intermediate_size
        self.router = Router(hidden_size, num_experts, config.logit_bias, config.logits == "f32")
        self.c_fc = Experts(num_experts, hidden_size, width, add_bias, std)
        self.c_proj = Experts(num_experts, intermediate_size, hidden_size, add_bias, std)

        scale = torch.ones(num_experts, dtype=torch.float32) if config.expert_scale else None
        bias = torch.zeros(num_experts, dtype=torch.float32) if config.selection_bias else None
        self.register_parameter("expert_scale", None if scale is None else nn.Parameter(scale))
        self.register_buffer("selection_bias", bias)
        counts = torch.zeros(num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Resets what the module itself has: `expert_scale`, `selection_bias`, the counts."""
        if self.expert_scale is not None:
            nn.init.ones_(self.expert_scale)
        if self.selection_bias is not None:
            self.selection_bias.zero_()
        self.tokens_per_expert.zero_()

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        keep_fp32(state_dict, prefix, ("expert_scale", "selection_bias"))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        # The counts are no part of the state: a module from the meta device has none. With
        # assign=True its weights are about to become those of the state.
        if self.tokens_per_expert.is_meta:
            given = [entry for name, entry in state_dict.items() if name.startswith(prefix)]
            weights = [*self.parameters(), *[w for w in given if isinstance(w, torch.Tensor)]]
            device = next((w.device for w in weights if not w.is_meta), torch.device("meta"))
            self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, device=device)

    def _apply(self, fn: Callable, recurse: bool = True) -> "MoE":
        if recurse:
            for child in self.children():
                child._apply(fn)
        was_meta = self.tokens_per_expert.is_meta
        super()._apply(keeping_fp32(fn, [self.expert_scale, self.selection_bias]), False)
        if was_meta:  # to_empty() leaves anything there
            self.tokens_per_expert.zero_()
        return self

    @property
    def softmax_over_topk(self) -> bool:
        """The original's name of `router_config.order == "select_then_score"`."""
        return self.router_config.order == "select_then_score"

    @property
    def norm_topk_probs(self) -> bool:
        """The original's name of `router_config.renormalize`."""
        return self.router_config.renormalize

    @property
    def concat_layout(self) -> bool:
        """The original's name of `layout == "concatenated"`."""
        return self.layout == "concatenated"

    def update_selection_bias(self, rate: float) -> None:
        """selection_bias += rate * sign(mean(n) - n) of n = tokens_per_expert, which become 0.

        Ranks that hold the same experts add up their `tokens_per_expert` first (all_reduce). DDP
        with `broadcast_buffers=True` overwrites them with those of rank 0 at each forward.
        """
        if self.selection_bias is None:
            raise ValueError(
                "router.selection_bias: got False, allowed: True, for update_selection_bias adds "
                "to that buffer"
            )
        losses.update_selection_bias(self.selection_bias, self.tokens_per_expert, rate)
        self.tokens_per_expert.zero_()

    def forward(
        self,
        x: torch.Tensor,
        kernel_backend_moe: KernelBackendMoE = KernelBackendMoE.sonicmoe,
        is_inference_mode: bool = False,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (..., d) -> the output (..., d) and the weighted sum of `losses`, an fp32 scalar.

        `padding_mask` has the shape of x without d, or is (T) with all its tokens: True, or an
        integer other than 0, where a token counts. The others count in no loss and not in
        `tokens_per_expert`, but the experts compute them all the same.

        In inference mode nothing is kept for backward and the loss is None. `eval()` alone still
        differentiates.
        """
        known = isinstance(kernel_backend_moe, KernelBackendMoE)
        backend = _BACKENDS.get(kernel_backend_moe) if known else None
        if backend is None:
            raise _unavailable(kernel_backend_moe)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: got {type(x).__name__}, allowed: a tensor")
        _check.flag("is_inference_mode", is_inference_mode)
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: got shape {tuple(x.shape)}, allowed: (..., {self.hidden_size})")
        mask = _check.mask_of_tokens(padding_mask, x)
        if x.dim() == 2:
            tokens = x
        else:
            _check.strided("x", x)
            tokens = x.reshape(-1, self.hidden_size)
        run: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
        layer: Any  # a module of functions, or what has the same
        if self.parallel is None:
            for name in ("router", "c_fc", "c_proj"):
                part = self._modules[name]
                if type(part) not in _OWN_PARTS:  # fully_shard changes the class
                    _check.not_sharded_alone(name, part)
            run, layer = self._run, backend.layer
        else:
            run = functools.partial(self.parallel, self._run)
            layer = self.parallel.layer(self, kernel_backend_moe)
        out, logits, counts = in_own_names(
            run, tokens, layer, kernel_backend_moe, is_inference_mode
        )
        aux_loss = None
        if not is_inference_mode:
            # Sequences of x (B, S, d); another x is one sequence, or as many as all but S say.
            length = x.shape[-2] if x.dim() > 2 else tokens.shape[0]
            aux_loss, counts = self._losses(backend, logits, counts, mask, length)
            if self.training:
                add_counts(self.tokens_per_expert, counts)
        # A view of two dimensions could not be detached in place, as pipelines do with outputs.
        out = out if x.dim() == 2 else out.view(x.shape)
        if _check.is_dtensor(x):
            out = _as_dtensor(x, out)
            aux_loss = None if aux_loss is None else _as_dtensor(x, aux_loss)
        return out, aux_loss

    def _run(
        self,
        x: torch.Tensor,
        backend: ModuleType,
        kernel_backend_moe: KernelBackendMoE,
        is_inference_mode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, the logits and the counts of x (T, d)."""
        experts, named, main_grads = self._experts(
            x, backend, kernel_backend_moe, is_inference_mode
        )
        if self.routing == "token_rounding" and self.training and not is_inference_mode:
            named["rounding"] = self._rounding(x)
        out, logits, counts = self._route_and_run(backend, x, experts, named)
        if main_grads is not None:
            main_grads.zero_before(out)
        return out, logits, counts

    def _losses(
        self,
        backend: _Backend,
        logits: torch.Tensor,
        counts: torch.Tensor,
        mask: torch.Tensor | None,
        length: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Their weighted sum, and the counts (E) of tokens that count; mask (T)."""
        ids: Any = None
        counts_again = mask is not None and (self.training or "switch" in self.losses)
        if counts_again or "sequence_balance" in self.losses:
            # The layer does not return them: the choice is made once more.
            routing = Routing(self.router_config, selection_bias=self._selection_bias())
            ids = backend.layer.top_k(logits, self.top_k, routing)[1]
        if counts_again:
            counts = backend.losses.count_choices(ids, self.num_experts, padding_mask=mask)
        score = self.router_config.score
        terms = []
        for name, weight in self.losses.items():
            if name == "switch":
                seen = counts if self.parallel is None else self.parallel.counts(counts)
                loss = backend.switch_loss(logits, seen, score=score, padding_mask=mask)
            elif name == "z":
                loss = backend.losses.z_loss(logits, padding_mask=mask)
            elif name == "sequence_balance":
                shape = (-1, length) if length else (1, 0)
                of_sequences = None if mask is None else mask.view(*shape)
                chosen = backend.losses.count_choices(
                    ids.view(*shape, self.top_k),
                    self.num_experts,
                    padding_mask=of_sequences,
                    per_sequence=True,
                )
                loss = backend.losses.sequence_balance_loss(
                    logits.view(*shape, self.num_experts),
                    chosen,
                    score=score,
                    padding_mask=of_sequences,
                )
            else:
                raise ValueError(f"losses: got {name!r}, allowed: {', '.join(LOSSES)}")
            terms.append(loss if weight == 1 else weight * loss)
        return (sum(terms[1:], terms[0]) if terms else _no_loss(logits)), counts

    def _experts(
        self,
        x: torch.Tensor,
        backend: ModuleType,
        kernel_backend_moe: KernelBackendMoE,
        is_inference_mode: bool,
    ) -> tuple[tuple, dict[str, Any], MainGrads | None]:
        """What the layers take of the experts, in order and by name, and the main_grads."""
        # No gradient reaches x from here. Hooks for the whole backward then wait for the weights'.
        seen = x.detach()
        parts: dict[str, Any] = self._modules  # quicker than attributes
        made = parts["c_fc"](seen), parts["c_proj"](seen)
        if self.parallel is not None:
            made = self.parallel.local(made, x)
        w1, b1 = weights("c_fc", made[0], x)
        w2, b2 = weights("c_proj", made[1], x)
        named: dict[str, Any] = {}
        main_grads = None
        if backend is _layer:  # the reference keeps what autograd keeps
            named["recompute"] = self.recompute
        if self.gradient_accumulation_fusion:
            if backend is not _layer:
                raise ValueError(
                    f"kernel_backend_moe: got {kernel_backend_moe}, allowed: "
                    "KernelBackendMoE.sonicmoe, with gradient_accumulation_fusion"
                )
            if torch.is_grad_enabled() and not is_inference_mode:
                main_grads = MainGrads(w1=("c_fc.weight", w1), w2=("c_proj.weight", w2))
                w1, w2 = main_grads.weights
                named |= main_grads.named
        experts = w1, b1, w2, b2, self.activation_function, is_inference_mode, self.layout
        return experts, named, main_grads

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """What the router makes of x (T, d), which is in autocast's type: logits (T, E)."""
        logits = _check.local("router(x)", self.router(x), x)
        _check.tensors(**{"router(x)": logits})
        shape = x.shape[0], self.num_experts
        if logits.shape != shape:
            raise ValueError(
                f"router(x): got shape {tuple(logits.shape)}, allowed: (T, E) = {tuple(shape)}"
            )
        if self.router_config.logits == "f32":
            return logits if logits.dtype.itemsize >= 4 else logits.float()
        if logits.dtype != torch.float32:
            (logits,) = autocast(logits)
        return logits

    def _selection_bias(self) -> torch.Tensor | None:
        if not self.router_config.selection_bias:
            return None
        bias = self.selection_bias
        return _as_fp32(bias.to_local() if _check.is_dtensor(bias) else bias)

    def _rounding(self, x: torch.Tensor) -> Rounding:
        # From the generator, so that manual_seed repeats a run and checkpointing repeats a layer.
        draws = None
        if _check.draws("rounding", self.rounding):
            draws = torch.randint(2**62, (2,), device=x.device)
        return Rounding(_check.rounding_rule("rounding", self.rounding), int(self.tile), draws)

    def _route_and_run(
        self,
        backend: ModuleType,
        x: torch.Tensor,
        experts: tuple,
        named: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, the logits and the counts before rounding."""
        config = self.router_config
        plain = plain_product(self._modules["router"], (self.num_experts, self.hidden_size))
        if "rounding" in named and plain is not None and plain[1] is not None:
            plain = None  # the layer rounds logits without a bias of their own
        bias = None if plain is None else _check.local("router.bias", plain[1], x)
        selection_bias = self._selection_bias()
        scale = self.expert_scale if config.expert_scale else None
        scale = _as_fp32(_check.local("expert_scale", scale, x))
        routing = Routing(config, _as_fp32(bias), selection_bias, scale)
        if plain is not None:
            router_w = _check.local("router.weight", plain[0], x)
            x = _check.local("x", x, x)
            return backend.topk_layer(x, router_w, self.top_k, routing, *experts, **named)
        (x,) = autocast(x.contiguous())  # kept once, by the router and the experts
        logits = self._logits(x)
        x = _check.local("x", x, x)
        out, counts = backend.logits_layer(x, logits, None, self.top_k, routing, *experts, **named)
        return out, logits, counts

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, activation_function={self.activation_function}, "
            f"router={self.router_config}, losses={self.losses}, layout={self.layout!r}, "
            f"routing={self.routing!r}, rounding={self.rounding!r}, tile={self.tile}, "
            f"gradient_accumulation_fusion={self.gradient_accumulation_fusion}, "
            f"recompute={self.recompute!r}"
        )


def _no_loss(logits: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.zeros((), dtype=dtype, device=logits.device)


def _unavailable(backend: object) -> Exception:
    if backend is KernelBackendMoE.scattermoe:
        return ImportError(
            "kernel_backend_moe: KernelBackendMoE.scattermoe is not part of sonicmoe: "
            "install accelerated-model-architectures "
            "(https://github.com/open-lm-engine/accelerated-model-architectures) and use its "
            "scattered_experts, or choose KernelBackendMoE.sonicmoe or KernelBackendMoE.torch"
        )
    return TypeError(
        f"kernel_backend_moe: got {backend!r}, allowed: KernelBackendMoE.sonicmoe, "
        "KernelBackendMoE.torch"
    )
