#!/usr/bin/env python3
"""Trains a language model with experts, on one process or on the ranks of torchrun.

    python examples/train_lm.py --out FOLDER
    torchrun --nproc-per-node 8 examples/train_lm.py --ep 8 --out FOLDER

FSDP2 shards the model and ExpertParallel spreads its experts. Ctrl-C and SIGTERM save and end the
run; --resume goes on (docs/distributed.md). Exit code 0 after the last step or a stop, 2 for bad
options, 1 otherwise.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from lm.settings import Settings, add_arguments

# Heavy imports wait until the options are known to be good.


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        """One line. Rank 0 of a machine speaks for all: torchrun ends the others as they wait."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(5)
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


def make_parser() -> Parser:
    parser = Parser(prog="train_lm.py", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    return parser


def parse(parser: Parser, arguments: list[str] | None) -> tuple[Settings, Path | None]:
    """The settings, and the checkpoint to go on from, whose settings are the defaults then."""
    options = parser.parse_args(arguments)

    from lm import checkpoint

    ranks, folder = int(os.environ.get("WORLD_SIZE", 1)), checkpoint.latest(options.out)
    if not options.resume:
        if folder is not None:
            raise ValueError(
                f"--out: got {options.out}, which has the checkpoint {folder.name}, allowed: "
                "another folder, or --resume to go on from it"
            )
        settings = Settings.of(vars(options))
        settings.check(ranks)
        return settings, None
    if folder is None:
        raise ValueError(f"--resume: got --out {options.out}, allowed: a folder with a checkpoint")
    about = checkpoint.read(folder)
    before = Settings.of(about["settings"])
    parser.set_defaults(**vars(before) | {"out": options.out})
    settings = Settings.of(vars(parser.parse_args(arguments)))
    settings.check(ranks)
    settings.check_resumed(before, ranks, about)
    return settings, folder


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    try:
        settings, folder = parse(parser, arguments)

        from lm import checkpoint, data, parallel, training

        parallel.device_and_precision(settings)
        text = data.load_text(settings.text, settings.tokenizer, settings.context)
        if folder is not None:
            text.check_resumed(checkpoint.read(folder))
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f"{error}; see README.md")
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: got {settings.out} ({error.strerror}), allowed: a folder to write to")
    with parallel.ranks_of(settings) as ranks:
        return training.run(settings, text, ranks, folder)


if __name__ == "__main__":
    try:
        status = main()
    except KeyboardInterrupt:  # before the first step, or the second one
        print("Interrupted.", file=sys.stderr)
        status = 130
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo live on until the process ends, and may abort it while Python shuts down.
    os._exit(status)
