"""What users of transformers do with a model, on our experts."""

import warnings

import census
import pytest
import small
import snippets
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import sonicmoe.integrations.transformers as sonicmoe_transformers

MODELS = pytest.mark.parametrize("make", [small.qwen3, small.gpt_oss])


@MODELS
def test_generation_gives_the_same_tokens(make, name):
    model = make().eval()
    sequences = []
    for implementation in ("eager", name):
        model.set_experts_implementation(implementation)
        sequences.append(model.generate(small.tokens(), max_new_tokens=20, do_sample=False))
    assert sequences[0].shape[1] > 20
    assert torch.equal(*sequences)


@MODELS
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing(make, use_reentrant, name):
    model = make()
    wanted = small.step(model, "eager")
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    model.train()
    small.assert_same(small.step(model, name), wanted, 1e-5)


@MODELS
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_whole_model_compiles(make, backend, name):
    model = make()
    wanted = small.step(model, "eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    small.assert_same(small.step(model, name, compiled), wanted, 1e-5)


def test_compiled_settings_are_those_of_each_class(name):
    """Two classes with other gates in one process."""
    torch._dynamo.reset()
    for make in (small.qwen3, small.gpt_oss):
        model = make()
        wanted = small.step(model, "eager")
        small.assert_same(
            small.step(model, name, torch.compile(model, backend="aot_eager")), wanted, 1e-5
        )


@MODELS
def test_from_pretrained(make, name, tmp_path):
    model = make()
    wanted = small.step(model, "eager")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=name)
    assert loaded.config._experts_implementation == name
    small.assert_same(small.step(loaded, name), wanted, 1e-5)


def test_trainer(name, tmp_path):
    """Accumulation, a checkpoint in the middle, and going on from it."""

    def losses(implementation, folder, resume=False):
        model = small.qwen3()
        model.set_experts_implementation(implementation)
        rows = small.tokens(16)
        trainer = Trainer(
            model,
            TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_steps=4,
                save_steps=2,
                logging_steps=1,
                learning_rate=1e-3,
                report_to=[],
                disable_tqdm=True,
                use_cpu=True,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        )
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted = losses("eager", tmp_path / "eager")
    got = losses(name, tmp_path / "ours")
    assert len(got) == 4
    assert got == pytest.approx(wanted, rel=1e-4)
    assert losses(name, tmp_path / "ours", resume=True) == pytest.approx(wanted, rel=1e-4)


# Precision.


@MODELS
def test_autocast(make, name):
    """fp32 parameters: as close to the fp32 model as `eager` under autocast is, by the factor 2."""

    def run(implementation):
        with torch.autocast("cpu", torch.bfloat16):
            return small.step(model, implementation)

    model = make()
    exact = small.step(model, "eager")
    plain, got = run("eager"), run(name)
    assert abs(got[0] - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 2**-8 * exact[0]
    for key, gradient in exact[1].items():
        if "experts" in key:
            assert got[1][key].dtype == torch.float32
            allowed = 2 * (plain[1][key] - gradient).norm() + 2**-8 * gradient.norm()
            assert (got[1][key] - gradient).norm() <= allowed, key


@MODELS
def test_bf16_model(make, name):
    model = make()
    exact = small.step(model, "eager")
    model.bfloat16()
    plain, got = small.step(model, "eager"), small.step(model, name)
    assert abs(got[0] - exact[0]) <= 2 * abs(plain[0] - exact[0]) + 2**-8 * exact[0]
    assert all(gradient.dtype == torch.bfloat16 for gradient in got[1].values())


def experts_of(model) -> nn.Module:
    return model.model.layers[0].mlp.experts


def pairs(tokens, top_k, experts):
    weights = torch.rand(tokens, top_k).requires_grad_()
    ids = torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)])
    return ids, weights


def ours(module, x, ids, weights):
    return sonicmoe_transformers.experts_forward(module, x, ids, weights)


def eager(module, x, ids, weights):
    module.config._experts_implementation = "eager"
    return module(x, ids, weights)


def outcome(run, module, x, ids, weights):
    """The output, and the gradients of x, weights and the parameters."""
    module.zero_grad()
    inputs = x.detach().requires_grad_(), weights.detach().requires_grad_()
    out = run(module, inputs[0], ids, inputs[1])
    (out.float() * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
    return out.detach(), *(t.grad for t in (*inputs, *module.parameters()))


def test_fp32_hidden_states_beside_bf16_weights(name):
    """What autocast leaves behind a norm: the output has the hidden states' dtype."""
    module = experts_of(small.qwen3()).bfloat16()
    ids, weights = pairs(12, 2, 8)
    x = torch.randn(12, 32)
    out = ours(module, x, ids, weights)
    assert out.dtype == torch.float32
    wanted = ours(module, x.bfloat16(), ids, weights)
    assert torch.equal(out, wanted.float())
    out.sum().backward()
    assert module.gate_up_proj.grad.dtype == torch.bfloat16


def test_fp16_on_the_cpu_is_refused(name):
    module = experts_of(small.qwen3()).half()
    ids, weights = pairs(12, 2, 8)
    with pytest.raises(ValueError, match="f16"):
        ours(module, torch.randn(12, 32).half(), ids, weights)


# Hostile routings.


def normed():
    """Experts with a norm behind each."""
    module = "transformers.models.muse_spark.modeling_muse_spark"
    experts = census.experts(module, "MuseSparkExperts")
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


KINDS = pytest.mark.parametrize(
    "experts",
    [lambda: experts_of(small.qwen3()), lambda: experts_of(small.gpt_oss()), normed],
    ids=["qwen3", "gpt_oss", "muse_spark"],
)


@KINDS
def test_no_tokens(experts, name):
    module = experts()
    x, ids = torch.zeros(0, 32), torch.zeros(0, 2, dtype=torch.int64)
    x.requires_grad_()
    out = ours(module, x, ids, torch.zeros(0, 2))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in module.parameters())


@KINDS
def test_one_expert_a_token_unsorted(experts, name):
    """As the all-to-all of expert parallelism hands rows over."""
    module = experts()
    ids, weights = pairs(24, 1, 8)
    x = torch.randn(24, 32)
    results = (outcome(run, module, x, ids, weights) for run in (ours, eager))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@KINDS
@pytest.mark.parametrize("sentinel", [8, -1, 2**40])
def test_sentinels_contribute_nothing(experts, sentinel, name):
    module = experts()
    ids, weights = pairs(24, 2, 8)
    foreign = torch.rand(24, 2) < 0.4
    foreign[0] = True
    kept = weights.detach().masked_fill(foreign, 0)
    x = torch.randn(24, 32)
    got, dx, dweights, *rest = outcome(ours, module, x, ids.masked_fill(foreign, sentinel), weights)
    wanted, wanted_dx, wanted_dweights, *wanted_rest = outcome(eager, module, x, ids, kept)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx, wanted_dx, rtol=1e-4, atol=1e-5)
    assert not got[0].any() and not dx[0].any() and not dweights[foreign].any()
    own = ~foreign
    torch.testing.assert_close(dweights[own], wanted_dweights[own], rtol=1e-4, atol=1e-5)
    for gradient, expected in zip(rest, wanted_rest, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5)


@MODELS
def test_more_choices_than_local_experts(make, name):
    """A rank of expert parallelism that holds one expert of those that a token chooses."""
    experts = {"num_experts": 1} if make is small.qwen3 else {"num_local_experts": 1}
    module = experts_of(make(**experts, num_experts_per_tok=1))
    ids = torch.tensor([[1, 0], [0, 1], [1, 1]] * 4)
    weights = torch.rand(12, 2).masked_fill(ids == 1, 0)
    x = torch.randn(12, 32)
    out = ours(module, x, ids, weights)
    alone = ours(module, x, torch.zeros(12, 1, dtype=torch.int64), weights.sum(1, keepdim=True))
    torch.testing.assert_close(out, alone, rtol=1e-5, atol=1e-6)


@MODELS
def test_frozen_experts(make, name):
    module = experts_of(make()).requires_grad_(False)
    ids, weights = pairs(12, 2, 8)
    x = torch.randn(12, 32).requires_grad_()
    ours(module, x, ids, weights).sum().backward()
    assert x.grad.any() and weights.grad.any()
    assert all(p.grad is None for p in module.parameters())


# Adapters.


@MODELS
def test_peft_on_experts(make, name, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    def adapted():
        torch.manual_seed(4)
        model = get_peft_model(
            make(),
            LoraConfig(
                r=2,
                init_lora_weights=False,
                target_modules=[],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            ),
        )
        return model

    def run(model, implementation):
        model.get_base_model().set_experts_implementation(implementation)
        model.zero_grad()
        ids = small.tokens()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    wanted, got = run(adapted(), "eager"), run(adapted(), name)
    assert len(got[1]) == 8 and all("lora" in key for key in got[1])
    small.assert_same(got, wanted, 1e-4)

    model = adapted()
    model.get_base_model().set_experts_implementation(name)
    logits = model(input_ids=small.tokens()).logits
    model.save_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = PeftModel.from_pretrained(make(), tmp_path)
    loaded.get_base_model().set_experts_implementation(name)
    torch.testing.assert_close(loaded(input_ids=small.tokens()).logits, logits)
    merged = model.merge_and_unload()
    torch.testing.assert_close(
        merged(input_ids=small.tokens()).logits, logits, rtol=1e-4, atol=1e-5
    )


# Arguments.


def test_names():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    builtin = ALL_EXPERTS_FUNCTIONS["sonicmoe"]
    try:
        for good in ("another", "another", "sonicmoe"):
            assert sonicmoe_transformers.register(good) == good
            assert ALL_EXPERTS_FUNCTIONS[good].func is sonicmoe_transformers.experts_forward
    finally:
        ALL_EXPERTS_FUNCTIONS.register("sonicmoe", builtin)
    for wrong in ("", " ", "eager", "grouped_mm", "paged|x", None):
        with pytest.raises(ValueError, match=r"^name: got "):
            sonicmoe_transformers.register(wrong)


@MODELS
@pytest.mark.parametrize("compiled", [False, True])
def test_recomputing_preactivations(make, compiled, name):
    """The same bits with less memory."""
    sparing = sonicmoe_transformers.register("sparing", recompute="preact")
    model, kept = make(), {}
    ids = small.tokens()
    for implementation in (name, sparing):
        model.set_experts_implementation(implementation)
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        kept[implementation] = 0

        def pack(tensor, implementation=implementation):
            kept[implementation] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = call(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if implementation == name:
            wanted = gradients
    assert all(torch.equal(a, b) for a, b in zip(gradients, wanted, strict=True))
    # H of two layers: 32 tokens, two experts each, 2 x 16 wide. gpt-oss keeps b1 (8, 32) instead.
    assert kept[name] - kept[sparing] >= 2 * (32 * 2 * 32 - 8 * 32)
    with pytest.raises(ValueError, match="^recompute: got 'all', allowed: 'none', 'preact'"):
        sonicmoe_transformers.register("another", recompute="all")


@MODELS
def test_shapes_are_checked(make, name):
    module, x = experts_of(make()), torch.randn(12, 32)
    ids, weights = pairs(12, 2, 8)
    for wrong in ((ids.T, weights), (ids, weights.T), (ids[:, 0], weights[:, 0])):
        with pytest.raises(ValueError, match=r"^top_k_index, top_k_weights: got shapes"):
            ours(module, x, *wrong)


def test_quantized_weights_are_refused(name):
    module = experts_of(small.qwen3()).requires_grad_(False)
    module.gate_up_proj.data = module.gate_up_proj.data.to(torch.float8_e4m3fn)
    with pytest.raises(
        TypeError, match=r"^gate_up_proj: got torch.float8_e4m3fn, allowed: float32"
    ):
        ours(module, torch.randn(12, 32), *pairs(12, 2, 8))


def test_sizes_that_no_kernel_takes(name):
    module = experts_of(small.qwen3(hidden_size=20, head_dim=8))
    with pytest.raises(ValueError, match="^hidden: got 20, allowed: multiples of 8"):
        ours(module, torch.randn(12, 20), *pairs(12, 2, 8))


def test_snippet():
    for block in snippets.of_section("Hugging Face transformers"):
        exec(block, {})
