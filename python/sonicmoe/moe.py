"""The MoE module."""

import warnings
from types import ModuleType

import torch
from torch import nn

from . import _check, _layer, reference
from ._autocast import autocast
from .enums import ActivationType, KernelBackendMoE, is_glu
from .router import Routing, resolve

_BACKENDS = {KernelBackendMoE.sonicmoe: _layer, KernelBackendMoE.torch: reference}


class _AddedToMainGrad(torch.autograd.Function):
    """Passes a weight on. Backward says that its gradient has been added to `main_grad`.

    The hooks that wait for a gradient get one of zeros, as Megatron's do from its own layers:
    without any, autograd would call them from another thread.
    """

    @staticmethod
    def forward(ctx, weight: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient: None) -> torch.Tensor:
        ctx.weight.grad_added_to_main_grad = True
        return torch.zeros_like(ctx.weight)


class Experts(nn.Module):
    """The weights of one projection of all experts: weight (E, out, in), bias (E, out) or None."""

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, add_bias: bool, std: float
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = out_features
        self.std = std
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if add_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, mean=0.0, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self, x: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """weight and bias as they are now, parametrized or adapted; x is for hooks alone."""
        return self.weight, self.bias

    def extra_repr(self) -> str:
        return (
            f"num_experts={self.num_experts}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def _accumulating(name: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight as the layer takes it, and what backward adds its gradient to."""
    if not weight.requires_grad:
        return weight, None
    if not isinstance(weight, nn.Parameter):
        raise ValueError(
            f"{name}.weight: got what a parametrization, an adapter, a hook or a DTensor has made, "
            "allowed: the parameter itself, for gradient_accumulation_fusion adds to its main_grad"
        )
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"{name}.weight.main_grad: got None, allowed: a torch.float32 tensor like the "
            "weight, for gradient_accumulation_fusion adds to it"
        )
    if getattr(weight, "overwrite_main_grad", False):
        raise ValueError(f"{name}.weight.overwrite_main_grad: got True, allowed: False")
    if hasattr(weight, "grad_added_to_main_grad"):
        if torch.compiler.is_compiling():  # no code of ours runs in that backward
            weight.grad_added_to_main_grad = True
        else:
            weight = _AddedToMainGrad.apply(weight)
    return weight, main_grad


def _weights(
    name: str, made: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias as the layer takes them. What a parametrization or an adapter has made may
    lie in any order of memory: a copy puts it right."""
    weight, bias = made
    own = _check.local(f"{name}.weight", weight, x), _check.local(f"{name}.bias", bias, x)
    return tuple(t if t is None or isinstance(t, nn.Parameter) else t.contiguous() for t in own)


def _as_x(x: torch.Tensor, made: torch.Tensor | None) -> torch.Tensor | None:
    """A result as a DTensor if x is one."""
    if made is None or not _check.is_dtensor(x):
        return made
    return type(x).from_local(made, x.device_mesh, x.placements, run_check=False)


def _is_plain(router: nn.Module) -> bool:
    """Whether calling the router gives the product with its weight and nothing else."""
    return (
        type(router) is nn.Linear
        and router.bias is None
        and "forward" not in vars(router)
        and not (router._forward_pre_hooks or router._forward_hooks)
        and not (router._backward_pre_hooks or router._backward_hooks)
    )


class MoE(nn.Module):
    """A Mixture-of-Experts layer: each token picks `num_experts_per_tok` of `num_experts` experts.

    Parameters: `router.weight` (E, d); `c_fc.weight` (E, 2n, d) for gated activations, else
    (E, n, d); `c_proj.weight` (E, d, n); with `add_bias` also `c_fc.bias` (E, 2n or n) and
    `c_proj.bias` (E, d). The 2n rows of `c_fc` alternate gate and up (`layout="interleaved"`, the
    default), or hold all gate rows, then all up rows (`layout="concatenated"`, or
    `concat_layout=True` as in the original). Expert weights start normal with deviation `std`,
    biases at zero.

    Scores are the softmax over the K largest logits; with `softmax_over_topk=False` the K largest
    of the softmax over all logits, divided by their sum if `norm_topk_probs`.

    With `routing="token_rounding"` the layer rounds each expert's tokens to a multiple of `tile`
    while training (see :func:`sonicmoe.functional.token_rounding` for the rules of `rounding`); in
    `eval()` and in inference mode it is plain top-K. Draws come from PyTorch's generator.

    `router`, `c_fc` and `c_proj` may have hooks, parametrizations and adapters, and `router` may be
    any module that makes logits (T, E) of x (T, d): every forward calls them. A plain linear router
    is not called: its product is a part of the layer. Parameters may be replicated DTensors, with x
    a replicated DTensor too. FSDP2 may shard the module, but none of the three alone.

    With `gradient_accumulation_fusion` backward adds the gradients of `c_fc.weight` and
    `c_proj.weight` to the fp32 tensors `main_grad` that the caller has set on them, in fp32, and
    their `grad` stays None. Where a weight has `grad_added_to_main_grad`, as Megatron's have,
    backward sets that and gives the hooks a gradient of zeros.
    """

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
    ) -> None:
        super().__init__()
        _check.integer("num_experts", num_experts)
        _check.integer("num_experts_per_tok", num_experts_per_tok)
        _check.integer("hidden_size", hidden_size)
        _check.integer("intermediate_size", intermediate_size)
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
            raise ValueError(f"routing: got {routing!r}, allowed: 'top_k', 'token_rounding'")
        if not 1 <= tile <= 1024:
            raise ValueError(f"tile: got {tile}, allowed: 1 to 1024")
        _check.layer_sizes(hidden_size, intermediate_size, num_experts, num_experts_per_tok)
        if num_experts_per_tok == 1 and (softmax_over_topk or norm_topk_probs):
            warnings.warn(
                f"softmax_over_topk: got {softmax_over_topk}, norm_topk_probs: got "
                f"{norm_topk_probs}, with num_experts_per_tok=1: every weight is 1, so the task's "
                "loss gives the router no gradient; softmax_over_topk=False without "
                "norm_topk_probs gives it one",
                stacklevel=2,
            )
        self.num_experts = num_experts
        self.top_k = num_experts_per_tok
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.activation_function = activation_function
        self.softmax_over_topk = softmax_over_topk
        self.norm_topk_probs = norm_topk_probs
        self.layout = layout
        self.routing = routing
        self.rounding = rounding
        self.tile = tile
        self.gradient_accumulation_fusion = gradient_accumulation_fusion

        width = 2 * intermediate_size if is_glu(activation_function) else intermediate_size
        self.router = nn.Linear(hidden_size, num_experts, bias=False)
        self.c_fc = Experts(num_experts, hidden_size, width, add_bias, std)
        self.c_proj = Experts(num_experts, intermediate_size, hidden_size, add_bias, std)

    @property
    def concat_layout(self) -> bool:
        """The original's name of `layout == "concatenated"`."""
        return self.layout == "concatenated"

    def forward(
        self,
        x: torch.Tensor,
        kernel_backend_moe: KernelBackendMoE = KernelBackendMoE.sonicmoe,
        is_inference_mode: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x (..., d) -> the output (..., d) and the switch load-balancing loss, an fp32 scalar.

        In inference mode nothing is kept for backward and the loss is None. `eval()` alone still
        differentiates.
        """
        backend = _BACKENDS.get(kernel_backend_moe)
        if backend is None:
            raise _unavailable(kernel_backend_moe)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x: got {type(x).__name__}, allowed: a tensor")
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: got shape {tuple(x.shape)}, allowed: (..., {self.hidden_size})")
        for name in ("router", "c_fc", "c_proj"):
            _check.not_sharded_alone(name, getattr(self, name))
        tokens = x.reshape(-1, self.hidden_size)
        experts, main_grads = self._experts(tokens, backend, kernel_backend_moe, is_inference_mode)
        if self.routing == "token_rounding" and self.training and not is_inference_mode:
            out, logits, counts = self._rounded(backend, tokens, experts, main_grads)
        else:
            out, logits, counts = self._top_k(backend, tokens, experts, main_grads)
        aux_loss = None if is_inference_mode else backend.switch_loss(logits, counts)
        # A view of two dimensions could not be detached in place, as pipelines do with outputs.
        out = out if x.dim() == 2 else out.view(x.shape)
        return _as_x(x, out), _as_x(x, aux_loss)

    def _experts(
        self,
        x: torch.Tensor,
        backend: ModuleType,
        kernel_backend_moe: KernelBackendMoE,
        is_inference_mode: bool,
    ) -> tuple[tuple, dict[str, torch.Tensor | None]]:
        """What the layers take of the experts, in order, and the main_grads by name."""
        # No gradient reaches x from here. Hooks for the whole backward then wait for the weights'.
        seen = x.detach()
        w1, b1 = _weights("c_fc", self.c_fc(seen), x)
        w2, b2 = _weights("c_proj", self.c_proj(seen), x)
        main_grads = {}
        if self.gradient_accumulation_fusion:
            if backend is not _layer:
                raise ValueError(
                    f"kernel_backend_moe: got {kernel_backend_moe}, allowed: "
                    "KernelBackendMoE.sonicmoe, with gradient_accumulation_fusion"
                )
            if torch.is_grad_enabled() and not is_inference_mode:
                w1, main_grads["w1_main_grad"] = _accumulating("c_fc", w1)
                w2, main_grads["w2_main_grad"] = _accumulating("c_proj", w2)
        experts = w1, b1, w2, b2, self.activation_function, is_inference_mode, self.layout
        return experts, main_grads

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's logits (T, E) of x (T, d)."""
        logits = _check.local("router(x)", self.router(x), x)
        _check.tensors(**{"router(x)": logits})
        shape = x.shape[0], self.num_experts
        if logits.shape != shape:
            raise ValueError(
                f"router(x): got shape {tuple(logits.shape)}, allowed: (T, E) = {tuple(shape)}"
            )
        return logits

    def _top_k(
        self,
        backend: ModuleType,
        x: torch.Tensor,
        experts: tuple,
        main_grads: dict[str, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, the logits and the counts."""
        config = resolve(None, self.softmax_over_topk, self.norm_topk_probs)
        options = self.top_k, Routing(config), *experts
        if _is_plain(self.router):
            router_w = _check.local("router.weight", self.router.weight, x)
            return backend.topk_layer(_check.local("x", x, x), router_w, *options, **main_grads)
        (x,) = autocast(x)
        (logits,) = autocast(self._logits(x))
        x = _check.local("x", x, x)
        out, counts = backend.logits_layer(x, logits, None, *options, **main_grads)
        return out, logits, counts

    def _rounded(
        self,
        backend: ModuleType,
        x: torch.Tensor,
        experts: tuple,
        main_grads: dict[str, torch.Tensor | None],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The output, the logits and the counts before rounding."""
        (x,) = autocast(x.contiguous())  # kept once, by the router and the experts
        logits = self._logits(x)
        x = _check.local("x", x, x)
        # From the generator, so that manual_seed repeats a run and checkpointing repeats a layer.
        draws = None
        if _check.draws("rounding", self.rounding):
            draws = torch.randint(2**62, (2,), device=x.device)
        scores, token_ids, expert_ids, _, frequency = backend.token_rounding(
            logits,
            self.top_k,
            self.rounding,
            self.tile,
            self.softmax_over_topk,
            self.norm_topk_probs,
            draws,
        )
        out, _ = backend.routed_layer(x, scores, token_ids, expert_ids, *experts, **main_grads)
        return out, logits, frequency

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, activation_function={self.activation_function}, "
            f"softmax_over_topk={self.softmax_over_topk}, "
            f"norm_topk_probs={self.norm_topk_probs}, layout={self.layout!r}, "
            f"routing={self.routing!r}, rounding={self.rounding!r}, tile={self.tile}, "
            f"gradient_accumulation_fusion={self.gradient_accumulation_fusion}"
        )


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
