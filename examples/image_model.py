"""Train a small residual network on images, with the hooks that such a run needs from the first day.

The images are made here, so that nothing is downloaded; put your own dataset in their place.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hookline
from hookline import ResumableSampler, SimpleTrainer, TrainingHook

SIZE, CLASSES = 16, ("horizontal", "vertical", "diagonal")


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, channels: int, out_channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), nn.BatchNorm2d(out_channels),
        )  # fmt: skip
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride=2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def images(count: int, seed: int) -> TensorDataset:
    """Make color images of noisy stripes in one of three directions."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    directions = torch.stack([rows, columns, rows + columns])[labels]
    phase = torch.rand(count, 1, 1, generator=generator) * 6
    stripes = (directions + phase).sin().unsqueeze(1)
    return TensorDataset(stripes + 1.5 * torch.randn(count, 3, SIZE, SIZE, generator=generator), labels)


class FirstImages(TrainingHook):
    """Record what the network sees, once."""

    def on_validation_batch_end(self, batch: list[torch.Tensor], batch_idx: int, trainer: hookline.Trainer) -> None:
        if batch_idx == 0:
            grid = batch[0][:8].transpose(0, 1).flatten(1, 2)  # eight images below each other
            trainer.log_image("inputs", (grid / 4 + 0.5).clamp(0, 1))


def main() -> None:
    """Train two epochs with a warm-up, averaged weights, the best checkpoint and monitors."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Block(8, 16), Block(16, 32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, len(CLASSES)),
    )  # fmt: skip
    train = images(384, seed=1)
    loader = DataLoader(train, batch_size=32, sampler=ResumableSampler(train, seed=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    trainer = SimpleTrainer(
        model,
        loader,
        optimizer,
        "cpu",
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
        val_dataloader=DataLoader(images(128, seed=2), batch_size=64),
        metrics=["accuracy"],
        scheduler=torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=2 * len(loader)),
        max_epochs=2,
        seed=0,
        name="image-model",
        hooks={
            "lifecycle": [
                {"name": "checkpoint", "monitor": "val/accuracy", "mode": "max"},
                {"name": "ema", "decay": 0.95},
                {"name": "confusion_matrix", "classes": list(CLASSES)},
                "gradient_monitor",
            ],
            "forward": [{"name": "monitor", "modules": "class:ReLU", "metrics": ["dead_units", "std"], "every": 4}],
            "update": [{"name": "clip_norm", "max_norm": 1.0}],
        },
    )
    trainer.add_hook(FirstImages())
    trainer.train()
    accuracy = [value for value in hookline.load_run(trainer.run_dir).metrics["val/accuracy"] if value is not None]
    print(f"accuracy of each epoch: {', '.join(f'{value:.2f}' for value in accuracy)}")


if __name__ == "__main__":
    main()
