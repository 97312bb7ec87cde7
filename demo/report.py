"""What a run says at its end: a table, a picture, and checks with their figures."""

from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

AGREE_STEPS = 50
AGREE_NATS = 0.01
UNIGRAM_MARGIN = 0.5
EXPERTS_MARGIN = 0.1


@dataclass(frozen=True)
class Check:
    what: str
    figure: float
    passed: bool

    def __str__(self):
        return f"{'ok  ' if self.passed else 'FAIL'} {self.what}: {self.figure:.3g}"


def make_checks(curves, entropy):
    """One check for each claim that the finished curves can bear out. NaN fails."""
    checks = []
    by_name = {curve.variant.name: curve for curve in curves}
    for other in curves:
        first = by_name.get(other.variant.same_as)
        if first is None:
            continue
        pairs = list(zip(first.train_loss, other.train_loss, strict=True))[:AGREE_STEPS]
        gap = max((abs(a - b) for a, b in pairs), key=lambda x: (x != x, x))  # NaN first
        checks.append(
            Check(
                f"{other.variant.name} and {first.variant.name} agree over {len(pairs)} steps,"
                f" largest gap in nats (at most {AGREE_NATS})",
                gap,
                gap <= AGREE_NATS,
            )
        )
    for curve in curves:
        final = curve.held_out_loss[-1][1]
        below = entropy - final
        checks.append(
            Check(
                f"{curve.variant.name}: nats below the byte-unigram entropy of {entropy:.4f}"
                f" (at least {UNIGRAM_MARGIN})",
                below,
                below >= UNIGRAM_MARGIN,
            )
        )
        rise = curve.loss_without_experts - final
        checks.append(
            Check(
                f"{curve.variant.name}: nats lost when the experts return zero"
                f" (at least {EXPERTS_MARGIN})",
                rise,
                rise >= EXPERTS_MARGIN,
            )
        )
    return checks


def table(curves):
    """A line per curve; what an interrupted one lacks is a dash."""

    def number(value, form):
        return "-" if value is None else format(value, form)

    rows = [
        ("MoE backend", "steps", "train loss", "held-out loss", "experts zeroed")
        + ("tokens/s", "kept MB", "by MoE MB")
    ]
    for c in curves:
        last = c.train_loss[-20:]
        rows.append(
            (
                c.variant.name,
                str(len(c.train_loss)),
                number(sum(last) / len(last) if last else None, ".4f"),
                number(c.held_out_loss[-1][1] if c.held_out_loss else None, ".4f"),
                number(c.loss_without_experts, ".4f"),
                number(c.tokens / c.seconds if c.seconds else None, ",.0f"),
                number(c.kept_bytes and c.kept_bytes / 1e6, ".2f"),
                number(c.kept_bytes_moe and c.kept_bytes_moe / 1e6, ".2f"),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)


def draw(curves, entropy, path):
    """Training loss as lines, held-out loss as points, and the unigram entropy for scale."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for i, curve in enumerate(curves):
        style = {"color": f"C{i}", "linestyle": ("-", "--", ":")[i % 3]}
        steps = range(1, len(curve.train_loss) + 1)
        axes.plot(steps, curve.train_loss, label=f"{curve.variant.name}, training", **style)
        if curve.held_out_loss:
            axes.plot(
                *zip(*curve.held_out_loss, strict=True),
                label=f"{curve.variant.name}, held out",
                color=f"C{i}",
                linestyle="none",
                marker="ox+"[i % 3],
            )
    axes.axhline(entropy, color="gray", linewidth=1, label="byte-unigram entropy, held out")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set_title("A byte-level MoE language model, same seed, same batches")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
