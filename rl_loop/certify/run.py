"""Implements ``gptoss certify``: opens the weights and the implementation, and runs the checks."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from megatron_gptoss import host_memory
from megatron_gptoss.families.gpt_oss.config import GptOssModelConfig
from rl_loop.certify.check_run import CheckRun
from rl_loop.certify.checks import CHECKS, TITLES
from rl_loop.certify.implementation import (
    ImplementationError,
    ModelImplementation,
    UnsupportedOperationError,
)
from rl_loop.certify.model import (
    FIRST,
    SECOND,
    CertifyError,
    Precision,
    WeightSet,
    find_vocabulary,
    read_weights,
)
from rl_loop.certify.probe_sequences import ProbeSequence, ProbeSequences
from rl_loop.certify.report import CertifyReport, CheckOutcome, CheckResult
from rl_loop.certify.variants import ReferenceModel, variant_frequencies
from rl_loop.harmony.vocabulary import SPECIAL_TOKENS, Vocabulary, special_id
from rl_loop.registry import Registry

REFERENCE_TOLERANCE = 2e-4
"""Maximum difference in nats between the reference and transformers in fp64.

transformers computes norms and angles in fp32. Long sequences are not compared.
"""
BYTES_PER_PARAMETER = 3 * 8
"""Upper bound of this process's memory: three copies of the weights (as stored, in fp64, in the
implementation's precision) of at most 8 bytes each."""

MakeImplementation = Callable[[Path, Precision], ModelImplementation]

FACTORIES: Registry[MakeImplementation] = Registry(
    kind="implementation",
    expected="a function of a directory and a precision that returns a ModelImplementation",
    accepts=callable,
    entries={
        "transformers": "rl_loop.certify.implementations.transformers_model:TransformersModel",
        "trainer": "rl_loop.certify.implementations.megatron_trainer:MegatronTrainer",
    },
)


@dataclass(frozen=True)
class CertifyOptions:
    """Options of ``gptoss certify``."""

    implementation: str
    """Name in FACTORIES, MODULE:FUNCTION, or URL of a server."""
    weights: Path
    """Directory written by ``prepare``, or a Hugging Face directory."""
    precision: Precision = "fp32"
    deterministic: bool = False
    """True if the server claims bitwise equal results."""
    only: tuple[str, ...] = ()
    """Checks to run. Empty: all."""


def certify(
    options: CertifyOptions,
    progress: Callable[[CheckResult], None] = lambda result: None,
) -> CertifyReport:
    """Run the checks.

    Args:
        options: implementation, weights and checks.
        progress: function to call after each check.

    Raises:
        CertifyError: if the implementation, a check or the weights cannot be used.
        ConversionError: if the directory is not a model.
        ImplementationError: if the implementation cannot be reached.
    """
    # A wrong name must not cost the time for reading weights and for comparing the reference.
    unknown = set(options.only) - set(CHECKS)
    if unknown:
        known = ", ".join(CHECKS)
        raise CertifyError(f"unknown check {', '.join(sorted(unknown))}. Known checks: {known}")

    first, second = open_weights(options.weights)
    vocabulary = find_vocabulary(first.directory, first.config.vocab_size)
    sequences = ProbeSequences(first.config, special_ids(vocabulary, first.config))
    needed = max(len(sequence.ids) for sequence in sequences.all)
    if needed > first.config.max_length:
        raise CertifyError(
            f"{first.directory / 'config.json'}: the checks need sequences of {needed:,} tokens to test "
            f"a window of {first.config.sliding_window:,}, but the model has "
            f"{first.config.max_length:,} positions. Certify a model with a smaller window"
        )
    check_reference(first, sequences)
    with closing(open_implementation(options, first)) as implementation:
        check_run = CheckRun(
            implementation, first, second, options.precision, sequences, vocabulary
        )
        results = run_checks(check_run, options.only, progress)
        return CertifyReport(
            implementation=implementation.name,
            weights=str(options.weights),
            precision=options.precision,
            model=_describe_model(first.config),
            date=datetime.now(UTC).date().isoformat(),
            results=results,
        )


def run_checks(
    check_run: CheckRun,
    only: Sequence[str] = (),
    progress: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Run every check, even if another one fails or is not supported."""
    results = []
    for name, check in CHECKS.items():
        # The first check always runs, because the others need the faults that it finds.
        if only and name not in only and name != "agreement":
            continue
        started = time.process_time()
        # Checks use different operations of the implementation, so one failure says nothing about the
        # others.
        try:
            result = check(check_run)
        except UnsupportedOperationError as reason:
            result = CheckResult(name, TITLES[name], CheckOutcome.SKIPPED, str(reason))
        except ImplementationError as failure:
            result = CheckResult(name, TITLES[name], CheckOutcome.FAILED, str(failure))
        result = replace(result, seconds=time.process_time() - started)
        results.append(result)
        progress(result)
    return results


def check_implementation_name(implementation: str, has_weights: bool) -> None:
    """Check an implementation's name before weights are written or read.

    Args:
        implementation: name of the implementation.
        has_weights: True if the user gave a directory of weights.

    Raises:
        CertifyError: if the name is invalid, or if a server has no weights.
    """
    if _is_url(implementation):
        if not has_weights:
            raise CertifyError(
                f"{implementation}: --weights must name the weights of the server. `gptoss certify "
                "prepare DIR` writes them"
            )
        return
    # A MODULE:FUNCTION is imported later, in ``open_implementation``. Here only its form is checked.
    if implementation not in FACTORIES and ":" not in implementation:
        known = ", ".join(FACTORIES)
        raise CertifyError(
            f"unknown implementation {implementation!r}. Known implementations: {known}. You can also give "
            "MODULE:FUNCTION or a URL"
        )


def _is_url(implementation: str) -> bool:
    return implementation.startswith(("http://", "https://"))


def open_weights(directory: Path) -> tuple[WeightSet, WeightSet | None]:
    """Read the two sets of ``prepare``, or one Hugging Face directory without a second set."""
    has_two = (directory / FIRST).is_dir()
    first_directory = directory / FIRST if has_two else directory
    first = read_weights(first_directory)
    needed = sum(tensor.numel() for tensor in first.tensors.values()) * BYTES_PER_PARAMETER
    available = host_memory.available_bytes()
    if needed > available:
        raise CertifyError(
            f"{first_directory}: the reference needs {needed / 1e9:.0f} GB of memory, but only "
            f"{available / 1e9:.0f} GB are free. Use the small weights of `gptoss certify "
            "prepare`"
        )
    # A plain Hugging Face directory has no second set. The check of updates is then skipped.
    second = read_weights(directory / SECOND) if has_two else None
    return first, second


def open_implementation(options: CertifyOptions, weights: WeightSet) -> ModelImplementation:
    """Create the implementation of ``options``."""
    name = options.implementation
    if _is_url(name):
        # Imported here, because a trainer needs no HTTP client and a server needs no trainer.
        if name.rstrip("/").endswith("/v1"):
            from rl_loop.certify.implementations.completions_server import CompletionsServer

            return CompletionsServer(name)
        from rl_loop.certify.implementations.sglang_server import SglangImplementation

        return SglangImplementation(name, weights.config, options.deterministic)

    check_implementation_name(name, has_weights=True)
    try:
        factory = FACTORIES.resolve(name)
    except ValueError as error:
        raise CertifyError(str(error)) from error
    implementation = factory(weights.directory, options.precision)
    # A MODULE:FUNCTION is the user's code, which may return anything.
    if not isinstance(implementation, ModelImplementation):
        raise CertifyError(
            f"{name} returned {type(implementation).__name__}; expected a "
            "rl_loop.certify.implementation.ModelImplementation"
        )
    return implementation


def check_reference(weights: WeightSet, sequences: ProbeSequences) -> None:
    """Compare the reference with transformers in fp64, to detect bugs of the reference itself.

    Raises:
        CertifyError: if they differ.
    """
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = weights.config
    hf_config = GptOssConfig(**config.to_hf_config())
    # Compare frequencies separately: the sequence below is too short to show wrong ones at YaRN's
    # lengths.
    frequencies, scale = variant_frequencies(config)
    their_frequencies, their_scale = ROPE_INIT_FUNCTIONS["yarn"](hf_config, torch.device("cpu"))
    is_same = torch.allclose(frequencies, their_frequencies, rtol=1e-5, atol=0)
    if not is_same or abs(scale - their_scale) > 1e-6:
        raise CertifyError("the reference's rotary frequencies differ from those of transformers")

    model = GptOssForCausalLM(hf_config).double().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the default has no fp64 kernel
    model.load_state_dict({name: tensor.double() for name, tensor in weights.tensors.items()})
    # Two windows, so that window layers leave out keys.
    sequence = ProbeSequence("window", sequences.window[0].ids[: 2 * config.sliding_window])
    tokens = torch.tensor([sequence.ids])
    with torch.no_grad():
        log_probs = model(tokens[:, :-1], use_cache=False).logits[0].log_softmax(-1)
    expected = log_probs.gather(-1, tokens[0, 1:, None])[:, 0]
    reference = ReferenceModel(config, weights.tensors).evaluate(sequence.ids).log_probs
    difference = float((reference - expected).abs().max())
    # Not ``>=``, because NaN must fail, too.
    if not difference < REFERENCE_TOLERANCE:
        raise CertifyError(
            f"the reference and transformers in fp64 differ by {difference:.1e} nats: "
            "one of them is wrong, so no check is possible"
        )


def special_ids(vocabulary: Vocabulary | None, config: GptOssModelConfig) -> tuple[int, ...]:
    """Return the ids of Harmony's special tokens that the model has."""
    if vocabulary is None:
        return ()
    ids = vocabulary.from_harmony([special_id(token) for token in SPECIAL_TOKENS])
    return tuple(token for token in ids if token < config.vocab_size)


def _describe_model(config: GptOssModelConfig) -> str:
    return (
        f"{config.num_layers} layers, {config.num_experts} experts, {config.hidden_size} channels, "
        f"window {config.sliding_window}, original length {config.yarn_original_length}"
    )
