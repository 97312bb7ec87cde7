"""How a router's logits become experts and scores: one value for the module and the functions."""

import dataclasses
import math
import numbers
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

_MAX_GROUPS = 1024

#: What makes an expert's score of its logit, by the library's names.
SCORES = ("softmax", "sigmoid", "sqrt_softplus")

#: Options with a few values, by the library's names; the first is the default.
_CHOICES = {
    "score": SCORES,
    "order": ("select_then_score", "score_then_select"),
    "group_score": ("largest", "sum_of_two"),
    "logits": ("input", "f32"),
}


class _Texts:
    """The items of a description that a router's fields are, made once."""

    _scoring: str
    _choosing: str


@dataclass(frozen=True)
class RouterConfig(_Texts):
    """The options of a router. Of a token's logits z (E), in fp32:

    1. z = x Wr^T + bias with `logit_bias`, rounded once to x's dtype, or kept in fp32 with
       `logits="f32"`.
    2. Scores p of z, by `score`: "softmax"; "sigmoid", 1 / (1 + e^-z); "sqrt_softplus",
       sqrt(log(1 + e^z)).
    3. What chooses: v = z with `order="select_then_score"`, p with "score_then_select", plus the
       buffer `selection_bias` (E), which has no gradient and enters no weight.
    4. With `groups` of E / groups neighbouring experts the `kept_groups` best ones stay, ties to
       the lower group. A group's value is its "largest" v, or the "sum_of_two" largest.
    5. The K largest v are chosen, ties to the lower expert.
    6. The weights are p of the chosen. A softmax that scores after the choice runs over the K
       chosen. `renormalize` divides by (their sum + `eps`), `scale` multiplies, and with
       `expert_scale` a trained number of each expert does.

    Steps 1 to 6 are those of the models in :data:`PRESETS`, which see. `eps` needs `renormalize`
    and a score that does not add up to 1 anyway.

    Raises TypeError and ValueError for what is not allowed, naming the option.
    """

    score: str = "softmax"
    order: str = "select_then_score"
    renormalize: bool = False
    eps: float = 0.0
    scale: float = 1.0
    logit_bias: bool = False
    selection_bias: bool = False
    expert_scale: bool = False
    groups: int = 1
    kept_groups: int = 1
    group_score: str = "largest"
    logits: str = "input"

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                kind = ValueError if isinstance(value, str) else TypeError
                raise kind(f"{name}: got {value!r}, allowed: {', '.join(map(repr, allowed))}")
        for name in ("renormalize", "logit_bias", "selection_bias", "expert_scale"):
            flag(name, getattr(self, name))
        eps = fp32("eps", self.eps, "finite numbers from 0 on", lambda value: value >= 0)
        scale = fp32("scale", self.scale, "finite numbers above 0", lambda value: value > 0)
        for name in ("eps", "scale"):  # any real number will do, but tensors multiply by floats
            object.__setattr__(self, name, float(getattr(self, name)))
        if eps != 0 and not self.divides:
            raise ValueError(
                f"eps: got {self.eps!r}, allowed: 0 unless renormalize divides by a sum (a softmax "
                "over the top-K adds up to 1)"
            )
        _integer("groups", self.groups, 1, _MAX_GROUPS)
        _integer("kept_groups", self.kept_groups, 1, self.groups)
        renormalize = str(self.renormalize).lower()
        scoring = f"router_score={self.score} router_order={self.order} renormalize={renormalize}"
        if eps != 0:
            scoring += f" eps={eps!r}"
        if scale != 1:
            scoring += f" scale={scale!r}"
        choosing = ""
        if self.groups > 1:
            choosing = f" groups={self.groups} kept_groups={self.kept_groups}"
            choosing += f" group_score={self.group_score}"
        # As the operators take them. Tracing sees constant texts, not numbers. No fields: asdict()
        # gives the options alone.
        object.__setattr__(self, "_scoring", scoring)
        object.__setattr__(self, "_choosing", choosing)

    @classmethod
    def preset(cls, name: str) -> "RouterConfig":
        """One of :data:`PRESETS` by its name; ValueError with the names for another one."""
        if not isinstance(name, str):
            raise TypeError(f"router: got {name!r}, allowed: a RouterConfig, {_names()}")
        if name not in PRESETS:
            raise ValueError(f"router: got {name!r}, allowed: a RouterConfig, {_names()}")
        return PRESETS[name]

    @property
    def over_top_k(self) -> bool:
        """Whether the score is a softmax over the K experts of a token."""
        return self.score == "softmax" and self.order == "select_then_score"

    @property
    def divides(self) -> bool:
        """Whether `renormalize` divides: a softmax over the top-K adds up to 1 as it is."""
        return self.renormalize and not self.over_top_k

    @property
    def constant_for_one(self) -> bool:
        """Whether a single expert's weight does not depend on its logit. An `eps` below 2^-24 is
        lost beside a score of size one."""
        return self.over_top_k or (self.renormalize and self.eps < 2.0**-24)

    def check_sizes(self, experts: int, top_k: int) -> None:
        """ValueError unless `experts` split into the groups, and the kept ones have `top_k`."""
        if experts % self.groups != 0:
            raise ValueError(f"groups: got {self.groups}, allowed: divisors of experts ({experts})")
        of_group = experts // self.groups
        if self.groups > 1 and top_k > self.kept_groups * of_group:
            raise ValueError(
                f"kept_groups: got {self.kept_groups}, allowed: so many that top_k ({top_k}) "
                f"experts stay, in groups of {of_group}"
            )
        if self.group_score == "sum_of_two" and of_group < 2:
            raise ValueError(
                "group_score: got 'sum_of_two', allowed: 'largest' with one expert a group"
            )

    def check_token_rounding(self) -> None:
        """ValueError unless the router is a softmax that `order` and `renormalize` describe."""
        allowed = {f.name: f.default for f in dataclasses.fields(self)}
        for name in ("order", "renormalize", "logits"):
            del allowed[name]
        for name, value in allowed.items():
            if getattr(self, name) != value:
                raise ValueError(
                    f"router.{name}: got {getattr(self, name)!r}, allowed: {value!r} with "
                    "routing='token_rounding'"
                )


def fp32(name: str, value: float, words: str, allows) -> float:
    """The value as fp32 has it: what the library computes with."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}: got {value!r}, allowed: {words}")
    rounded = math.inf
    if abs(value) < 2**128:  # no NaN, either
        try:
            rounded = struct.unpack("<f", struct.pack("<f", value))[0]
        except OverflowError:
            pass
    if not math.isfinite(rounded) or not allows(rounded) or (value != 0 and rounded == 0):
        raise ValueError(f"{name}: got {value!r}, allowed: {words}, as fp32 has them")
    # The shortest text: 2.5 of 2.5, 1e-20 of 1e-20.
    return float(value)


def flag(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, allowed: True, False")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}: got {value!r}, allowed: an int")
    if not low <= value <= high:
        raise ValueError(f"{name}: got {value}, allowed: {low} to {high}")


#: Routers of published models, by the names of Hugging Face's modeling code where it has them.
PRESETS: Mapping[str, RouterConfig] = MappingProxyType(
    {
        # Qwen3MoeSparseMoeBlock with norm_topk_prob: the K largest of a softmax over all, divided
        # by their sum.
        "qwen3": RouterConfig(order="score_then_select", renormalize=True),
        # MixtralSparseMoeBlock divides the K largest of a softmax over all by their sum. A softmax
        # over the K largest logits gives the same weights.
        "mixtral": RouterConfig(),
        # OlmoeSparseMoeBlock with norm_topk_prob=False.
        "olmoe": RouterConfig(order="score_then_select"),
        # DeepseekV3TopkRouter: sigmoid, noaux_tc selection in 4 of 8 groups,
        # routed_scaling_factor 2.5 (DeepSeek-V3's report, section 2.1.2).
        "deepseek_v3": RouterConfig(
            score="sigmoid",
            order="score_then_select",
            renormalize=True,
            eps=1e-20,
            scale=2.5,
            selection_bias=True,
            groups=8,
            kept_groups=4,
            group_score="sum_of_two",
        ),
        # DeepSeek-V4's gate: sqrtsoftplus, noaux_tc selection without groups, route_scale 1.5.
        "deepseek_v4": RouterConfig(
            score="sqrt_softplus",
            order="score_then_select",
            renormalize=True,
            eps=1e-20,
            scale=1.5,
            selection_bias=True,
        ),
        # GptOssTopKRouter: a bias in the projection, then a softmax over the K largest logits.
        "gpt_oss": RouterConfig(logit_bias=True),
        # Gemma 4's router: like qwen3's, times a trained per_expert_scale.
        "gemma4": RouterConfig(order="score_then_select", renormalize=True, expert_scale=True),
    }
)


def _names() -> str:
    return ", ".join(map(repr, PRESETS))


def resolve(
    router: RouterConfig | str | None,
    softmax_over_topk: bool,
    norm_topk_probs: bool,
    names: tuple[str, str] = ("softmax_over_topk", "norm_topk_probs"),
) -> RouterConfig:
    """The router that the arguments ask for; the two older ones, by their names, in its place."""
    flag(names[0], softmax_over_topk)
    flag(names[1], norm_topk_probs)
    if router is None:
        order = "select_then_score" if softmax_over_topk else "score_then_select"
        return _FLAGS[order, norm_topk_probs]
    for name, value, default in (
        (names[0], softmax_over_topk, True),
        (names[1], norm_topk_probs, False),
    ):
        if value != default:
            raise ValueError(f"{name}: got {value}, allowed: {default} beside router=")
    return router if isinstance(router, RouterConfig) else RouterConfig.preset(router)


_FLAGS = {
    (order, renormalize): RouterConfig(order=order, renormalize=renormalize)
    for order in _CHOICES["order"]
    for renormalize in (False, True)
}


class Routing(NamedTuple):
    """What a layer's router is told: its options, and float32 tensors (E) that add to logits,
    choose, or scale."""

    config: RouterConfig
    logit_bias: torch.Tensor | None = None
    selection_bias: torch.Tensor | None = None
    expert_scale: torch.Tensor | None = None

    def text(self, chooses: bool, f32_logits: bool) -> str:
        """The operators' options. A router that does not choose has no groups."""
        config, logit_bias, selection_bias, expert_scale = self
        text = config._scoring + config._choosing if chooses else config._scoring
        if logit_bias is not None:
            text += " logit_bias=true"
        if selection_bias is not None:
            text += " selection_bias=true"
        if expert_scale is not None:
            text += " expert_scale=true"
        return text + " f32_logits=true" if f32_logits else text


class Rounding(NamedTuple):
    """Token rounding of what a layer chooses: the library's name of a rule, the tile, and seed and
    offset (2) int64 for rules that draw."""

    rule: str
    tile: int
    draws: torch.Tensor | None = None


def checked_routing(config: RouterConfig, **tensors: torch.Tensor | None) -> Routing:
    """A Routing of the caller's tensors, each of which belongs to the option of its name."""
    for name, tensor in tensors.items():
        if getattr(config, name) != (tensor is not None):
            got, allowed = ("None", "a tensor") if tensor is None else ("a tensor", "None")
            raise ValueError(
                f"{name}: got {got}, allowed: {allowed}, for router.{name} is "
                f"{getattr(config, name)}"
            )
    return Routing(config, **tensors)
