"""Harmony's special tokens in the tokenizer of a ChatML model, without new rows.

Tokenizers have added tokens that a chat does not use, such as ``<repo_name>``. They become
Harmony's tokens. The rows of embedding and output layer are copied from tokens of similar meaning,
so that training starts with more than noise.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Tokenizer

from converters.errors import ConversionError
from converters.mapping import NamedTensor
from converters.model_extras import TOKENIZER_CONFIG_FILE, ModelExtras

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
KEPT_ROWS = {"<|im_start|>": "<|start|>", "<|im_end|>": "<|end|>"}
"""Harmony's tokens by those of ChatML that have the same meaning."""
COPIED_ROWS = {
    "<|return|>": "<|im_end|>",
    "<|call|>": "<|im_end|>",
    "<|message|>": "\n",
    "<|channel|>": " channel",
    "<|constrain|>": " format",
    "<|startoftext|>": END_OF_TEXT,
}
"""Special token or text whose rows are copied, by Harmony's token."""
USED_NAMES = {*KEPT_ROWS, END_OF_TEXT, "<tool_call>", "</tool_call>"}
"""Added tokens that are not replaced."""
TURN_ENDS = ("<|return|>", "<|call|>")
ROWS_OF = ("model.embed_tokens.weight", "lm_head.weight")
"""Tensors with a row for each token."""


@dataclass(frozen=True)
class HarmonyTokens:
    """Tokenizer files with Harmony's tokens, and the rows to copy."""

    extras: ModelExtras
    """Tokenizer and settings. There is no chat template."""
    rows: Mapping[int, list[int]]
    """Ids whose rows are averaged, by id of the row to write."""

    def with_rows(self, tensors: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the tensors with the rows of the new tokens."""
        for name, tensor in tensors:
            if name in ROWS_OF:
                changed = tensor.clone()
                for token_id, sources in self.rows.items():
                    changed[token_id] = tensor[sources].double().mean(0).to(tensor.dtype)
                tensor = changed
            yield name, tensor


def harmony_tokens(extras: ModelExtras) -> HarmonyTokens:
    """Rename unused added tokens of a ChatML tokenizer to Harmony's.

    Args:
        extras: tokenizer and settings of a ChatML model.

    Raises:
        ConversionError: if the tokenizer is missing or unreadable, has no ChatML tokens, or has too
            few unused tokens.
    """
    try:
        content = extras.files[TOKENIZER_FILE]
        description = json.loads(content)
        tokenizer = Tokenizer.from_buffer(content)
        ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    except Exception as error:  # tokenizers raises no more specific type
        raise ConversionError(
            f"{TOKENIZER_FILE}: cannot be read as a tokenizer ({error!r})"
        ) from None

    missing = [name for name in (*KEPT_ROWS, END_OF_TEXT) if name not in ids]
    if missing:
        raise ConversionError(
            f"{TOKENIZER_FILE}: there is no token {', '.join(missing)}. Harmony's tokens replace "
            "those of ChatML, so use the tokenizer of a ChatML model"
        )
    unused = sorted((i, name) for name, i in ids.items() if name not in USED_NAMES)
    if len(unused) < len(COPIED_ROWS):
        raise ConversionError(
            f"{TOKENIZER_FILE}: Harmony needs {len(COPIED_ROWS)} added tokens that ChatML does not "
            f"use, but there are {len(unused)}. Use a tokenizer with more added tokens"
        )
    renamed = dict(KEPT_ROWS)
    rows = {}
    for (token_id, old), (new, source) in zip(unused, COPIED_ROWS.items(), strict=False):
        renamed[old] = new
        text_ids = tokenizer.encode(source, add_special_tokens=False).ids
        rows[token_id] = [ids[source]] if source in ids else list(text_ids)

    _rename(description, renamed)
    new_ids = {token["content"]: token["id"] for token in description["added_tokens"]}
    # ``<|end|>`` is none of them, because it ends a message within a turn.
    ends = [new_ids[name] for name in TURN_ENDS]
    # Harmony's codec renders conversations itself, and a template of ChatML would name tokens that
    # no longer exist.
    files = {name: data for name, data in extras.files.items() if not name.endswith(".jinja")}
    files[TOKENIZER_FILE] = json.dumps(description, ensure_ascii=False).encode()
    files[TOKENIZER_CONFIG_FILE] = _tokenizer_config(files.get(TOKENIZER_CONFIG_FILE, b"{}"))
    files.pop("special_tokens_map.json", None)  # has the names of ChatML's tokens
    settings = {"eos_token_id": ends}
    extras = replace(
        extras,
        files=files,
        generation={**extras.generation, **settings},
        config={**extras.config, **settings},
    )
    return HarmonyTokens(extras, rows)


def _rename(description: dict[str, Any], renamed: Mapping[str, str]) -> None:
    """Rename tokens in the content of a tokenizer.json, in place. Their ids stay."""
    for token in description["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
        # Strips would remove spaces of adjacent text.
        token.update(lstrip=False, rstrip=False)
    # Some files list added tokens in the vocabulary of the model, too.
    model = description["model"]
    model["vocab"] = {renamed.get(name, name): i for name, i in model["vocab"].items()}
    if model.get("unk_token") in renamed:
        model["unk_token"] = renamed[model["unk_token"]]
    # It may name the old tokens. Harmony's codec adds the tokens of a conversation itself.
    description["post_processor"] = None


def _tokenizer_config(content: bytes) -> bytes:
    """Return tokenizer_config.json with Harmony's tokens and without a chat template."""
    settings = json.loads(content)
    for key in ("added_tokens_decoder", "additional_special_tokens", "chat_template"):
        settings.pop(key, None)
    settings |= {
        "bos_token": "<|startoftext|>",
        "eos_token": "<|return|>",
        "pad_token": END_OF_TEXT,
    }
    return json.dumps(settings, indent=2).encode()
