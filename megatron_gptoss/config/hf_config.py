"""Reading Hugging Face's ``config.json``."""

import json
from pathlib import Path
from typing import Any


def load_hf_config(source: Path | str | dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Load a ``config.json``: a file, its directory, or the parsed dict.

    Returns:
        The content, and what errors call it.

    Raises:
        ValueError: naming the file that is missing or no JSON.
    """
    if isinstance(source, dict):
        return source, "config"

    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    return _read_json(path), str(path)


def rope_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings of a parsed ``config.json``, whichever version of transformers
    wrote it: rope_theta, and what rope_scaling says."""
    # transformers 5 writes rope_parameters, the releases carry rope_scaling and rope_theta.
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    if "rope_theta" in raw:
        rope.setdefault("rope_theta", raw["rope_theta"])
    return rope


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; expected a Hugging Face model directory") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not valid JSON ({error})") from None
    return content
