#!/usr/bin/env python3
"""Trains a small byte-level MoE language model on real text, once with each MoE backend.

A third curve, "rounded", is our backend with token rounding, evaluated with plain top-K.
Prints a table, writes a picture of the curves and checks its own claims: exit code 0 if they
hold, 1 if one does not, 2 for bad options, 130 after Ctrl-C (with what there is so far).
"""

import argparse
import sys
from pathlib import Path

# Heavy imports wait until the options are known to be good.

OUT = Path(__file__).resolve().parent / "out"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")


def whole_number(least):
    def parse(text):
        if not text.isdecimal() or int(text) < least or int(text) >= 1 << 63:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
        return int(text)

    return parse


def parse_options(arguments):
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--text",
        type=Path,
        metavar="PATH",
        help="a file or folder of text; default: Python's own standard library",
    )
    parser.add_argument("--steps", type=whole_number(1), help="training steps of each curve")
    parser.add_argument("--seed", type=whole_number(0), help="of the weights and the batches")
    parser.add_argument(
        "--backend", choices=("sonicmoe", "torch", "both"), default="both", help="default: both"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N; default: auto")
    parser.add_argument(
        "--out", type=Path, default=OUT, metavar="FOLDER", help="of the picture; default: demo/out"
    )
    return parser, parser.parse_args(arguments)


def make_variants(backend):
    """The curves to train, by name. Another curve (say, other routing) is another entry here."""
    from training import Variant

    from sonicmoe import KernelBackendMoE

    def run_with(kernel_backend):
        return lambda moe, x: moe(x, kernel_backend_moe=kernel_backend)

    # 2048 tokens, 16 experts, 2 a token: 256 rows an expert, two tiles.
    rounding = {"routing": "token_rounding", "rounding": "nr", "tile": 128}
    variants = {
        "sonicmoe": [
            Variant("sonicmoe", run_with(KernelBackendMoE.sonicmoe)),
            Variant("rounded", run_with(KernelBackendMoE.sonicmoe), moe_options=rounding),
        ],
        "torch": [Variant("torch", run_with(KernelBackendMoE.torch), same_as="sonicmoe")],
    }
    return [v for name, some in variants.items() if backend in (name, "both") for v in some]


def choose_device(name, variants, settings):
    """The device called `name`; for auto a GPU where every variant runs, else the CPU.

    Whether a variant runs somewhere is found out by running it on a tiny batch."""
    import torch
    from training import runs_on

    if name == "auto":
        gpu = torch.cuda.is_available() and all(
            runs_on(torch.device("cuda"), variant, settings) is None for variant in variants
        )
        name = "cuda" if gpu else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    for variant in variants:
        reason = runs_on(device, variant, settings)
        if reason is not None:
            raise ValueError(f"--device {name}: backend {variant.name}: {reason}")
    return device


def run(options):
    """Trains, reports and returns the exit code. ValueError carries one line for the user."""
    import report
    import torch
    from corpus import held_out_batches, load_corpus, unigram_entropy
    from tqdm import tqdm
    from training import Curve, Settings, StopRequest, train

    given = {name: getattr(options, name) for name in ("steps", "seed")}
    settings = Settings(**{name: value for name, value in given.items() if value is not None})
    corpus = load_corpus(options.text, settings.context)
    entropy = unigram_entropy(
        held_out_batches(
            corpus.held_out, settings.context, settings.batch, settings.held_out_windows
        )
    )
    variants = make_variants(options.backend)
    device = choose_device(options.device, variants, settings)
    print(
        f"Text: {corpus.source}, {corpus.files} files, {len(corpus.train) / 1e6:.1f} MB to train"
        f" on, {len(corpus.held_out) / 1e6:.1f} MB held out. Device: {device},"
        f" {torch.get_num_threads()} threads.\n"
        f"Model: {settings.layers} layers of attention and MoE, width {settings.hidden},"
        f" {settings.experts} experts of width {settings.intermediate}, {settings.top_k} a token."
        f" {settings.steps} steps of {settings.batch * settings.context} bytes each."
    )

    curves, interrupted = [], False
    with StopRequest() as stop:
        try:
            for variant in variants:
                curves.append(Curve(variant))
                with tqdm(total=settings.steps, desc=variant.name, unit="step") as bar:

                    def progress(curve, bar=bar):
                        bar.set_postfix(loss=f"{curve.train_loss[-1]:.3f}", refresh=False)
                        bar.update()

                    train(curves[-1], settings, corpus, device, stop, progress)
        except KeyboardInterrupt:
            interrupted = True

    print("\n" + report.table(curves))
    picture = options.out / "curves.png"
    report.draw(curves, entropy, picture)
    print(f"Picture: {picture}")
    if interrupted:
        print("Interrupted: this is what there is; nothing was checked.")
        return 130
    checks = report.make_checks(curves, entropy)
    print(*checks, sep="\n")
    return 0 if all(check.passed for check in checks) else 1


def main(arguments=None):
    parser, options = parse_options(arguments)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: got {options.out} ({error.strerror}), allowed: a folder to write to")
    try:
        return run(options)
    except ImportError as error:
        parser.exit(2, f"{parser.prog}: {error}; `make demo` installs what is needed\n")
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("Interrupted before the first step.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
