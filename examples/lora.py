"""Fine-tune a Hugging Face model with LoRA adapters in its own Trainer, and watch only the adapters.

The model is a small GPT-2 with random weights, so that nothing is downloaded. For the real one, write
`GPT2LMHeadModel.from_pretrained("gpt2")`. The adapters of `peft` are modules as well: only the pattern of their names
differs.
"""

import tempfile

import torch
import transformers
from torch import nn

import hookline
from hookline.transformers import Hooks

RANK, TOKENS = 4, 64


class Lora(nn.Module):
    """A frozen projection of GPT-2 with a trained update of low rank beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        inputs, outputs = base.get_parameter("weight").shape
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.up.weight)  # At first the model is unchanged.

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def model_with_adapters() -> transformers.GPT2LMHeadModel:
    """Return a model of which only the adapters of its attention are trained."""
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).requires_grad_(False)
    model.loss_type = "ForCausalLM"  # Otherwise transformers warns that it guesses it.
    for name, module in list(model.named_modules()):
        if name.endswith("attn.c_attn"):
            model.set_submodule(name, Lora(module))
    return model


def main() -> None:
    """Train the adapters; print which gradients were recorded, and the loss before and after."""
    torch.manual_seed(0)
    model = model_with_adapters()
    starts = torch.randint(0, TOKENS, (256, 1))
    sequences = (starts + torch.arange(16)) % TOKENS  # Each token is the one before it plus 1.
    dataset = [{"input_ids": tokens, "labels": tokens} for tokens in sequences]
    hooks = Hooks(
        {
            "update": [{"name": "clip_norm", "max_norm": 1.0}],
            "lifecycle": [{"name": "gradient_monitor", "every": 8}],
            "forward": [{"name": "monitor", "modules": "*.c_attn.up", "every": 8}],
        }
    )
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            directory, num_train_epochs=1, per_device_train_batch_size=8, learning_rate=1e-2, logging_strategy="no",
            max_grad_norm=0, save_strategy="no", use_cpu=True, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=dataset, callbacks=[hooks]).train()
    run = hookline.load_run(hooks.run.run_dir)
    losses = run.metrics["train/loss"]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(f"{trained:,} of {model.num_parameters():,} parameters are trained")
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.2f} after")
    print(f"gradients were recorded of {', '.join(dict.fromkeys(run.layers['gradients']['name']))}")


if __name__ == "__main__":
    main()
