"""A small decoder-only transformer over characters: it trains on a laptop and is built like the large ones."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hookline.errors import HooklineError


class Attention(nn.Module):
    """Causal self-attention: every position attends to itself and to earlier positions."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Mix [batch, time, width] along time."""
        # [batch, time, 3 * width] becomes three times [batch, heads, time, width / heads].
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        # The function, unlike nn.Dropout, does not know whether the model is in training mode.
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return F.dropout(self.project(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)


class MLP(nn.Module):
    """The position-wise half of a block: a hidden layer four times as wide, with GELU."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.widen = nn.Linear(width, 4 * width)
        self.project = nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        """Transform every position of [batch, time, width] independently."""
        return F.dropout(self.project(F.gelu(self.widen(x))), self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention, then the MLP, each applied to the normalized residual stream and added to it."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width, dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Refine the residual stream [batch, time, width]."""
        mixed: Tensor = x + self.attention(self.attention_norm(x))
        refined: Tensor = mixed + self.mlp(self.mlp_norm(mixed))
        return refined


class CharGPT(nn.Module):
    """Predicts the next character; returns its own loss when it is given labels.

    `model(input_ids)` gives `{"logits": [batch, time, vocab_size]}`; with `labels` (already shifted by one)
    the dict also holds `"loss"`, the mean cross entropy in nats per character.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        dropout: float = 0.0,
        tie: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise HooklineError(f"CharGPT: width={width} is not a multiple of heads={heads}; make it one")
        self.context = context
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if tie:
            self.head.weight = self.embed.weight
        self._init_weights(layers)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Score every next character of `input_ids` [batch, time]; `labels` has the same shape."""
        x = self.embed(input_ids)
        time = input_ids.shape[-1]
        if time > self.context:
            raise HooklineError(f"CharGPT: got {time} characters, but its limit is context={self.context}")
        x = x + self.position(torch.arange(time, device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if labels is None:
            return {"logits": logits}
        return {"logits": logits, "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    def _init_weights(self, layers: int) -> None:
        """Draw all matrices from N(0, 0.02), those that write to the residual stream smaller.

        Each layer adds twice to it; dividing by sqrt(2 * layers) makes its variance independent of depth.
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                writes_to_stream = name.endswith("project.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes_to_stream else 0.02)
