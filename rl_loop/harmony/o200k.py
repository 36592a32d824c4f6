"""The o200k vocabulary file that openai-harmony needs, fetched, checked and cached.

``python -m rl_loop.harmony.o200k`` fetches it once and prints where it is.
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

# A package that ships the file, under the name that tiktoken's cache gives it.
WHEEL = "litellm==1.80.0"
WHEEL_MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"

MOST_BYTES = 1 << 24
"""That the file may have; it has 3.6 MB."""
DOWNLOAD_SECONDS = 300


class VocabularyUnavailable(UserError, RuntimeError):
    """The file could neither be found nor fetched; the message says which variable to set."""


def ensure_o200k() -> Path | None:
    """Find or fetch the verified file, and tell openai-harmony by TIKTOKEN_ENCODINGS_BASE.

    It is looked for in this order: the folder that TIKTOKEN_ENCODINGS_BASE names already; the
    cache (XDG_CACHE_HOME, ~/.cache); a wheel that ships the file, by pip; openai-harmony's own
    download.

    Returns its path; None if openai-harmony had to download it and keeps it in a cache of its own.
    Raises VocabularyUnavailable.
    """
    # A folder that the user names is used or is an error, never replaced by another source.
    if folder := os.environ.get(VARIABLE):
        path = Path(folder) / FILE_NAME
        if not _is_valid(path):
            raise VocabularyUnavailable(
                f"{VARIABLE} is {folder}, but {path} is missing or is not the o200k vocabulary (sha256 {SHA256})"
            )
        return path

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "megatron-gptoss" / FILE_NAME
    if not _is_valid(path) and not _fetch(path):
        if _harmony_downloads():
            return None
        raise VocabularyUnavailable(
            f"the o200k vocabulary could not be fetched (tried pip with {WHEEL} and "
            f"openai-harmony's own download). Put {FILE_NAME} (sha256 {SHA256}) into a folder "
            f"and set {VARIABLE} to that folder"
        )

    os.environ[VARIABLE] = str(path.parent)
    return path


def _is_valid(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _fetch(path: Path) -> bool:
    """Take the file out of the wheel and write it atomically. False if it cannot be had.

    Raises VocabularyUnavailable if it cannot be written.
    """
    try:
        data = _read_from_wheel()
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, zipfile.BadZipFile):
        return False
    if hashlib.sha256(data).hexdigest() != SHA256:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        raise VocabularyUnavailable(f"{path} could not be written: {error}") from None
    return True


def _read_from_wheel() -> bytes:
    """Download the wheel and return the file. Raises what pip, files and archives raise."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps"]
        subprocess.run(
            [*pip, "--only-binary", ":all:", WHEEL, "-d", scratch],
            check=True,
            capture_output=True,
            timeout=DOWNLOAD_SECONDS,
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            size = archive.getinfo(WHEEL_MEMBER).file_size
            if size > MOST_BYTES:
                raise ValueError(f"{WHEEL_MEMBER} would become {size:,} bytes")
            return archive.read(WHEEL_MEMBER)


def _harmony_downloads() -> bool:
    """Whether openai-harmony can load the encoding, by a download of its own if need be."""
    from openai_harmony import HarmonyEncodingName, HarmonyError, load_harmony_encoding

    try:
        load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    except (HarmonyError, OSError):
        return False
    return True


if __name__ == "__main__":
    try:
        print(ensure_o200k() or "kept by openai-harmony")
    except VocabularyUnavailable as error:
        sys.exit(f"error: {error}")
