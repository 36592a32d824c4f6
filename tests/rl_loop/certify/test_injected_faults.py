"""Every injected fault is found by its check, and reported with its name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from rl_loop.certify.checks import FORWARD
from rl_loop.certify.implementation import ModelImplementation
from rl_loop.certify.implementations.megatron_trainer import MegatronTrainer
from rl_loop.certify.implementations.transformers_model import TransformersModel
from rl_loop.certify.report import CheckOutcome
from rl_loop.harmony.sampled_rendering import SampledTurnRenderer
from tests.support.rl_loop.certify import implementations
from tests.support.rl_loop.certify.prepared import Prepared, causes, failed


def as_id(value: object) -> str:
    """Return the name of a parameter: only texts.

    pytest-xdist needs equal names in all processes, and the text of a function has its address.
    """
    return value if isinstance(value, str) else ""


IN_THE_MODEL = [
    ("window", "one key too few in the window", implementations.shift_window(-1)),
    ("window", "one key too many in the window", implementations.shift_window(1)),
    ("sinks", "sinks are absent", implementations.no_sinks),
    ("router", "the router's bias is in bf16", implementations.router_bias_in_bf16),
    ("activation", "the clamp comes before the bias", implementations.clamp_before_bias),
    (
        "orientation",
        "the experts' down projections, which are square, are transposed",
        implementations.transposed_down,
    ),
    (
        "orientation",
        "in layer 2 the experts' down projections, which are square, are transposed",
        implementations.transposed_down_in_layer_2,
    ),
    (
        "interleaving",
        "only the biases of gate and up are read as halves",
        implementations.half_interleaved,
    ),
    ("yarn", "YaRN's ramp is truncated to whole channels", implementations.truncated_ramp),
    ("yarn", "positions end at YaRN's original length", implementations.positions_cut),
]


@pytest.mark.slow
@pytest.mark.parametrize(("check", "cause", "plant"), IN_THE_MODEL, ids=as_id)
def test_no_other_check_takes_a_fault_for_another(
    prepared: Prepared, check: str, cause: str, plant: implementations.Plant
) -> None:
    results = prepared.run_checks(implementations.faulty(prepared.first.directory, plant))
    assert causes(results) == {cause}
    # A transposed, permuted or rounded parameter has such gradients. The gradient check may
    # therefore fail, too, but it names no cause.
    assert failed(results) - {"gradients"} == {"agreement", check}


MORE_IN_THE_MODEL = [
    ("window", "no layer has a window", implementations.layer_types("full_attention")),
    ("window", "every layer has a window", implementations.layer_types("sliding_attention")),
    (
        "window",
        "odd layers have the window instead of even layers",
        implementations.layer_types("full_attention", "sliding_attention"),
    ),
    ("yarn", "YaRN is absent", implementations.rope(rope_type="default")),
    (
        "yarn",
        "YaRN's concentration of queries and keys is absent",
        implementations.no_concentration,
    ),
    (
        "yarn",
        "YaRN uses the longest length instead of the original length",
        implementations.longest_for_original,
    ),
    ("yarn", "positions are rounded to bf16", implementations.bf16_positions),
    ("router", "the router's bias is absent", implementations.zero("router.bias")),
    ("router", "the router's softmax is taken over all experts", implementations.softmax_of_all),
    (
        "activation",
        "the activation is not clamped",
        implementations.activation(limit=float("inf")),
    ),
    ("activation", "1 is not added to up", implementations.activation(offset=0.0)),
    (
        "activation",
        "the gate's slope is 1 (SiLU) instead of 1.702",
        implementations.activation(slope=1.0),
    ),
    (
        "interleaving",
        "gate and up are read as halves instead of alternating channels",
        implementations.halves("gate_up_proj", "gate_up_proj_bias"),
    ),
    (
        "interleaving",
        "only the weights of gate and up are read as halves",
        implementations.halves("gate_up_proj"),
    ),
    ("interleaving", "gate and up are swapped", implementations.swapped_gate_up),
    (
        "biases",
        "the experts' biases are absent",
        implementations.zero("gate_up_proj_bias", "down_proj_bias"),
    ),
    (
        "biases",
        "the biases of q, k and v are absent",
        implementations.zero("q_proj.bias", "k_proj.bias", "v_proj.bias"),
    ),
    ("biases", "the bias of attention's output is absent", implementations.zero("o_proj.bias")),
    ("biases", "biases are in bf16", implementations.bf16_biases),
]


@pytest.mark.parametrize(
    ("check", "cause", "plant"), [*IN_THE_MODEL, *MORE_IN_THE_MODEL], ids=as_id
)
def test_a_model_with_one_fault_fails_by_its_name(
    prepared: Prepared, check: str, cause: str, plant: implementations.Plant
) -> None:
    implementation = implementations.faulty(prepared.first.directory, plant)
    results = prepared.run_checks(implementation, check)
    assert causes(results) == {cause}
    assert failed(results) == {"agreement", check}


def test_every_known_fault_of_the_model_is_planted() -> None:
    planted = {cause for _, cause, _ in [*IN_THE_MODEL, *MORE_IN_THE_MODEL]}
    known = {fault.name for check in FORWARD for fault in check.faults}
    assert known <= planted


IN_BF16 = [IN_THE_MODEL[i] for i in (0, 4, 8)]


@pytest.mark.parametrize(("check", "cause", "plant"), IN_BF16, ids=as_id)
def test_a_bf16_model_with_one_fault_fails_by_its_name(
    prepared_as: Callable[[str], Prepared], check: str, cause: str, plant: implementations.Plant
) -> None:
    prepared = prepared_as("bf16")
    implementation = implementations.faulty(prepared.first.directory, plant, "bf16")
    results = prepared.run_checks(implementation, check)
    assert causes(results) == {cause}
    assert failed(results) == {"agreement", check}


AROUND_THE_MODEL = [
    ("update", "expert 3 of layer 1 kept its old weights", implementations.StaleExpert),
    (
        "update",
        "the experts' down projections, which are square, are transposed",
        implementations.TransposingUpdate,
    ),
    ("routes returned", "all returned routes are zero", implementations.ZeroRoutes),
    ("routes returned", "returned routes are one token too late", implementations.LateRoutes),
    ("routes given", "given routes are ignored", implementations.IgnoresRoutes),
    (
        "harmony",
        "<|constrain|> (id 355) is encoded as text, 1 times",
        implementations.ConstrainAsText,
    ),
    (
        "decoding",
        "one key too few in the window of decoded tokens",
        implementations.ShortDecodingWindow,
    ),
    (
        "decoding",
        "one key too many in the window of decoded tokens",
        implementations.LongDecodingWindow,
    ),
    ("packing", "tokens attend to earlier sequences of the row", implementations.LeakyRows),
    (
        "packing",
        "tokens attend to earlier sequences of the row, and positions continue",
        implementations.OneLongRow,
    ),
    ("routes returned", "returned routes are one token too early", implementations.EarlyRoutes),
    (
        "routes returned",
        "returned routes have the wrong order of layers",
        implementations.UpsideDownRoutes,
    ),
    ("update", "no tensor was updated", implementations.keeping("")),
    ("update", "the experts were not updated", implementations.keeping(".experts.")),
    ("update", "sinks were not updated", implementations.keeping(".sinks")),
    ("update", "biases were not updated", implementations.keeping("bias")),
    ("update", "the routers were not updated", implementations.keeping(".router.")),
    ("update", "the second update did not restore the first weights", implementations.UpdatesOnce),
    (
        "gradients",
        "the router gets no gradient from the experts' weights",
        implementations.RouterLearnsNothing,
    ),
]


@pytest.mark.parametrize(("check", "cause", "kind"), AROUND_THE_MODEL, ids=as_id)
def test_a_fault_around_the_model_fails_by_its_name(
    prepared: Prepared, check: str, cause: str, kind: type[TransformersModel]
) -> None:
    results = prepared.run_checks(kind(prepared.first.directory, "fp32"), check)
    assert causes(results) == {cause}
    assert failed(results) == {check}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "cause", "kind"), AROUND_THE_MODEL, ids=as_id)
def test_fault_around_the_model_is_found_by_its_own_check(
    prepared: Prepared, check: str, cause: str, kind: type[TransformersModel]
) -> None:
    results = prepared.run_checks(kind(prepared.first.directory, "fp32"))
    assert causes(results) == {cause}
    assert failed(results) == {check}


def test_what_a_tool_quotes_must_not_become_a_special_token(prepared: Prepared) -> None:
    implementation = implementations.QuotesAsTokens(prepared.first.directory, "fp32")
    results = prepared.run_checks(implementation, "harmony")
    (cause,) = causes(results)
    assert "in a message's content becomes the special token" in cause
    assert failed(results) == {"harmony"}


def test_a_model_that_wavers_is_not_deterministic(prepared: Prepared) -> None:
    results = prepared.run_checks(
        implementations.Wavering(prepared.first.directory, "fp32"), "determinism"
    )
    assert causes(results) == {"log-probs of the same sequence vary"}


def test_a_faultless_model_passes_everything_that_it_offers(prepared: Prepared) -> None:
    results = prepared.run_checks(TransformersModel(prepared.first.directory, "fp32"))
    skipped = {name for name, result in results.items() if result.status is CheckOutcome.SKIPPED}
    assert not failed(results)
    assert skipped == {"packing"}
    assert all(
        visibility.is_visible
        for result in results.values()
        for visibility in result.visibilities
        if result.name != "update"
    )


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(prepared: Prepared) -> None:
    def plant(implementation: TransformersModel) -> None:
        implementations.half_interleaved(implementation)
        implementations.shift_window(1)(implementation)

    results = prepared.run_checks(implementations.faulty(prepared.first.directory, plant))
    assert causes(results) == {IN_THE_MODEL[1][1], IN_THE_MODEL[7][1]}


def test_a_fault_that_nobody_listed_fails_without_a_name(prepared: Prepared) -> None:
    implementation = implementations.faulty(prepared.first.directory, implementations.other_epsilon)
    results = prepared.run_checks(implementation, "agreement")
    assert not causes(results)
    assert failed(results) == {"agreement"}
    assert "No known fault explains it" in results["agreement"].summary


# ---- the trainer


@pytest.fixture
def trainer_with(prepared: Prepared) -> Iterator[Callable[..., ModelImplementation]]:
    opened: list[ModelImplementation] = []

    def make(**overrides: object) -> ModelImplementation:
        opened.append(MegatronTrainer(prepared.first.directory, "fp32", **overrides))
        return opened[-1]

    yield make
    for implementation in opened:
        implementation.close()


def test_the_trainer_passes_everything_but_generation(
    prepared: Prepared, trainer_with: Callable[..., ModelImplementation]
) -> None:
    results = prepared.run_checks(trainer_with())
    skipped = {name for name, result in results.items() if result.status is CheckOutcome.SKIPPED}
    assert not failed(results)
    assert skipped == {"decoding"}


@pytest.mark.parametrize(
    ("overrides", "check", "cause"),
    [
        (
            {"sink_backward": False},
            "gradients",
            "sinks are dropped in the backward pass",
        ),
        (
            {"sink_gradient": False},
            "gradients",
            "the sinks' own gradient is dropped",
        ),
        ({"window_size": (14, 0)}, "window", "one key too few in the window"),
        ({"activation_func_clamp_value": None}, "activation", "the activation is not clamped"),
    ],
    ids=str,
)
def test_a_trainer_with_one_fault_fails_by_its_name(
    prepared: Prepared,
    trainer_with: Callable[..., ModelImplementation],
    overrides: dict[str, object],
    check: str,
    cause: str,
) -> None:
    results = prepared.run_checks(trainer_with(**overrides), check)
    assert causes(results) == {cause}
    assert failed(results) - {"agreement"} == {check}


def test_demonstration_that_spells_a_special_token_is_named(
    prepared: Prepared,
    trainer_with: Callable[..., ModelImplementation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def as_text(renderer: SampledTurnRenderer, content_type: str) -> list[int]:
        return renderer._vocabulary.encode_text(f" {content_type}")

    monkeypatch.setattr(SampledTurnRenderer, "_content_type", as_text)
    results = prepared.run_checks(trainer_with(), "harmony")
    assert causes(results) == {"<|constrain|> (id 355) is encoded as text, 1 times"}
