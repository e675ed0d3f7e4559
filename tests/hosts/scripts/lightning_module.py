"""A LightningModule with accumulated gradients and clipping."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 16))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    L.seed_everything(7, verbose=False)
    loader = DataLoader(TensorDataset(torch.randn(160, 16)), batch_size=8, shuffle=True)
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = LitAutoEncoder()
    trainer.fit(model, loader, DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=8))
    print({name: round(value.item(), 8) for name, value in trainer.callback_metrics.items()})
    torch.save(model.state_dict(), "model.pt")
