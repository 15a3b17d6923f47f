"""A recurrent language model."""

from torch import Tensor, nn


class LSTM(nn.Module):
    """Predict each next token with a long short-term memory.

    Tokens (B, T) int64 -> logits (B, T, vocab_size); position t sees the tokens up to t. `dropout` is the
    probability between layers, without effect in a single layer.
    Source: Hochreiter and Schmidhuber, Long Short-Term Memory, 1997.
    """

    def __init__(
        self, vocab_size: int, width: int = 128, num_layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(
            width, width, num_layers, batch_first=True, dropout=dropout if num_layers > 1 else 0.0
        )
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Give the logits of the token after each position."""
        hidden, _ = self.lstm(self.embedding(tokens))
        return self.head(hidden)
