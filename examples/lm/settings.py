"""The options of a run: each with its default, its help, and what it may be."""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ROUNDING = ("nr", "sr", "nr_s", "balance", "up", "down")


def whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 1 << 63:
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: whole numbers from {least}")
        return int(text)

    return parse


def number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, allowed: numbers from 0")
    return value


def path(text: str) -> Path:
    return Path(text).absolute()  # a checkpoint has it, and may be read from another folder


def _option(default: Any, about: str, **argument: Any) -> Any:
    """A field; `argument` as argparse takes it, where the default does not tell."""
    if isinstance(default, bool):
        argument = {"action": argparse.BooleanOptionalAction}
    elif not argument:
        argument = {"type": whole(1) if isinstance(default, int) else number}
    return field(default=default, metadata={"help": about, **argument})


@dataclass(frozen=True)
class Settings:
    """What a run is. `train_lm.py --help` lists the same."""

    text: tuple[Path, ...] = _option(
        (), "files or folders of text (default: Python's standard library)", nargs="+", type=path
    )
    tokenizer: Path | None = _option(
        None, "a tokenizer.json of the package tokenizers (default: bytes)", type=path
    )
    out: Path = _option(
        Path("train_lm"), "folder of the log, the picture and the checkpoints", type=Path
    )

    layers: int = _option(4, "blocks of attention and MoE")
    hidden: int = _option(256, "width of the model")
    heads: int = _option(8, "heads of attention")
    experts: int = _option(16, "experts of a block")
    top_k: int = _option(2, "experts of a token")
    intermediate: int = _option(128, "width of an expert")
    context: int = _option(256, "tokens of a sequence")

    steps: int = _option(1000, "steps until the learning rate has decayed")
    batch: int = _option(8, "sequences a rank takes at a time")
    accumulate: int = _option(1, "batches whose gradients a step adds up")
    lr: float = _option(1e-3, "learning rate after warm-up")
    warmup: int = _option(100, "steps of a rising learning rate", type=whole(0))
    weight_decay: float = _option(0.1, "of AdamW, on matrices")
    clip: float = _option(1.0, "largest norm of the gradient; 0: any")
    aux_loss: float = _option(0.01, "coefficient of the switch loss")
    seed: int = _option(0, "of weights, batches and draws", type=whole(0))

    routing: str = _option(
        "top_k", "of training; validation is plain top-K", choices=("top_k", "token_rounding")
    )
    rounding: str = _option("nr", "rule of token rounding", choices=ROUNDING)
    tile: int = _option(128, "rows to which token rounding rounds")

    ep: int = _option(1, "ranks over which the experts lie")
    transport: str = _option(
        "auto", "of tokens to experts", choices=("auto", "gather", "all_to_all")
    )
    activation_checkpointing: bool = _option(False, "compute blocks again in backward")
    device: str = _option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    precision: str = _option(
        "auto", "auto: bf16 on cuda, else f32; weights are fp32", choices=("auto", "bf16", "f32")
    )

    checkpoint_every: int = _option(500, "steps between checkpoints")
    validate_every: int = _option(100, "steps between validations")
    validation_sequences: int = _option(64, "sequences of a validation")
    minutes: float = _option(0.0, "save and stop after so many; 0: never")
    timeout: int = _option(600, "seconds of one step after which a run ends as hung")

    def check(self, ranks: int) -> None:
        """ValueError where options do not go together. Sizes alone have passed the parser."""
        for name, wrong, allowed in (
            ("heads", self.hidden % (2 * self.heads), f"with --hidden {self.hidden} an even ratio"),
            ("hidden", self.hidden % 8, "multiples of 8"),
            ("intermediate", self.intermediate % 8, "multiples of 8"),
            ("experts", self.experts > 2**16, f"1 to {2**16}"),
            ("top_k", self.top_k > self.experts, f"1 to --experts ({self.experts})"),
            ("tile", self.tile > 1024, "1 to 1024"),
            ("ep", ranks % self.ep, f"divisors of the number of ranks ({ranks})"),
            ("ep", self.experts % self.ep, f"divisors of --experts ({self.experts})"),
            ("routing", self.ep > 1 and self.routing != "top_k", "top_k with --ep above 1"),
        ):
            if wrong:
                raise ValueError(f"{flag(name)}: got {getattr(self, name)}, allowed: {allowed}")

    def check_resumed(self, saved: "Settings", ranks: int, about: dict[str, Any]) -> None:
        """ValueError where a checkpoint does not fit, or the batches would be others."""
        for name in FIXED:
            got, allowed = getattr(self, name), getattr(saved, name)
            if got != allowed:
                raise ValueError(f"{flag(name)}: got {got}, allowed: {allowed}, the checkpoint's")
        if self.steps <= about["step"]:
            raise ValueError(
                f"--steps: got {self.steps}, allowed: above {about['step']}, the checkpoint's"
            )
        got = self.batch * self.accumulate * ranks
        allowed = saved.batch * saved.accumulate * about["ranks"]
        if got != allowed:
            raise ValueError(
                f"--batch: got {self.batch}, with --accumulate {self.accumulate} and {ranks} ranks "
                f"{got} sequences a step, allowed: {allowed} a step, the checkpoint's"
            )

    def saved(self) -> dict[str, Any]:
        """As JSON takes it; `of` reads it."""
        return json.loads(json.dumps(asdict(self), default=str))

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Settings":
        """Of parsed arguments, or what was saved."""
        known = {option.name: values[option.name] for option in fields(cls)}
        known["text"] = tuple(map(Path, known["text"]))
        known["out"] = Path(known["out"])
        known["tokenizer"] = known["tokenizer"] and Path(known["tokenizer"])
        return cls(**known)


#: What a checkpoint's weights depend on: --resume cannot change it.
FIXED = ("layers", "hidden", "heads", "experts", "top_k", "intermediate", "context")


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for option in fields(Settings):
        about = dict(option.metadata)
        if option.default not in (None, ()) and "action" not in about:
            about["help"] += f" (default: {option.default})"
        parser.add_argument(flag(option.name), default=option.default, **about)
