"""The o200k vocabulary file that openai-harmony needs, from a package registry, checked and cached.

``python -m rl_loop.harmony.o200k`` fetches it once and prints where it is."""

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
# a package that ships the file, under the name that tiktoken's cache gives it
WHEEL = "litellm==1.80.0"
WHEEL_MEMBER = "litellm/litellm_core_utils/tokenizers/fb374d419588a4632f3f557e76b4b70aebbca790"


class VocabularyUnavailable(UserError, RuntimeError):
    """The file could neither be found nor fetched; the message says which variable to set."""


def ensure_o200k() -> Path | None:
    """Path of the verified file; its folder is put into TIKTOKEN_ENCODINGS_BASE, where openai-harmony looks.
    None if openai-harmony had to download it and keeps it in a cache of its own.

    In this order: the folder that TIKTOKEN_ENCODINGS_BASE names already; the cache (XDG_CACHE_HOME, ~/.cache); a wheel
    that ships the file, by pip; openai-harmony's own download. Raises VocabularyUnavailable."""
    if folder := os.environ.get(VARIABLE):
        path = Path(folder) / FILE_NAME
        if not _is_valid(path):
            fault = f"{path} is missing or is not the o200k vocabulary (sha256 {SHA256})"
            raise VocabularyUnavailable(f"{VARIABLE} is {folder}, but {fault}")
        return path
    path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-gptoss" / FILE_NAME
    if not _is_valid(path) and not _fetch(path):
        if _harmony_downloads():
            return None
        raise VocabularyUnavailable(
            f"the o200k vocabulary could not be fetched (tried pip with {WHEEL} and openai-harmony's own download). "
            f"Put {FILE_NAME} (sha256 {SHA256}) into a folder and set {VARIABLE} to that folder"
        )
    os.environ[VARIABLE] = str(path.parent)
    return path


def _is_valid(path: Path) -> bool:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() == SHA256
    except OSError:
        return False


def _fetch(path: Path) -> bool:
    """Take the file out of the wheel and move it into place whole. False if it cannot be had."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary", ":all:", WHEEL]
        try:
            subprocess.run([*command, "-d", scratch], check=True, capture_output=True, timeout=300)
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                data = archive.read(WHEEL_MEMBER)
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


def _harmony_downloads() -> bool:
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
