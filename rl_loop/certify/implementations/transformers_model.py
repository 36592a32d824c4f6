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
    SampledSequence,
    ScoredSequence,
    UnsupportedOperationError,
)


class TransformersModel(ModelImplementation):
    """Model with eager attention.

    It computes one sequence at a time, on the GPU if there is one.
    """

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
    def score(self, sequences: Sequence[Sequence[int]]) -> list[ScoredSequence]:
        """Score each sequence separately, and record the routers' choices."""
        results = []
        for sequence in sequences:
            with self._recording() as chosen:
                log_probs = self._log_probs(sequence)
            routes = torch.stack(chosen, dim=1).cpu().numpy()
            results.append(ScoredSequence(log_probs.tolist(), routes))
        return results

    def _log_probs(self, sequence: Sequence[int]) -> Tensor:
        """Return log p of every token except the first, at least fp32 [n - 1]."""
        tokens = torch.tensor([list(sequence)], device=self.device)
        logits = self.model(tokens[:, :-1], use_cache=False).logits[0]
        # Widen bf16 logits for the softmax, but keep fp64 logits as they are.
        all_log_probs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return all_log_probs.gather(-1, tokens[0, 1:, None])[:, 0]

    @contextmanager
    def _recording(self) -> Iterator[list[Tensor]]:
        """Yield a list to which every router appends its choice, int64 [tokens, top_k]."""
        chosen: list[Tensor] = []

        def record_choice(router: Any, inputs: Any, output: Any) -> None:
            # GptOssTopKRouter returns logits, scores and indices.
            chosen.append(output[2])

        with ExitStack() as hooks:
            for router in self.routers:
                hooks.callback(router.register_forward_hook(record_choice).remove)
            yield chosen

    @torch.no_grad()
    def score_with_routes(
        self, sequences: Sequence[Sequence[int]], routes: Sequence[np.ndarray]
    ) -> list[ScoredSequence]:
        """Score sequences with given experts, weighted by the router's own logits.

        Args:
            sequences: token ids.
            routes: int64 [n - 1, layers, top_k] for each sequence of n tokens.
        """
        results = []
        for sequence, experts in zip(sequences, routes, strict=True):
            with ExitStack() as hooks:
                for layer, router in enumerate(self.routers):
                    route = torch.as_tensor(experts[:, layer], device=self.device)
                    hook = router.register_forward_hook(_RouteOverride(route))
                    hooks.callback(hook.remove)
                results.append(ScoredSequence(self._log_probs(sequence).tolist()))
        return results

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> SampledSequence:
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
        return SampledSequence(ids, log_probs)

    def gradients(self, sequences: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return the gradients of the mean of -log p over all predicted tokens of all sequences."""
        tokens = sum(len(sequence) - 1 for sequence in sequences)
        self.model.zero_grad(set_to_none=True)
        for sequence in sequences:
            (-self._log_probs(sequence).sum() / tokens).backward()
        # Leave out tensors without a gradient, so that the check reports them as missing.
        return {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """Copy the weights of another Hugging Face directory with the same architecture."""
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


class _RouteOverride:
    """Forward hook that replaces the experts that a router chose.

    ``routes``: int64 [tokens, top_k] for one layer.
    """

    def __init__(self, routes: Tensor) -> None:
        self._routes = routes

    def __call__(self, router: Any, inputs: Any, output: Any) -> Any:
        logits = output[0]
        # As in GptOssTopKRouter: the softmax over the logits of the chosen experts.
        shares = logits.gather(-1, self._routes).softmax(-1)
        return logits, shares, self._routes
