"""A plugin for SGLang 0.5.17: its ``triton`` attention decodes with all 128 keys of GPT-OSS's window.

SGLang keeps the window without the query, 127. Prefill and other backends add the query; the buffer of keys from which
``triton`` decodes counts it among the 127 (sglang pull request 32087). That buffer is all that reads the backend's own
number; prefill masks by the layers'."""

from functools import wraps
from typing import Any

VERSION = "0.5.17"


def register() -> None:
    from sglang.version import __version__

    if __version__ != VERSION:  # SGLang only logs an Exception, and would serve as it is
        raise SystemExit(
            f"attention_backend triton is mended for SGLang {VERSION} and this is {__version__}: use fa3, or see "
            "whether it still decodes with one key too few, and if not, set SGLANG_PLUGINS=none"
        )
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    original = TritonAttnBackend.__init__

    @wraps(original)
    def with_the_query(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        if self.sliding_window_size:
            self.sliding_window_size += 1

    TritonAttnBackend.__init__ = with_the_query
