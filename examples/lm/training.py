"""Training on the ranks of a process group: a step, and the run of steps."""

import math
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from sonicmoe.distributed import clip_grad_norm_

from . import checkpoint
from .data import Text
from .model import LanguageModel
from .parallel import Ranks, spread
from .report import Quiet, Report
from .settings import Settings
from .watch import Watch


def learning_rate(s: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < s.warmup:
        return s.lr * (step + 1) / s.warmup
    done = min(1, (step - s.warmup) / max(1, s.steps - s.warmup))
    return s.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def make_optimizer(model: torch.nn.Module, s: Settings) -> torch.optim.Optimizer:
    """AdamW. A group has parameters of one mesh, for a fused step takes them together."""
    groups = {"experts": [], "matrices": [], "vectors": []}
    for name, parameter in model.named_parameters():
        is_expert = ".c_fc." in name or ".c_proj." in name
        kind = "experts" if is_expert else "matrices" if parameter.ndim > 1 else "vectors"
        groups[kind].append(parameter)
    decay = {"experts": s.weight_decay, "matrices": s.weight_decay, "vectors": 0.0}
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": decay[name]} for name, group in groups.items()],
        lr=s.lr,
        betas=(0.9, 0.95),
        fused=True,
    )


class Training:
    """A model on its ranks and its optimizer, after `done` steps."""

    def __init__(self, s: Settings, text: Text, ranks: Ranks) -> None:
        self.s, self.text, self.ranks, self.done = s, text, ranks, 0
        torch.manual_seed(s.seed)  # on the CPU: the same weights for any device and any ranks
        self.model = LanguageModel(s, text.vocabulary)
        self.weights = sum(p.numel() for p in self.model.parameters())
        self._place()
        self.optimizer = make_optimizer(self.model, s)

    def _place(self) -> None:
        """Brings the model to its devices."""
        spread(self.model, self.s, self.ranks)
        self.computing = self.model  # the module that is called
        self.validated_at_a_time = self.s.batch

    def load(self, folder: Path) -> None:
        checkpoint.load(folder, self.model, self.optimizer)
        self.done = checkpoint.read(folder)["step"]

    def save(self) -> Path:
        about = {
            "step": self.done,
            "ranks": self.ranks.size,
            "tokenizer": self.text.vocabulary,
            "text": len(self.text.train),
            "settings": self.s.saved(),
        }
        return checkpoint.save(self.s.out, about, self.model, self.optimizer)

    def _losses(
        self, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy and switch loss."""
        device = self.ranks.device
        logits, aux_loss = self.computing(inputs.to(device))
        logits, targets = logits.flatten(0, 1).float(), targets.to(device).flatten()
        return F.cross_entropy(logits, targets, reduction=reduction), aux_loss

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def _sequences(self, micro: int) -> range:
        """Of all sequences of a step, those of this rank's batch `micro`."""
        first = (micro * self.ranks.size + self.ranks.rank) * self.s.batch
        return range(first, first + self.s.batch)

    def _micro(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Backward of one of a step's batches; its parts of the step's losses."""
        losses = torch.stack(self._losses(inputs, targets)) / self.s.accumulate
        (losses[0] + self.s.aux_loss * losses[1]).backward()  # FSDP2 takes the mean over ranks
        return losses.detach()

    def _update(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One step of the optimizer: this rank's mean losses, and the norm of the gradient."""
        s = self.s
        losses = torch.zeros(2, device=self.ranks.device)
        for micro in range(s.accumulate):
            losses += self._micro(*self.text.batch(s.seed, self.done, self._sequences(micro)))
        norm = clip_grad_norm_(self.model.parameters(), s.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses, norm

    def step(self, stop: bool = False) -> tuple[dict[str, Any], bool]:
        """One step as the log has it, and whether any rank wants to stop."""
        s, ranks, began = self.s, self.ranks, time.perf_counter()
        # For token rounding: other draws each step and rank, the same ones after a resume.
        torch.manual_seed(random.Random(f"{s.seed} {self.done} {ranks.rank}").getrandbits(63))
        lr = learning_rate(s, self.done)
        self._set_rate(lr)
        losses, norm = self._update()
        stops = torch.full((1,), float(stop), device=ranks.device)
        told = torch.cat((losses / ranks.size, stops))
        dist.all_reduce(told)
        # The only wait of a step.
        loss, aux_loss, stops, norm = torch.cat((told, norm.view(1))).tolist()
        self.done += 1
        tokens = s.batch * s.accumulate * ranks.size * s.context
        line = {"step": self.done, "loss": loss, "aux_loss": aux_loss, "grad_norm": norm, "lr": lr}
        return line | {"tokens_per_s": tokens / (time.perf_counter() - began)}, stops > 0

    @torch.no_grad()
    def validate(self) -> float:
        """The mean loss of the held-out sequences, with plain top-K. Any ranks take the same."""
        s, ranks, count = self.s, self.ranks, self.s.validation_sequences
        batch = self.validated_at_a_time
        total = torch.zeros((), device=ranks.device, dtype=torch.float64)
        self.computing.eval()
        for all_first in range(0, count, batch * ranks.size):
            # Ranks bring full batches, equally many, to the experts: what is too much counts not.
            first = all_first + ranks.rank * batch
            some = [min(i, count - 1) for i in range(first, first + batch)]
            losses = self._losses(*self.text.validation(some, count), "none")[0]
            total += losses.view(batch, -1)[: max(0, count - first)].double().sum()
        self.computing.train()
        dist.all_reduce(total)
        return total.item() / (count * s.context)


def how_to_go_on(out: Path) -> str:
    folder = checkpoint.latest(out)
    if folder is None:
        return "There is no checkpoint to go on from."
    step = checkpoint.read(folder)["step"]
    return f"To go on from step {step}: launch train_lm.py --out {out} --resume as before."


def run(
    s: Settings,
    text: Text,
    ranks: Ranks,
    resume: Path | None = None,
    kind: type[Training] = Training,
) -> int:
    """Trains, validates and saves, from a checkpoint on if one is given. 0, or 1 on divergence."""
    began, stop = time.monotonic(), False
    training = kind(s, text, ranks)
    if resume is not None:
        training.load(resume)
    s.out.mkdir(parents=True, exist_ok=True)
    report = Report(s.out, training.done, s.steps) if ranks.rank == 0 else Quiet()
    report.say(_about(training))
    with Watch(s.timeout, lambda: how_to_go_on(s.out)) as watch:
        while training.done < s.steps and not stop:
            late = 0 < s.minutes * 60 < time.monotonic() - began
            line, stop = training.step(watch.asked or late)
            if not math.isfinite(line["loss"] + line["grad_norm"]):
                report.say(
                    f"step {training.done}: loss {line['loss']}, gradient {line['grad_norm']}: "
                    f"diverged; take a smaller --lr. {how_to_go_on(s.out)}"
                )
                return 1
            last = training.done == s.steps
            if last or (training.done % s.validate_every == 0 and not stop):
                line["validation_loss"] = training.validate()
            report.step(line)
            if last or stop or training.done % s.checkpoint_every == 0:
                training.save()
                report.draw()
            watch.alive()
        if training.done < s.steps:
            report.say(f"Stopped after step {training.done}. {how_to_go_on(s.out)}")
        else:
            report.say(f"Done: {s.steps} steps, validation loss {line['validation_loss']:.4f}.")
        if ranks.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
            report.say(f"Peak memory of rank {ranks.rank}: {peak:.1f} GiB.")
        report.close()
    return 0


def _about(training: Training) -> str:
    s, text, ranks = training.s, training.text, training.ranks
    return (
        f"Text: {text.source}, {len(text.train) / 1e6:.1f} M tokens to train on, "
        f"{len(text.held_out) / 1e6:.1f} M held out.\n"
        f"Model: {training.weights / 1e6:.1f} M weights, {ranks.precision}; --ep {s.ep} of "
        f"{ranks.size} ranks on {ranks.device.type}; "
        f"{s.batch * s.accumulate * ranks.size} sequences of {s.context} a step."
    )
