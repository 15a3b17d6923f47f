"""A decoder-only transformer language model."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampexp.messages import UserError, refusal


class Transformer(nn.Module):
    """Predict each next token with causal self-attention, normalised before each part, with learned positions.

    Tokens (B, T) int64, T at most sequence_length -> logits (B, T, vocab_size); position t sees the tokens up to t.
    `dropout` is the probability on each residual branch. Raises UserError where num_heads does not divide width.
    Source: Radford et al., Language Models are Unsupervised Multitask Learners, 2019 (GPT-2).
    """

    def __init__(
        self,
        vocab_size: int,
        sequence_length: int = 128,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise UserError(
                refusal("num_heads of Transformer", f"a divisor of the width {width}", num_heads)
            )
        self.embedding = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(sequence_length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, num_heads, dropout) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the token after each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        return self.head(self.norm(self.blocks(x)))


class _Block(nn.Module):
    """Add attention over the past, then a two-layer perceptron, each on the normalised input."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (B, T, 3 * width) -> three of (B, heads, T, width / heads)
        heads = self.qkv(x).view(batch, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projection(y.transpose(1, 2).reshape(batch, length, width))
