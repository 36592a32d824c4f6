"""A plugin for SGLang 0.5.17: ``triton`` attention decodes with all 128 keys of a window.

SGLang gives backends the window without the query, 127. Prefill, and other backends, add the
query; the buffer of keys from which ``triton`` decodes counts the query among the 127 (sglang
pull request 32087). That buffer is all that reads the backend's ``sliding_window_size``; prefill
masks by the layers' own.
"""

from functools import wraps
from typing import Any

VERSION = "0.5.17"


def register() -> None:
    """Patch the backend. SGLang calls this in every process of a server."""
    from sglang.version import __version__

    # SystemExit, because SGLang only logs an Exception of a plugin and would serve unpatched.
    if __version__ != VERSION:
        raise SystemExit(
            f"attention_backend triton is mended for SGLang {VERSION} and this is {__version__}: "
            "use fa3, or see whether it still decodes with one key too few, and if not, set "
            "SGLANG_PLUGINS=none"
        )

    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    original_init = TritonAttnBackend.__init__

    @wraps(original_init)
    def with_the_query(self: Any, *arguments: Any, **options: Any) -> None:
        original_init(self, *arguments, **options)
        if self.sliding_window_size:
            self.sliding_window_size += 1

    TritonAttnBackend.__init__ = with_the_query
