"""Weight files of a Hugging Face directory.

Loaders disagree when a directory holds more than one set of weights: transformers prefers
``model.safetensors`` to an index, other loaders read every safetensors file, and older loaders
prefer ``pytorch_model.bin``. Therefore such a directory is rejected.
"""

from pathlib import Path

from converters.errors import ConversionError
from converters.model_extras import read_object
from megatron_gptoss.untrusted_files import MAX_LISTING_BYTES, is_plain_name

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_SETTINGS_FILE = "adapter_config.json"


def read_index(directory: Path) -> dict[str, str] | None:
    """Return the file name of every stored tensor, or None if there is no index.

    Raises:
        ConversionError: if the index is damaged or names a missing file.
    """
    index = directory / INDEX_FILE
    if not _exists(index):
        return None

    # An edited or truncated index may hold any JSON value.
    weight_map = read_object(index, MAX_LISTING_BYTES).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConversionError(
            f"{index}: key weight_map is missing or does not map tensor names to files. Download "
            "the index again"
        )
    # An untrusted index must not name files outside of the directory.
    for file in weight_map.values():
        if not is_plain_name(file):
            raise ConversionError(
                f"{index}: names the file {file!r}, which is outside of its directory"
            )
    # Check before any file is opened, because an incomplete download is the usual reason.
    for file in sorted(set(weight_map.values())):
        if not (directory / file).exists():
            raise ConversionError(
                f"{index}: names the file {file}, which is missing. Download it again"
            )
    return weight_map


def weight_files(directory: Path, weight_map: dict[str, str] | None) -> list[str]:
    """Return the sorted names of the files that hold the weights.

    Args:
        directory: Hugging Face directory.
        weight_map: file name of every tensor, as returned by ``read_index``.

    Raises:
        ConversionError: naming the missing file, or the second set of weights.
    """
    if weight_map is not None:
        files = sorted(set(weight_map.values()))
        origin = INDEX_FILE
    elif _exists(directory / SINGLE_FILE):
        files = [SINGLE_FILE]
        origin = SINGLE_FILE
    else:
        # OpenAI's releases have no index.
        files = sorted(path.name for path in directory.glob("model--*.safetensors"))
        origin = "the files of OpenAI's format"
    if not files:
        raise ConversionError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")

    others = [path.name for path in directory.iterdir() if _holds_weights(path.name)]
    others = sorted(set(others) - set(files))
    if others:
        raise ConversionError(
            f"{directory / others[0]}: is a second set of weights next to {origin} ({len(others)} "
            "such files), and loaders disagree about which one to read. Move or delete the wrong "
            "one"
        )
    if _exists(directory / ADAPTER_SETTINGS_FILE):
        raise ConversionError(
            f"{directory / ADAPTER_SETTINGS_FILE}: is in the directory of a whole model, so "
            "transformers would load the adapter's base instead. Move the adapter to another "
            "directory"
        )
    return files


def _holds_weights(name: str) -> bool:
    """Return True if a file of this name would be loaded as weights."""
    # The directory's own index.
    if name == INDEX_FILE:
        return False
    # Another index counts, too: loaders may prefer it.
    if name.endswith((".safetensors", ".safetensors.index.json")):
        return True
    return name.startswith("pytorch_model") and name.endswith((".bin", ".bin.index.json"))


def _exists(path: Path) -> bool:
    """Return True if there is a file, or a link to a missing file."""
    # A dangling link counts as present: reading it then fails, because the directory is damaged.
    return path.exists() or path.is_symlink()
