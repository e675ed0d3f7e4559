"""A compiled perceptron; the backend counts its graphs."""

import torch
from torch import nn

torch.manual_seed(0)
graphs = []


def counting(graph, example_inputs):
    graphs.append(graph)
    return graph.forward


model = torch.compile(
    nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 1)),
    backend=counting,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(50):
    inputs = torch.randn(16, 8)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item())
print("graphs:", len(graphs))
torch.save(model.state_dict(), "model.pt")
