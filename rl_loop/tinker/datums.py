"""Conversion of a client's datums to samples of the trainer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_gptoss.samples import TrainingSamples
from rl_loop.algorithms.summed_losses import SUMMED_LOSSES, SummedLoss
from rl_loop.tinker.errors import ClientError
from rl_loop.tinker.wire import read_tensor, read_tokens

TARGETS = "target_tokens"
"""Name of the labels in a datum."""
COLUMN_OF_INPUT = {
    "weights": "loss_weights",
    "logprobs": "rollout_log_probs",
    "advantages": "advantages",
}
"""Columns of samples by the client's names. Loss functions ignore other inputs."""
OPTIONS = {
    "ppo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "cispo": {"clip_low_threshold": "clip_low", "clip_high_threshold": "clip_high"},
    "dro": {"beta": "beta"},
}
"""Fields of ``SummedLoss`` by the client's names, for each loss with options."""


@dataclass(frozen=True)
class PassRequest:
    """A request for a pass over datums."""

    samples: TrainingSamples
    """One sequence per datum. It has one token more than the datum, which is not an input."""
    loss: SummedLoss
    """Loss of the pass."""
    forward_only: bool
    """True if the pass must not change the gradient."""

    def split(self, column: np.ndarray) -> list[np.ndarray]:
        """Cut a column [tokens] into the labels of each datum."""
        # The first token of a sequence is not a label.
        return [row[1:] for row in np.split(column, self.samples.offsets[1:-1])]


def read_passes(
    message: Any, vocabulary_size: int, max_tokens: int, part_tokens: int
) -> list[PassRequest]:
    """Read a ``ForwardBackwardRequest``.

    Args:
        message: the request.
        vocabulary_size: exclusive upper bound of token ids.
        max_tokens: maximum tokens of a datum.
        part_tokens: maximum tokens of a part, if it has more than one datum.

    Returns:
        Parts of the request. Their losses add up to that of the request.

    Raises:
        ClientError: the loss is unknown, or a datum does not fit.
    """
    loss = read_loss(message.loss_fn, message.loss_fn_config_v2)
    if len(message.data) == 0:
        raise ClientError("the request has no datums")
    parts: list[list[dict[str, np.ndarray]]] = [[]]
    size = 0
    for number, datum in enumerate(message.data):
        owner = f"datum {number}"
        tokens = read_tokens(datum.model_input, owner)
        if not 1 <= len(tokens) <= max_tokens:
            raise ClientError(f"{owner} has {len(tokens)} tokens; 1 to {max_tokens} are possible")
        inputs = {
            name: read_tensor(tensor, f"{owner}: {name}")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        size += len(tokens)
        if parts[-1] and size > part_tokens:
            parts.append([])
            size = len(tokens)
        parts[-1].append(_row(tokens, inputs, loss, vocabulary_size, owner))
    return [
        PassRequest(
            TrainingSamples.join(rows, [f"datum {number}" for number in range(len(rows))]),
            loss,
            message.forward_only,
        )
        for rows in parts
    ]


def read_loss(name: str, config: Mapping[str, Any]) -> SummedLoss:
    """Return the loss of a request.

    Args:
        name: name of the loss.
        config: messages ``LossConfigValue`` by name.

    Raises:
        ClientError: the loss or an option is not served.
    """
    if name not in SUMMED_LOSSES:
        served = ", ".join(SUMMED_LOSSES)
        raise ClientError(f"loss_fn {name!r} is not served here. Use one of {served}")
    options = OPTIONS.get(name, {})
    values = {}
    for key, value in config.items():
        if key not in options:
            known = ", ".join(options) or "no options"
            raise ClientError(f"loss_fn_config: {name} has no option {key!r}, but {known}")
        if value.WhichOneof("value") != "number" or not np.isfinite(value.number):
            raise ClientError(f"loss_fn_config: {key} is not a finite number")
        values[options[key]] = value.number
    return SummedLoss(name, **values)


def _row(
    tokens: np.ndarray,
    inputs: Mapping[str, np.ndarray],
    loss: SummedLoss,
    vocabulary_size: int,
    owner: str,
) -> dict[str, np.ndarray]:
    """Return the columns of a datum as those of a sequence with one more token."""
    targets = inputs.get(TARGETS)
    if targets is None:
        raise ClientError(f"{owner} has no {TARGETS}")
    if targets.ndim == 2:
        raise ClientError(
            f"{owner}: {TARGETS} has several tokens per position, which is not served"
        )
    if targets.shape != tokens.shape or targets.dtype.kind != "i":
        raise ClientError(
            f"{owner}: {TARGETS} must be {len(tokens)} integers, one for each token, but has the "
            f"shape {list(targets.shape)} of {targets.dtype}"
        )
    for ids in (tokens, targets):
        if ids.min() < 0 or ids.max() >= vocabulary_size:
            raise ClientError(
                f"{owner}: token ids reach from {ids.min()} to {ids.max()}, but the vocabulary has "
                f"{vocabulary_size}"
            )

    # The first entry of a column of labels is unused. The last token is never an input.
    row = {
        "token_ids": np.append(tokens, targets[-1]).astype(np.int32),
        "target_ids": np.insert(targets, 0, 0).astype(np.int32),
        "loss_mask": np.ones(len(tokens) + 1, np.bool_),
    }
    for name, column in COLUMN_OF_INPUT.items():
        if column in loss.columns:
            values = _label_values(inputs.get(name), name, len(tokens), loss, owner)
            row[column] = np.insert(values, 0, 0).astype(np.float32)
    return row


def _label_values(
    values: np.ndarray | None, name: str, tokens: int, loss: SummedLoss, owner: str
) -> np.ndarray:
    """Return the numbers of a datum's labels, float32 [tokens]."""
    if values is None and name == "weights":
        # The SDK's custom losses ask for log-probs without weights.
        return np.ones(tokens, np.float32)
    if values is None:
        raise ClientError(f"{owner}: {loss.name} needs {name}")
    if values.shape != (tokens,):
        raise ClientError(
            f"{owner}: {name} has the shape {list(values.shape)}, but there are {tokens} tokens"
        )
    if not np.isfinite(values).all():
        raise ClientError(f"{owner}: {name} has values that are not finite")
    return values.astype(np.float32)
