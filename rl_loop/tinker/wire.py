"""Protobuf messages of the Tinker API, built from a table.

The server needs ``protobuf`` only. A test compares the table with the messages of the SDK.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rl_loop.tinker.errors import ClientError

SDK_VERSION = "0.38.0"
"""Version of the SDK whose messages the table describes."""
CONTENT_TYPE = "application/x-protobuf"
"""Content type of requests and answers with messages."""

PACKAGE = "gptoss_tinker"
"""Package of the messages. It is not sent, and differs from the SDK's, so that one process can use
both."""

ENUMS = {
    "StopReason": ["STOP_REASON_STOP", "STOP_REASON_LENGTH"],
    "DType": [
        "DTYPE_UNSPECIFIED",
        "DTYPE_FLOAT32",
        "DTYPE_INT64",
        "DTYPE_INT32",
        "DTYPE_BFLOAT16",
    ],
}
"""Values of each enum in the order of their numbers."""
STOP, LENGTH = range(2)
"""Values of ``StopReason``."""
DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.float32),
    2: np.dtype(np.int64),
    3: np.dtype(np.int32),
}
"""NumPy's dtypes by number of ``DType``. NumPy has no bfloat16."""

TABLE: dict[str, dict[int, str]] = {
    "SampleResponse": {
        1: "repeated SampledSequence sequences",
        2: "optional bytes prompt_logprobs",
        3: "optional TopkLogprobs topk_prompt_logprobs",
        4: "int32 prompt_cache_hit_tokens",
        5: "optional Tensor target_prompt_logprobs",
        6: "optional PromptAltTokens prompt_alt_tokens",
    },
    "PromptAltTokens": {1: "Tensor tokens", 2: "Tensor logprobs"},
    "SampledSequence": {
        1: "StopReason stop_reason",
        2: "bytes tokens",
        3: "optional bytes logprobs",
        4: "optional TopkLogprobs topk_sampled_logprobs",
    },
    "TopkLogprobs": {
        1: "bytes token_ids",
        2: "bytes logprobs",
        3: "uint32 k",
        4: "uint32 length",
    },
    "SparseCsr": {1: "bytes values", 2: "bytes crow_indices", 3: "bytes col_indices"},
    "Tensor": {
        1: "encoding: bytes dense",
        2: "encoding: SparseCsr sparse_csr",
        3: "DType dtype",
        4: "repeated int64 shape",
    },
    "BatchedTensor": {
        1: "bytes data",
        2: "bytes offsets",
        3: "DType dtype",
        4: "repeated int64 trailing_shape",
    },
    "ArrayRecord": {1: "string type_tag", 2: "map BatchedTensor fields", 3: "int64 num_datums"},
    "ForwardBackwardOutput": {
        1: "string loss_fn_output_type",
        2: "repeated ArrayRecord loss_fn_outputs",
        3: "map double metrics",
    },
    "ForwardBackwardRequest": {
        1: "string model_id",
        2: "int32 seq_id",
        3: "repeated Datum data",
        4: "string loss_fn",
        5: "map double loss_fn_config",
        6: "bool forward_only",
        7: "map LossConfigValue loss_fn_config_v2",
    },
    "LossConfigValue": {1: "value: double number", 2: "value: string text"},
    "Datum": {
        1: "repeated Chunk model_input",
        2: "map Tensor loss_fn_inputs",
        3: "repeated ProvenanceSpan model_input_spans",
        4: "repeated ProvenanceSpan loss_fn_input_spans",
    },
    "ProvenanceSpan": {
        1: "span: PromptProvenanceSpan prompt_tokens",
        2: "span: SampledProvenanceSpan sampled_tokens",
    },
    "PromptProvenanceSpan": {1: "string sequence_id", 2: "int64 offset", 3: "int64 length"},
    "SampledProvenanceSpan": {1: "string sequence_id", 2: "int64 offset", 3: "int64 length"},
    "Chunk": {
        1: "chunk: EncodedTextChunk encoded_text",
        2: "chunk: ImageChunk image",
        3: "chunk: DmelChunk dmel",
    },
    "EncodedTextChunk": {1: "bytes tokens"},
    "ImageChunk": {
        1: "bytes data",
        2: "string format",
        3: "optional int32 expected_tokens",
        4: "optional ImageDimensions override_dimensions",
    },
    "ImageDimensions": {1: "uint32 width", 2: "uint32 height"},
    "DmelChunk": {1: "bytes dmel"},
}
"""Fields of each message by number. A prefix ``NAME:`` names the oneof of a field."""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("double", "int64", "int32", "uint32", "bool", "string", "bytes")
}


def _set_type(field: Any, name: str) -> None:
    """Set the type of a field to a scalar, enum or message."""
    if name in _SCALARS:
        field.type = _SCALARS[name]
        return
    field.type = _Field.TYPE_ENUM if name in ENUMS else _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{name}"


def _add_map(message: Any, field: Any, value_type: str) -> None:
    """Make ``field`` a map from strings. On the wire, a map is a list of entries."""
    entry_name = "".join(word.capitalize() for word in field.name.split("_")) + "Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    key = entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL)
    _set_type(key, "string")
    value = entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL)
    _set_type(value, value_type)
    field.label = _Field.LABEL_REPEATED
    field.type = _Field.TYPE_MESSAGE
    field.type_name = f".{PACKAGE}.{message.name}.{entry_name}"


def _add_message(file: Any, name: str, fields: Mapping[int, str]) -> None:
    """Add a message of the table to the description of a file."""
    message = file.message_type.add(name=name)
    groups: dict[str, int] = {}
    with_presence = []
    for number, declaration in fields.items():
        group, _, rest = declaration.rpartition(": ")
        *modifier, type_name, field_name = rest.split()
        field = message.field.add(name=field_name, number=number, label=_Field.LABEL_OPTIONAL)
        if modifier == ["map"]:
            _add_map(message, field, type_name)
            continue
        _set_type(field, type_name)
        if modifier == ["repeated"]:
            field.label = _Field.LABEL_REPEATED
        elif modifier == ["optional"]:
            with_presence.append(field)
        if group and group not in groups:
            groups[group] = len(message.oneof_decl)
            message.oneof_decl.add(name=group)
        if group:
            field.oneof_index = groups[group]

    # proto3 records the presence of a field with a oneof of its own, after all others.
    for field in with_presence:
        field.proto3_optional = True
        field.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{field.name}")


def _build_messages() -> dict[str, Any]:
    """Return the class of each message of the table."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3"
    )
    for name, values in ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in TABLE.items():
        _add_message(file, name, fields)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    messages = pool.FindFileByName(file.name).message_types_by_name
    return {name: message_factory.GetMessageClass(messages[name]) for name in TABLE}


MESSAGES = _build_messages()
"""Classes of the messages by name."""


def read_message(name: str, body: bytes) -> Any:
    """Parse a message.

    Raises:
        ClientError: the bytes are not such a message.
    """
    try:
        return MESSAGES[name].FromString(body)
    except Exception:
        # protobuf's class of this error depends on its implementation.
        raise ClientError(f"the body is not a message {name}") from None


def read_tokens(chunks: Sequence[Any], owner: str) -> np.ndarray:
    """Return the tokens of a model input, int32 [tokens].

    Args:
        chunks: messages ``Chunk``.
        owner: name of the input in messages.

    Raises:
        ClientError: a chunk is not text.
    """
    parts = [np.zeros(0, np.int32)]
    for chunk in chunks:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise ClientError(f"{owner}: the model reads text only, not images or audio")
        parts.append(_array(chunk.encoded_text.tokens, np.dtype(np.int32), owner))
    return np.concatenate(parts)


def read_tensor(tensor: Any, owner: str) -> np.ndarray:
    """Return the values of a message ``Tensor`` in its shape.

    Args:
        tensor: the message.
        owner: name of the tensor in messages.

    Raises:
        ClientError: the tensor is sparse, has an unknown dtype, or its bytes do not fit.
    """
    if tensor.WhichOneof("encoding") == "sparse_csr":
        raise ClientError(f"{owner}: sparse tensors are not supported")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ClientError(f"{owner}: dtype {tensor.dtype} is not float32, int64 or int32")
    values = _array(tensor.dense, dtype, owner)
    shape = tuple(tensor.shape) or (len(values),)
    if min(shape) < 0 or int(np.prod(shape, dtype=np.float64)) != len(values):
        raise ClientError(f"{owner}: {len(values)} values do not have the shape {list(shape)}")
    return values.reshape(shape)


def _array(content: bytes, dtype: np.dtype, owner: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise ClientError(f"{owner}: {len(content)} bytes are not whole {dtype} values")
    return np.frombuffer(content, dtype)


def write_output(log_probs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return the bytes of a ``ForwardBackwardOutput``.

    Args:
        log_probs: log-probs of each datum, float32 [labels].
        metrics: sums by name. The client requires names such as ``loss:sum``.
    """
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        output.metrics[name] = value
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(log_probs))
    field = record.fields["logprobs"]
    field.data = b"".join(row.tobytes() for row in log_probs)
    # Offsets count bytes.
    sizes = np.cumsum([0, *(row.nbytes for row in log_probs)])
    field.offsets = sizes.astype(np.int64).tobytes()
    field.dtype = 1
    return bytes(output.SerializeToString())


def write_samples(
    sequences: Sequence[tuple[Sequence[int], Sequence[float], bool]],
    prompt_log_probs: np.ndarray | None,
) -> bytes:
    """Return the bytes of a ``SampleResponse``.

    Args:
        sequences: tokens and log-probs of each sample, and True if it ended with a stop token.
        prompt_log_probs: float32 [tokens of the prompt], NaN for tokens without a log-prob. None if
            not requested.
    """
    response = MESSAGES["SampleResponse"]()
    for tokens, log_probs, stopped in sequences:
        response.sequences.add(
            stop_reason=STOP if stopped else LENGTH,
            tokens=np.array(tokens, np.int32).tobytes(),
            logprobs=np.array(log_probs, np.float32).tobytes(),
        )
    if prompt_log_probs is not None:
        response.prompt_logprobs = prompt_log_probs.astype(np.float32).tobytes()
    return bytes(response.SerializeToString())
