"""Tokenizer, chat templates and settings of a model directory.

Conversions copy them. With another tokenizer, texts become other tokens. With other settings,
sampling does not stop at the end tokens.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from megatron_gptoss.config.hf_config import COPIED
from megatron_gptoss.families.registry import known_family
from megatron_gptoss.untrusted_files import (
    MAX_LISTING_BYTES,
    MAX_SETTINGS_BYTES,
    UntrustedFileError,
    parse_json,
    read_bytes,
)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of named chat templates."""
EXTRAS_FOLDER = "hugging_face"
"""Folder in an imported checkpoint with the extras of the Hugging Face model."""

_TOKENIZER_FILE = re.compile(
    r"(tokenizer|vocab|merges|chat_template).*"
    r"|(added_tokens|special_tokens_map|encoder|normalizer|tekken|byte_maps|emoji|entity_vocab"
    r"|target_vocab|word_shape|word_pronunciation)\.json"
    r"|dict\.txt|.*\.(model|tiktoken|spm|tokenizer|jinja|codes|bpe)"
)
"""Names of all files from which transformers reads tokenizers and chat templates."""
_NO_TOKENIZER_FILE = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|py|md|h5|onnx|index\.json)")


@dataclass(frozen=True)
class ModelExtras:
    """Files and settings of a model directory, without weights and architecture."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Tokenizer files and chat templates by relative path, such as in TEMPLATE_FOLDER."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Content of generation_config.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that do not change logits, such as eos_token_id."""

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> "ModelExtras":
        """Read tokenizer files. They keep their names."""
        return cls(files={file.name: _read_file(file) for file in files})

    @property
    def has_tokenizer(self) -> bool:
        """True if there is a tokenizer file that is not a chat template."""
        # Templates alone cannot tokenize.
        return any(not name.endswith(".jinja") for name in self.files)


def read_extras(directory: Path) -> ModelExtras:
    """Read the extras of a Hugging Face directory.

    Raises:
        ConversionError: if the directory does not exist, a file cannot be read, or the tokenizer
            needs code in the directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConversionError(f"{directory}: no such directory; expected one with tokenizer files")

    paths = [
        path for path in directory.iterdir() if is_tokenizer_file(path.name) and not path.is_dir()
    ]
    # transformers stores named chat templates here, one file per name.
    folder = directory / TEMPLATE_FOLDER
    if folder.is_dir():
        paths += folder.glob("*.jinja")
    files = {str(path.relative_to(directory)): _read_file(path) for path in sorted(paths)}

    # In this order: _check_templates relies on tokenizer_config.json being a JSON object.
    _check_tokenizer_code(directory, files)
    _check_templates(directory, files)

    raw = read_object(directory / CONFIG_FILE)
    family = known_family(raw.get("model_type"))
    # A directory of only a tokenizer may have the config.json of an unsupported model.
    if family is None:
        copied = {key: value for key, value in raw.items() if key in COPIED}
    else:
        copied = family.hf_keys.copied_from(raw)
    return ModelExtras(files, read_object(directory / GENERATION_FILE), copied)


def copy_extras(extras: ModelExtras, source: Path, folder: Path) -> None:
    """Write extras to a new folder, from which ``read_extras`` can read them again.

    Args:
        extras: result of ``read_extras(source)``.
        source: directory of the model.
        folder: folder to create.
    """
    folder.mkdir()
    # The whole config.json, because ``read_extras`` selects its keys by the model's family.
    settings = {CONFIG_FILE: read_object(source / CONFIG_FILE), GENERATION_FILE: extras.generation}
    for name, content in settings.items():
        if content:
            (folder / name).write_text(json.dumps(content, indent=2))
    write_files(extras.files, folder)


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Write extra files to ``directory``, by relative path."""
    for name, content in files.items():
        path = directory / name
        # Named chat templates lie in a subfolder.
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)


def is_tokenizer_file(name: str) -> bool:
    """Return True if transformers may read a tokenizer from a file of this name."""
    # The second pattern excludes weights and code that match the first by their beginning.
    return bool(_TOKENIZER_FILE.fullmatch(name)) and not _NO_TOKENIZER_FILE.fullmatch(name)


def _read_file(path: Path) -> bytes:
    """Return the content of a file. Raises ConversionError if it is damaged."""
    try:
        # Parse here, so that a truncated download fails now and not when the model is served.
        content = read_bytes(path, MAX_LISTING_BYTES)
        if path.suffix == ".json":
            parse_json(content, path)
        elif path.suffix == ".jinja":
            content.decode()
    except UnicodeDecodeError as error:
        raise ConversionError(f"{path}: not UTF-8 ({error}). Copy or download it again") from None
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None
    return content


def _check_templates(directory: Path, files: Mapping[str, bytes]) -> None:
    """Raise ConversionError if a chat template exists twice with different texts.

    transformers 4 and servers read the templates in tokenizer_config.json, newer versions prefer
    the files.
    """
    content = parse_json(files.get(TOKENIZER_CONFIG_FILE, b"{}"), directory)
    templates = content.get("chat_template")
    # transformers writes a string for one template, and a list for several named ones.
    if isinstance(templates, str):
        templates = [{"name": "default", "template": templates}]
    if not isinstance(templates, list):
        return
    for entry in templates:
        name = entry.get("name") if isinstance(entry, dict) else None
        file = TEMPLATE_FILE if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja"
        text = files.get(file)
        if text is not None and text.decode().strip() != str(entry.get("template")).strip():
            raise ConversionError(
                f"{directory / file}: differs from the chat template {name!r} in "
                f"{TOKENIZER_CONFIG_FILE}, and loaders disagree about which one to read. Remove "
                "the wrong one"
            )


def _check_tokenizer_code(directory: Path, files: Mapping[str, bytes]) -> None:
    """Raise ConversionError if the tokenizer is code in the directory, which is not copied."""
    path = directory / TOKENIZER_CONFIG_FILE
    content = parse_json(files.get(TOKENIZER_CONFIG_FILE, b"{}"), path)
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds no JSON object. Copy or download it again")
    # transformers runs such code only with trust_remote_code.
    auto_map = content.get("auto_map")
    if auto_map:
        raise ConversionError(
            f"{path}: auto_map is {auto_map!r}, so the tokenizer is code in the directory, which "
            "is neither run nor copied. Convert it to a tokenizer.json and remove the key"
        )


def read_object(path: Path, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        path: file to read.
        max_bytes: size limit of the file.

    Returns:
        The object; {} if the file does not exist.

    Raises:
        ConversionError: if the file is too large, unreadable or not a JSON object.
    """
    try:
        content = parse_json(read_bytes(path, max_bytes), path)
    # Most settings files are optional.
    except FileNotFoundError:
        return {}
    except UntrustedFileError as error:
        raise ConversionError(str(error)) from None
    except OSError as error:
        raise ConversionError(f"{path}: cannot be read ({error.strerror})") from None
    if not isinstance(content, dict):
        raise ConversionError(f"{path}: holds no JSON object. Copy or download it again")
    return content
