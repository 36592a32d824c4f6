"""Sink attention in a plain torch model, without Megatron.

    python examples/sink_attention_in_torch.py [STEPS]

A decoder of one layer learns to repeat: every sequence is a repeated random motif of 8 tokens. Runs
on a GPU if there is one, else on the CPU. Needs only torch and ``gptoss_kernels``.
"""

import math
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

from gptoss_kernels.sink_attention import sink_attention

VOCABULARY = 32
MOTIF = 8
WINDOW = 16
"""Number of visible tokens, including the query's own; None for the whole prefix."""
LENGTHS = (24, 40, 16, 48)
"""Lengths of the sequences of a batch. They are packed in one row without padding."""


class SinkAttention(nn.Module):
    """Causal self-attention over packed sequences, with one sink per query head."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.queries = nn.Linear(width, heads * self.head_size)
        self.keys = nn.Linear(width, kv_heads * self.head_size)
        self.values = nn.Linear(width, kv_heads * self.head_size)
        self.output = nn.Linear(heads * self.head_size, width)

        # The sink is a logit without a value, so a head can attend to no token.
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, hidden: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Attend: hidden [tokens, width] -> [tokens, width]."""
        attended = sink_attention(
            self.queries(hidden).unflatten(-1, (-1, self.head_size)),
            self.keys(hidden).unflatten(-1, (-1, self.head_size)),
            self.values(hidden).unflatten(-1, (-1, self.head_size)),
            self.sinks,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(LENGTHS),
            window=WINDOW,
        )
        return self.output(attended.flatten(-2))


class Decoder(nn.Module):
    """Token and position embeddings, one layer of attention and MLP, and a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(max(LENGTHS), width)
        self.attention_norm = nn.RMSNorm(width)
        self.attention = SinkAttention(width, heads=4, kv_heads=2)
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 256), nn.SiLU(), nn.Linear(256, width)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Predict: token ids [tokens] -> logits [tokens, vocabulary]."""
        hidden = self.tokens(tokens) + self.positions(positions)
        hidden = hidden + self.attention(self.attention_norm(hidden), cu_seqlens)
        hidden = hidden + self.mlp(hidden)
        return self.head(hidden)


def random_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return packed token ids [tokens] and their next tokens, -100 for unpredictable ones."""
    tokens = []
    targets = []
    for length in LENGTHS:
        motif = torch.randint(VOCABULARY, (MOTIF,), generator=generator)
        sequence = motif.repeat(length // MOTIF + 1)[: length + 1]
        following = sequence[1:].clone()
        following[: MOTIF - 1] = -100
        tokens.append(sequence[:-1])
        targets.append(following)
    return torch.cat(tokens), torch.cat(targets)


def train(steps: int, device: str) -> list[float]:
    """Train and return the loss of each step in nats per predictable token."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Decoder().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    # Created once, because it is equal for all batches. The kernels copy a new cu_seqlens tensor to
    # the host, which synchronizes with the GPU.
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)

    losses = []
    for _ in range(steps):
        tokens, targets = random_batch(generator)
        logits = model(tokens.to(device), positions, cu_seqlens)
        loss = functional.cross_entropy(logits, targets.to(device))

        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    print("sinks:", model.attention.sinks.tolist())
    return losses


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    losses = train(steps, device="cuda" if torch.cuda.is_available() else "cpu")
    for step in range(0, steps, 50):
        print(f"step {step:4d}: loss {losses[step]:.3f}")
    print(f"last step: loss {losses[-1]:.3f}; a uniform guess has {math.log(VOCABULARY):.3f}")


if __name__ == "__main__":
    main()
