"""Trains models of Hugging Face transformers with sonicmoe's experts beside its own `grouped_mm`.

    python benchmarks/transformers_training.py --json FILE

One model class of each kind of experts: default, biased, transposed, clamped, without a gate. Each
is small around its experts, in bf16, and learns the bytes of Python's standard library. For each
seed both implementations start from the same weights and see the same batches, a step of one after
a step of the other, the first of them by turns.

The losses agree if the implementations differ less than the seeds do: the mean loss of the last
steps, in the mean over the seeds, beside the spread of `grouped_mm` over them. Times are medians of
a whole step, forward to optimizer.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from arguments import positive, report_file

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "demo")]

SIDES = ("sonicmoe", "grouped_mm")
VOCABULARY = 256
LAST = 0.2  # of the steps enter the compared loss
UNTIMED = 5  # first steps: plans are made, kernels are loaded

# What all models have: (T, d, n, E, K) of a layer is (8192, 1024, 512, 64, 8).
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
EXPERTS, TOP_K, WIDTH = 64, 8, 512
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": WIDTH,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
# Kind: the model's class, its configuration's class, its settings.
MODELS = {
    "default": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", {
        "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH,
        "norm_topk_prob": True}),
    "biased": ("GptOssForCausalLM", "GptOssConfig", {
        "num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": WIDTH}),
    "transposed": ("AriaTextForCausalLM", "AriaTextConfig", {
        "moe_num_experts": EXPERTS, "moe_topk": TOP_K, "intermediate_size": WIDTH,
        "moe_num_shared_experts": 1}),
    "clamped": ("HYV4ForCausalLM", "HYV4Config", DEEPSEEK | {
        "swiglu_limit": 1.0,  # low enough to cut
        "mlp_layer_types": ["sparse", "sparse"], "intermediate_size": WIDTH, "q_lora_rank": 256,
        "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_n_heads": 8, "index_head_dim": 128, "index_topk": 1024}),
    "no gate": ("NemotronHForCausalLM", "NemotronHConfig", DEEPSEEK | {
        "layers_block_type": ["full_attention", "moe", "full_attention", "moe"],
        "moe_shared_expert_intermediate_size": WIDTH, "intermediate_size": WIDTH}),
}  # fmt: skip


def model_of(kind: str, seed: int) -> torch.nn.Module:
    import transformers

    model_class, config_class, settings = MODELS[kind]
    common = COMMON
    if "layers_block_type" in settings:
        common = {key: value for key, value in COMMON.items() if key != "num_hidden_layers"}
    config = getattr(transformers, config_class)(**common, **settings)
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return getattr(transformers, model_class)(config).to(torch.bfloat16)


class Run:
    """One model with one implementation of the experts."""

    def __init__(self, model: torch.nn.Module, implementation: str, steps: int):
        model.set_experts_implementation(implementation)
        self.model = model.train()
        # lr below the usual: weights are kept in bf16 alone, which loses small updates anyway.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / (0.1 * steps))
        )
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        self.times.append(1e3 * (time.perf_counter() - began))
        self.losses.append(loss.item())

    def last_loss(self) -> float:
        return statistics.fmean(self.losses[-max(1, int(LAST * len(self.losses))) :])


def train(kind: str, seed: int, names: dict[str, str], options) -> dict[str, Run]:
    text = batches(options)
    model = model_of(kind, seed)
    runs = {side: Run(copy.deepcopy(model), name, options.steps) for side, name in names.items()}
    del model
    generator = torch.Generator().manual_seed(seed)
    order = list(runs)
    for _ in range(options.steps):
        tokens = text(generator)
        for side in order:
            runs[side].step(tokens)
        order.reverse()
    for run in runs.values():
        del run.model, run.optimizer
    torch.cuda.empty_cache()
    return runs


def batches(options):
    from corpus import load_corpus

    text = load_corpus(None, options.context).train

    def batch(generator: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(text) - options.context, (options.batch,), generator=generator)
        rows = [text[start : start + options.context] for start in starts.tolist()]
        return torch.stack(rows).long().to("cuda")

    return batch


def compared(runs: list[dict[str, Run]]) -> dict:
    """Of one kind: losses of each seed, and whether they agree."""
    losses = {side: [run[side].last_loss() for run in runs] for side in SIDES}
    first = {side: [run[side].losses[0] for run in runs] for side in SIDES}
    means = {side: statistics.fmean(values) for side, values in losses.items()}
    noise = statistics.stdev(losses["grouped_mm"])
    step = {
        side: statistics.median([t for run in runs for t in run[side].times[UNTIMED:]])
        for side in SIDES
    }
    difference = means["sonicmoe"] - means["grouped_mm"]
    return {
        "first_loss": first,
        "last_loss": losses,
        "difference": difference,
        "seed_deviation": noise,
        "agree": abs(difference) <= noise,
        "step_ms": step,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--seeds", type=positive, default=3, help="at least 2, for a spread")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--batch", type=positive, default=8, help="sequences a step")
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument("--json", type=report_file, metavar="FILE", help="results as JSON")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: got 1, allowed: 2 and more")
    if options.steps < 2 * UNTIMED:
        parser.error(f"--steps: got {options.steps}, allowed: {2 * UNTIMED} and more")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device")
    import transformers

    import sonicmoe
    from sonicmoe.integrations.transformers import register

    names = {"sonicmoe": register(), "grouped_mm": "grouped_mm"}
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, sonicmoe "
          f"{sonicmoe.__version__} on {torch.cuda.get_device_name()}, bf16, {options.steps} steps, "
          f"{options.seeds} seeds")  # fmt: skip
    print(f"{'kind':11s} {'model':24s} {'sonicmoe loss':>13s} {'grouped_mm':>11s} {'difference':>11s} "
          f"{'of seeds':>9s} {'sonicmoe ms':>12s} {'grouped_mm':>11s} {'ratio':>6s}")  # fmt: skip
    results = []
    for kind in options.kinds:
        runs = [train(kind, seed, names, options) for seed in range(options.seeds)]
        found = compared(runs)
        results.append({"kind": kind, "model": MODELS[kind][0], **found})
        ours, theirs = (statistics.fmean(found["last_loss"][side]) for side in SIDES)
        ms, their_ms = (found["step_ms"][side] for side in SIDES)
        print(f"{kind:11s} {MODELS[kind][0]:24s} {ours:13.4f} {theirs:11.4f} "
              f"{found['difference']:+11.4f} {found['seed_deviation']:9.4f} {ms:12.2f} "
              f"{their_ms:11.2f} {their_ms / ms:6.2f}", flush=True)  # fmt: skip
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                 "transformers": transformers.__version__, "steps": options.steps,
                 "seeds": options.seeds, "batch": options.batch, "context": options.context,
                 "models": results}  # fmt: skip
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0 if all(result["agree"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
