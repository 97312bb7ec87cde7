"""Training on one device, where a GPU runs a whole step as one CUDA graph.

A small model's step is some thousand short kernels: the host needs longer to launch them than the
GPU to run them. A graph launches them all at once. What changes from step to step lies in tensors
that the graph reads: the batches, the learning rate, and the generator's seed.
"""

import copy
import math
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_

from .data import Text
from .parallel import Ranks
from .settings import Settings
from .training import Training


class Captured(Training):
    """`model` has fp32 weights and gradients, for the optimizer and checkpoints.

    `computing` is its copy in the type that forward and backward compute in. The experts' gradients
    go to the fp32 ones inside their kernels, the others after each batch. On the CPU the same step
    runs without a graph.
    """

    def __init__(self, s: Settings, text: Text, ranks: Ranks) -> None:
        if ranks.size > 1:
            raise ValueError(f"ranks: got {ranks.size}, allowed: 1, for a captured step")
        super().__init__(s, text, ranks)
        device = ranks.device
        self._rate = torch.zeros((), device=device)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        self._batches = self._batches_of(self.done).to(device)
        self._graph = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._warm_up()

    def _place(self) -> None:
        s, ranks = self.s, self.ranks
        dtype = torch.bfloat16 if ranks.precision == "bf16" else torch.float32
        self.model.to(ranks.device)
        self.computing = copy.deepcopy(self.model)
        #: The same for each number of rows: validation then is, too.
        self.validated_at_a_time = s.batch * s.accumulate
        for block in self.computing.blocks:
            block.moe.gradient_accumulation_fusion = True
        self._weights, self._copies = list(self.model.parameters()), []
        for weight, (name, narrow) in zip(
            self._weights, self.computing.named_parameters(), strict=True
        ):
            weight.grad = torch.zeros_like(weight)
            narrow.data = narrow.data.to(dtype)  # buffers keep their type
            if ".c_fc." in name or ".c_proj." in name:
                narrow.main_grad = weight.grad
            self._copies.append(narrow)
        self._gradients = [weight.grad for weight in self._weights]

    def _batches_of(self, step: int) -> torch.Tensor:
        """Inputs and targets (accumulate, 2, batch, context)."""
        s = self.s
        batches = [
            torch.stack(self.text.batch(s.seed, step, self._sequences(micro)))
            for micro in range(s.accumulate)
        ]
        made = torch.stack(batches)
        return made.pin_memory() if self.ranks.device.type == "cuda" else made

    def _set_rate(self, rate: float) -> None:
        self._rate.fill_(rate)

    def _whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a step computes, of the tensors that stay: the graph's content."""
        torch._foreach_zero_(self._gradients)
        losses = torch.zeros(2, device=self.ranks.device)
        for inputs, targets in self._batches:
            losses += self._micro(inputs, targets)
            self._add_gradients()
        norm = clip_grad_norm_(self._weights, self.s.clip or math.inf)
        self.optimizer.step()
        self._copy_weights()
        return losses, norm

    @torch.no_grad()
    def _add_gradients(self) -> None:
        """Those that are not in a main_grad."""
        pairs = [(w.grad, c) for w, c in zip(self._weights, self._copies, strict=True)]
        pairs = [(sums, narrow) for sums, narrow in pairs if narrow.grad is not None]
        torch._foreach_add_([sums for sums, _ in pairs], [narrow.grad for _, narrow in pairs])
        for _, narrow in pairs:
            narrow.grad = None

    @torch.no_grad()
    def _copy_weights(self) -> None:
        torch._foreach_copy_(self._copies, self._weights)

    def _warm_up(self) -> None:
        """Runs a step that changes nothing, so that all that a graph cannot make is there."""
        if self._stream is None:
            self._whole()
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._whole()
            torch.cuda.current_stream().wait_stream(self._stream)
        for state in self.optimizer.state.values():  # a rate of zero has moved no weight
            for value in state.values():
                value.zero_()

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._copy_weights()
        self._batches.copy_(self._batches_of(self.done))

    def _update(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._stream is None:
            told = self._whole()
        else:
            if self._graph is None:
                self._capture()
            self._graph.replay()
            told = self._told
        # The GPU still computes: the host makes what the next step reads.
        self._batches.copy_(self._batches_of(self.done + 1), non_blocking=True)
        return told

    def _capture(self) -> None:
        """After `load`, which gives the optimizer other tensors."""
        for group in self.optimizer.param_groups:
            group["capturable"] = True
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._told = self._whole()
