"""The model that benchmarks train on a GPU: GPT-2, in two widths."""

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 50304  # GPT-2's 50257, rounded up as people do: matrix products are a third faster for it


class Block(nn.Module):
    """One layer of a GPT: six leaf modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the two linear layers, each added to what came in."""
        batch, length, width = x.shape
        mixed = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = mixed
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        widened = functional.gelu(self.widen(self.norm_2(x)), approximate="tanh")
        out: Tensor = x + self.narrow(widened)
        return out


class GPT(nn.Module):
    """GPT-2 without dropout: with twelve layers 75 leaf modules, whose outputs are 2.5 GB for a batch of 8 x 1024."""

    def __init__(
        self, width: int, heads: int, layers: int = 12, vocabulary: int = VOCABULARY, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits
