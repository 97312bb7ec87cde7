"""Training one curve: the same initialisation and batches for every variant."""

import math
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from corpus import held_out_batches, training_batches
from model import ByteModel

from sonicmoe import MoE


@dataclass(frozen=True)
class Settings:
    """Sizes of the model and of the run. Fixed numbers of steps, so that a run repeats."""

    steps: int = 600
    seed: int = 0
    batch: int = 16  # sequences a step
    context: int = 128  # bytes a sequence
    hidden: int = 128
    heads: int = 4
    layers: int = 2
    experts: int = 16
    top_k: int = 2
    intermediate: int = 64
    std: float = 0.02
    # Where two experts nearly tie, rounding alone can flip a token's choice, and a hot start
    # amplifies that: with a relative noise of 1e-5 on the experts' output the curves are up to
    # 0.17 nat apart after 50 steps at 3e-3 and a warm-up of 50, and 2.4e-4 with these values.
    learning_rate: float = 1.5e-3
    warmup: int = 200
    aux_coefficient: float = 0.01
    evaluations: int = 8  # held-out points of a curve, beside the one before the first step
    held_out_windows: int = 128


@dataclass(frozen=True)
class Variant:
    """One curve of the picture: a name and how it computes a MoE block."""

    name: str
    run_moe: Callable  # (moe, x) -> (y, aux_loss)
    same_as: str | None = None  # the variant that computes the same function, if there is one
    moe_options: dict = field(default_factory=dict)  # of the MoE blocks: another routing, say


@dataclass
class Curve:
    """What a run has produced so far; every field is valid after every step."""

    variant: Variant
    train_loss: list = field(default_factory=list)  # nats a byte, one a step
    held_out_loss: list = field(default_factory=list)  # (steps done, nats a byte)
    tokens: int = 0
    seconds: float = 0.0  # of the training steps alone
    kept_bytes: int | None = None  # for backward, whole model
    kept_bytes_moe: int | None = None  # of these, by the MoE blocks
    loss_without_experts: float | None = None  # held out, experts' output zeroed; at the end


class StopRequest:
    """Turns the first Ctrl-C into a KeyboardInterrupt at the next `check()`, between two steps,
    where everything written so far is whole. A second Ctrl-C acts at once, as usual."""

    def __enter__(self):
        self._asked = False
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self._previous)

    def _on_signal(self, *_):
        self._asked = True
        signal.signal(signal.SIGINT, self._previous)

    def check(self):
        if self._asked:
            raise KeyboardInterrupt


def measure_kept_bytes(model, forward):
    """Bytes that one forward keeps for backward, as (whole model, MoE blocks alone).

    Counts each storage once, however many saved tensors view it, and leaves the parameters out:
    they are there anyway. Nothing is freed before backward starts, so this is also the peak.
    """
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}  # address -> (storage, saved by a MoE block); holding it keeps the address unique
    in_moe = False

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept.setdefault(storage.data_ptr(), (storage, in_moe))
        return tensor.detach()  # not the tensor itself: an output would then keep its own graph

    def mark(inside):
        def hook(*_):
            nonlocal in_moe
            in_moe = inside

        return hook

    moes = [module for module in model.modules() if isinstance(module, MoE)]
    hooks = [moe.register_forward_pre_hook(mark(True)) for moe in moes]
    hooks += [moe.register_forward_hook(mark(False)) for moe in moes]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    for hook in hooks:
        hook.remove()
    del loss
    sizes = [(storage.nbytes(), moe) for storage, moe in kept.values()]
    return sum(size for size, _ in sizes), sum(size for size, moe in sizes if moe)


@contextmanager
def experts_zeroed(model):
    """The MoE blocks return zeros instead of their experts' sum."""
    hooks = [
        module.register_forward_hook(lambda _module, _args, out: (torch.zeros_like(out[0]), out[1]))
        for module in model.modules()
        if isinstance(module, MoE)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def evaluate(model, run_moe, batches, stop):
    """Mean nats a byte over the batches, in evaluation mode: routing is plain top-K there."""
    total, count = 0.0, 0
    model.eval()
    for inputs, targets in batches:
        stop.check()
        logits, _ = model(inputs, run_moe)
        total += F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += targets.numel()
    model.train()
    return total / count


def runs_on(device, variant, settings):
    """None if the variant's MoE block runs there, forward and backward; else the reason."""
    s = replace(settings, context=8)
    try:
        model = ByteModel(s, variant.moe_options).to(device)
        tokens = torch.zeros(1, s.context, dtype=torch.long, device=device)
        logits, aux_loss = model(tokens, variant.run_moe)
        (logits.sum() + aux_loss).backward()
    except (RuntimeError, ValueError, TypeError) as error:
        return str(error).splitlines()[0]
    return None


def learning_rate(settings, step):
    """Linear warm-up, then a cosine down to a tenth."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))


def train(curve, settings, corpus, device, stop, progress):
    """Trains a fresh model and fills the curve step by step. `progress(curve)` after each step."""
    s, run_moe = settings, curve.variant.run_moe
    torch.manual_seed(s.seed)
    model = ByteModel(s, curve.variant.moe_options).to(
        device
    )  # initialised on the CPU: the same numbers on every device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=s.learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    held_out = [
        (inputs.to(device), targets.to(device))
        for inputs, targets in held_out_batches(
            corpus.held_out, s.context, s.batch, s.held_out_windows
        )
    ]
    batches = training_batches(corpus.train, s.context, s.batch, s.seed)
    evaluate_at = {s.steps * i // s.evaluations for i in range(s.evaluations + 1)}

    def losses(inputs, targets):
        logits, aux_loss = model(inputs, run_moe)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), aux_loss

    curve.kept_bytes, curve.kept_bytes_moe = measure_kept_bytes(model, lambda: losses(*held_out[0]))
    curve.held_out_loss.append((0, evaluate(model, run_moe, held_out, stop)))
    for step in range(s.steps):
        stop.check()
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(s, step)
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        loss, aux_loss = losses(inputs, targets)
        optimizer.zero_grad()
        (loss + s.aux_coefficient * aux_loss).backward()
        optimizer.step()
        curve.train_loss.append(loss.item())  # waits for the device, so the time is the step's
        curve.tokens += targets.numel()
        curve.seconds += time.perf_counter() - began
        if step + 1 in evaluate_at:
            curve.held_out_loss.append((step + 1, evaluate(model, run_moe, held_out, stop)))
        progress(curve)
    with experts_zeroed(model):
        curve.loss_without_experts = evaluate(model, run_moe, held_out, stop)
