"""GptOssForCausalLM of transformers: the reference for all other implementations."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, GptOssForCausalLM

from converters.hf_directory import HfDirectory
from converters.model_extras import read_extras
from megatron_gptoss.config.precision import Precision, torch_dtype
from rl_loop.certify.implementation import (
    ModelImplementation,
    SampledText,
    ScoredText,
    UnsupportedOperationError,
)


class TransformersModel(ModelImplementation):
    """Model with eager attention. It computes one text at a time, on the GPU if there is one."""

    name = "transformers"

    def __init__(self, directory: Path, precision: Precision) -> None:
        self._directory = directory
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = GptOssForCausalLM.from_pretrained(
            directory, dtype=torch_dtype(precision), attn_implementation="eager"
        )
        self.model: Any = model.eval().to(self.device)

    @property
    def routers(self) -> list[torch.nn.Module]:
        """Routers by layer."""
        return [layer.mlp.router for layer in self.model.model.layers]

    @torch.no_grad()
    def score(self, texts: Sequence[Sequence[int]]) -> list[ScoredText]:
        """Score each text separately, and record the routers' choices."""
        results = []
        for text in texts:
            with self._recording() as chosen:
                log_probs = self._log_probs(text)
            routes = torch.stack(chosen, dim=1).cpu().numpy()
            results.append(ScoredText(log_probs.tolist(), routes))
        return results

    def _log_probs(self, text: Sequence[int]) -> Tensor:
        """Return log p of every token except the first, at least fp32 [n - 1]."""
        tokens = torch.tensor([list(text)], device=self.device)
        logits = self.model(tokens[:, :-1], use_cache=False).logits[0]
        # Widen bf16 logits for the softmax, but keep fp64 logits as they are.
        all_log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return all_log_probs.gather(-1, tokens[0, 1:, None])[:, 0]

    @contextmanager
    def _recording(self) -> Iterator[list[Tensor]]:
        """Yield a list to which every router appends its choice, int64 [tokens, top_k]."""
        chosen: list[Tensor] = []

        def note(router: Any, inputs: Any, output: Any) -> None:
            # GptOssTopKRouter returns logits, scores and indices.
            chosen.append(output[2])

        with ExitStack() as hooks:
            for router in self.routers:
                hooks.callback(router.register_forward_hook(note).remove)
            yield chosen

    @torch.no_grad()
    def score_with_routes(
        self, texts: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[ScoredText]:
        """Score texts with the given experts, weighted by the router's own logits."""
        results = []
        for text, given in zip(texts, routes, strict=True):
            with ExitStack() as hooks:
                for layer, router in enumerate(self.routers):
                    route = torch.as_tensor(given[:, layer], device=self.device)
                    hook = router.register_forward_hook(_Replacing(route))
                    hooks.callback(hook.remove)
                results.append(ScoredText(self._log_probs(text).tolist()))
        return results

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledText:
        """Decode greedily with transformers' cache."""
        # With the config, window layers get a cache of their window's length, as in generate().
        cache = DynamicCache(config=self.model.config)
        step = torch.tensor([list(prompt)], device=self.device)
        ids = []
        log_probs = []
        for _ in range(max_new_tokens):
            output = self.model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            likely, token = output.logits[0, -1].float().log_softmax(-1).max(dim=-1)
            ids.append(int(token))
            log_probs.append(float(likely))
            step = token.view(1, 1)
        return SampledText(ids, log_probs)

    def gradients(self, texts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return the gradients of the mean of -log p."""
        tokens = sum(len(text) - 1 for text in texts)
        self.model.zero_grad(set_to_none=True)
        for text in texts:
            (-self._log_probs(text).sum() / tokens).backward()
        named = dict(self.model.named_parameters())
        # Leave out tensors without a gradient, so that the check reports them as missing.
        return {name: p.grad for name, p in named.items() if p.grad is not None}

    @torch.no_grad()
    def update(self, directory: Path) -> None:
        """Copy the weights of another directory."""
        source = HfDirectory(directory)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(source.get(name))

    def tokenize(self, text: str) -> list[int]:
        """Tokenize with the directory's tokenizer."""
        if not read_extras(self._directory).has_tokenizer:
            raise UnsupportedOperationError(f"{self._directory} has no tokenizer")
        tokenizer = AutoTokenizer.from_pretrained(self._directory)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids


class _Replacing:
    """Replaces the experts that a router chose."""

    def __init__(self, routes: Tensor) -> None:
        self._routes = routes

    def __call__(self, router: Any, inputs: Any, output: Any) -> Any:
        logits = output[0]
        # As in GptOssTopKRouter: the softmax over the logits of the chosen experts.
        shares = logits.gather(-1, self._routes).softmax(-1)
        return logits, shares, self._routes
