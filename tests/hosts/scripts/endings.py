"""A short training that ends in the way that is asked for."""

import argparse
import os
import signal
import sys

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("how", choices=["normal", "exception", "exit3", "bye", "_exit", "SIGTERM", "SIGINT", "in closure"])
args = parser.parse_args()


def closure():
    raise KeyError("closure")


def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        inputs = torch.randn(16, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item(), flush=True)
    if args.how == "exception":
        model(inputs).backward()
    elif args.how == "exit3":
        sys.exit(3)
    elif args.how == "bye":
        sys.exit("bye")
    elif args.how == "_exit":
        os._exit(4)
    elif args.how.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, args.how))
    elif args.how == "in closure":
        optimizer.step(closure)


main()
