"""Trains a small Qwen3-MoE of Hugging Face transformers on our experts, then adapts it with LoRA.

    pip install transformers==5.24.0 accelerate peft==0.21.2
    python examples/hf_finetune.py [--steps N] [--device cpu|cuda]

The model comes from its configuration and learns to continue sequences that count up. Only the two
lines that name sonicmoe differ from a script without it.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainingArguments

import sonicmoe.integrations.transformers as sonicmoe_transformers

VOCABULARY = 64


def counting(rows: int, length: int, stride: int) -> list[dict[str, torch.Tensor]]:
    """Sequences s, s + stride, s + 2 stride, ... of tokens 3 to VOCABULARY - 1."""
    starts = torch.randint(VOCABULARY - 3, (rows, 1))
    ids = (starts + stride * torch.arange(length)) % (VOCABULARY - 3) + 3
    return [{"input_ids": row, "labels": row} for row in ids]


def train(model: torch.nn.Module, data: list, steps: int, lr: float, device: str) -> None:
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir="hf_finetune",
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=lr,
            bf16=device == "cuda",
            use_cpu=device == "cpu",
            logging_steps=max(steps // 5, 1),
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=data,
    )
    trainer.train()


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: list) -> float:
    """Of the next token, past the two that tell a sequence's stride."""
    ids = torch.stack([row["input_ids"] for row in data]).to(model.device)
    guesses = model.eval()(input_ids=ids).logits.argmax(-1)
    model.train()
    return (guesses[:, 1:-1] == ids[:, 2:]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of each of the two trainings")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    options = parser.parse_args()
    torch.manual_seed(0)

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = AutoModelForCausalLM.from_config(config).to(options.device)
    model.set_experts_implementation(sonicmoe_transformers.register())

    by_one, by_two = counting(512, 32, 1), counting(512, 32, 2)
    train(model, by_one, options.steps, 2e-3, options.device)
    print(
        f"counting by 1: {accuracy(model, by_one):.0%} right, by 2: {accuracy(model, by_two):.0%}"
    )

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = get_peft_model(
        model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], target_parameters=experts)
    )
    adapted.print_trainable_parameters()
    train(adapted, by_two, options.steps, 5e-3, options.device)
    print(f"counting by 2 with adapters: {accuracy(adapted, by_two):.0%} right")


if __name__ == "__main__":
    main()
