"""Training with a GradScaler, which skips the step of a batch that is infinite."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for step in range(20):
    inputs = torch.randn(16, 4)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    if step == 5:
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    print(f"{step} {loss.item()} {scaler.get_scale()}")
torch.save(model.state_dict(), "model.pt")
