"""What a run says: JSON lines, a picture, and a bar on a terminal or lines in a file."""

import json
import sys
import time
from pathlib import Path
from typing import Any

LINE_EVERY = 10  # seconds between lines where there is no terminal


def read(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Report:
    """Of rank 0. `step` is where the run starts: later lines of the log are from before."""

    def __init__(self, out: Path, step: int, steps: int) -> None:
        self.out, self.steps, self.bar, self.draws, self._shown = out, steps, None, True, 0.0
        self.path = out / "log.jsonl"
        kept = [line for line in read(self.path) if line["step"] <= step]
        self.file = self.path.open("w", buffering=1)  # whole lines, for who reads along
        for line in kept:
            self._write(line)
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                self.say("tqdm is missing: lines in place of a bar")
            else:
                self.bar = tqdm(initial=step, total=steps, unit="step")

    def _write(self, line: dict[str, Any]) -> None:
        self.file.write(json.dumps(line) + "\n")

    def say(self, text: str) -> None:
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def step(self, line: dict[str, Any]) -> None:
        self._write(line)
        validated = "validation_loss" in line
        if self.bar is not None:
            self.bar.set_postfix(loss=f"{line['loss']:.3f}", refresh=False)
            self.bar.update()
        if validated or (self.bar is None and time.monotonic() - self._shown > LINE_EVERY):
            self._shown = time.monotonic()
            self.say(
                f"step {line['step']}/{self.steps}: loss {line['loss']:.4f}, "
                f"gradient {line['grad_norm']:.3f}, lr {line['lr']:.2e}, "
                f"{line['tokens_per_s']:,.0f} tokens/s"
                + (f", validation {line['validation_loss']:.4f}" if validated else "")
            )

    def draw(self) -> None:
        """The curves so far, into curves.png."""
        if not self.draws:
            return
        try:
            import matplotlib
        except ImportError:
            self.draws = False
            self.say("matplotlib is missing: no picture of the curves")
            return
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        lines = read(self.path)
        for key, style in (("loss", {"linewidth": 1}), ("validation_loss", {"marker": "o"})):
            points = [(line["step"], line[key]) for line in lines if key in line]
            axes.plot(*zip(*points, strict=True), label=key.replace("_", " "), **style)
        axes.set(xlabel="step", ylabel="loss, nats a token")
        axes.legend()
        figure.savefig(self.out / "curves.png", dpi=120)
        plt.close(figure)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.file.close()


class Quiet:
    """Of all other ranks."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: None
