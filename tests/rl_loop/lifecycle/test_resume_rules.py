"""Effects of configuration keys on a resume: declared for every key, and tested."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
import pytest

from rl_loop.config.errors import ConfigError
from rl_loop.config.every_run import RunConfig
from rl_loop.config.load import dump_config, load_config
from rl_loop.config.partial_configs import EpisodesConfig
from rl_loop.config.run import RlConfig, SftConfig
from rl_loop.data.trajectory import Trajectory, TrajectoryGroup, WeightVersionSpan
from rl_loop.lifecycle.inputs import to_json
from rl_loop.lifecycle.resume import changes_since, input_paths, read_run_inputs
from rl_loop.lifecycle.resume_rules import RULES, ResumeEffect, find_rule
from rl_loop.lifecycle.resume_rules import sampling_digest as digest_of_values
from rl_loop.rollout.collector import RolloutCollector, TrainingRequests
from rl_loop.rollout.group_store import GroupStore
from rl_loop.rollout.group_stream import AdmittedGroup, GroupStream
from rl_loop.run_parts import build_tasks, open_conversations
from rl_loop.tasks import codec
from rl_loop.tasks.source import TaskMixture
from rl_loop.tracking.run_directory import RunDirectory, start_run, write_json
from rl_loop.trainer.checkpointer import RunState
from tests.support.rl_loop.lifecycle.config_keys import CONFIGS, all_keys, list_keys, other_values

ROWS = 24


def sampling_digest(config: RunConfig) -> str:
    return digest_of_values(config.model_dump(mode="json"))


KEYS = all_keys()
RL_KEYS = dict(list_keys(RlConfig))
SFT_KEYS = dict(list_keys(SftConfig))

SECTIONS = {
    "data.sampled_conversations": ["data.validation_fraction=1e-6"],
    "rollout.engine.max_batch_size": [],
    "rollout.engine.type": [],
    "rollout.engine.deterministic": [],
    "rollout.engine.quantization": ["quantization=mxfp4", "rollout.engine={type: sglang}"],
    "rollout.engine": ["rollout.engine={type: sglang}"],
    "rollout.purification.": ["rollout.purification={}"],
    "algorithm.critic.": ["algorithm=ppo"],
    "algorithm.advantage.gae_lambda": ["algorithm=ppo"],
    "algorithm.advantage.gamma": ["algorithm=ppo"],
    "algorithm.kl.": ["algorithm.kl={}"],
    "algorithm.distillation.loss.": ["algorithm.distillation={teacher: teachers/first, loss: jsd}"],
    "algorithm.distillation.": ["algorithm.distillation={teacher: teachers/first}"],
    "adapter.": ["adapter={rank: 4}"],
    "loss.type": [],
    "loss.": ["loss={type: distillation, teacher: teachers/first}"],
}
"""Overrides that create the keys with this prefix. The first matching prefix applies."""

VALUES: dict[str, list[str]] = {
    "model": ["model=tiny_words"],
    "seed": ["seed=5"],
    "vocabulary": ["vocabulary=gptoss"],
    "parallel.expert": ["parallel.world_size=2", "parallel.expert=2"],
    "parallel.tensor": ["parallel.world_size=2", "parallel.tensor=2"],
    "parallel.context": ["parallel.world_size=2", "parallel.context=2"],
    "parallel.pipeline": ["parallel.world_size=2", "parallel.pipeline=2"],
    "parallel.virtual_pipeline": [
        "parallel.world_size=2", "parallel.pipeline=2", "parallel.virtual_pipeline=2",
    ],
    "parallel.last_stage_layers": [
        "parallel.world_size=2", "parallel.pipeline=2", "parallel.last_stage_layers=1",
    ],
    "rollout.engine.type": ["rollout.engine={type: sglang}"],
    "rollout.max_episode_tokens": ["rollout.max_episode_tokens=900"],
    "algorithm.advantage.type": ["algorithm.advantage=reinforce"],
    "algorithm.advantage.reward_weights": [
        "algorithm.advantage={type: gdpo, reward_weights: {score: 2}}",
    ],
    "loss.type": ["loss={type: distillation, teacher: teachers/first}"],
    "loss.teacher": ["loss.teacher=teachers/second"],
    "algorithm.policy_loss.type": ["algorithm.policy_loss=cispo"],
    "algorithm.correction.bounds": ["algorithm.correction={weight: icepop, bounds: [0.3, 3.0]}"],
    "algorithm.critic": ["algorithm=ppo"],
    "algorithm.shaping": ["algorithm.shaping={short: relative_length}"],
    "algorithm.distillation.loss.type": ["algorithm.distillation.loss=reverse_kl"],
    "algorithm.distillation": ["algorithm.distillation={teacher: teachers/first}"],
    "algorithm.distillation.teachers": ["algorithm.distillation.teachers={gsm8k: teachers/second}"],
    "training.max_tokens_per_micro_batch": ["training.max_tokens_per_micro_batch=512"],
}  # fmt: skip
"""Overrides for keys whose other values are valid only in combination."""

OF_CUSTOM_CODE = {
    "algorithm.advantage.options",
    "algorithm.policy_loss.options",
    "rollout.engine.options",
}
"""Options of custom code (MODULE:NAME). The shipped configurations have none."""


def write_tasks(path: Path) -> None:
    """Write problems. Every fourth problem needs hundreds of tokens."""
    lines = [
        {"question": f"Problem {i}: " + "what is one plus one, " * (48 if i % 4 == 3 else 1), "answer": f"#### {i}"}
        for i in range(ROWS)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module", autouse=True)
def vocabularies_are_built_once() -> Iterator[None]:
    """Keep the corpus of a tiny vocabulary for all configurations with equal inputs.

    A corpus has 100 demonstrations, which take half of the processor time of a case.
    """
    build_corpus = codec.vocabulary_corpus
    corpora: dict[str, str] = {}

    def vocabulary_corpus(config: EpisodesConfig) -> str:
        inputs = {"tasks", "prompt", "sandbox", "data", "vocabulary_data"}
        key = config.model_dump_json(include=inputs)
        if key not in corpora:
            corpora[key] = build_corpus(config)
        return corpora[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "vocabulary_corpus", vocabulary_corpus)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_tasks(directory / "train.jsonl")
    (directory / "held.jsonl").write_text('{"question": "How many?", "answer": "#### 7"}\n')
    turns = [
        [("user", "Say it."), ("assistant", "It " * (40 if i % 4 == 3 else 2) + str(i))]
        for i in range(ROWS)
    ]
    chats = [{"messages": [{"role": r, "content": c} for r, c in turn]} for turn in turns]
    (directory / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return directory


def rl_config(data: Path, *overrides: str) -> Any:
    source = (
        f"{{environment: gsm8k, train_path: {data}/train.jsonl, held_out_path: {data}/held.jsonl}}"
    )
    base = [
        "initial_weights=null",
        f"output_dir={data}",
        f"tasks.sources={{gsm8k: {source}}}",
        "rollout.tasks_per_step=1",
        "rollout.samples_per_task=2",
        "rollout.max_episode_tokens=250",
        "algorithm.max_staleness=1",
    ]
    return load_config(CONFIGS / "rl/tiny_gsm8k.yaml", RlConfig, [*base, *overrides])


def sft_config(data: Path, *overrides: str) -> Any:
    base = [
        "initial_weights=null",
        f"output_dir={data}",
        f"data={{path: {data}/chats.jsonl, workers: 0, max_rejected_fraction: 1}}",
        "training.max_tokens_per_micro_batch=48",
        "model.max_length=400",
        "sequences_per_step=2",
    ]
    return load_config(CONFIGS / "sft/tiny_retool.yaml", SftConfig, [*base, *overrides])


def find_section(key: str) -> list[str]:
    return next((given for start, given in SECTIONS.items() if key.startswith(start)), [])


def changed(key: str, make: Callable[..., Any]) -> tuple[Any, Any]:
    """Return two valid configurations that differ in a key. The second resumes the first."""
    section = find_section(key)
    before = make(*section)
    if key in VALUES:
        return before, make(*section, *VALUES[key])
    value: Any = before.model_dump(mode="json")
    for name in key.split("."):
        value = None if value is None else value.get(name)
    for other in other_values(KEYS[key], value):
        try:
            after = make(*section, f"{key}={json.dumps(other)}")
        except (ConfigError, ValueError):
            continue
        if after != before:
            return before, after
    raise AssertionError(f"{key}: no other value is valid; name one in VALUES")


def make_run(config: RunConfig, name: str = "") -> RunDirectory:
    """Make a run that has a checkpoint."""
    run = start_run(config.directory, dump_config(config))
    write_json(run.inputs, to_json(read_run_inputs(config)))
    run.checkpoints.mkdir(exist_ok=True)
    (run.checkpoints / "latest").write_text("step_000003")
    return run


# -- the table ------------------------------------------------------------------------------------


def test_every_key_has_a_rule() -> None:
    """A rejected section covers its keys. Every other key has a separate rule."""
    for key in KEYS:
        above = [key[:i] for i, character in enumerate(key) if character == "."]
        refused = any(RULES[k].effect is ResumeEffect.REJECTED for k in above if k in RULES)
        assert key in RULES or refused, f"declare the effect of {key} in resume_rules.RULES"


def test_every_rule_has_a_key() -> None:
    for key in RULES:
        assert any(known == key or known.startswith(f"{key}.") for known in KEYS), key


def test_undeclared_key_is_rejected() -> None:
    assert find_rule("rollout.unheard_of").effect is ResumeEffect.REJECTED


PATHS_WITHOUT_INPUT = {"output_dir", "sandbox.interpreter", "rollout.engine.python"}


def test_every_path_is_an_input(tmp_path: Path) -> None:
    """Keys with paths are compared by content, or listed here."""
    named = {key for key, annotation in KEYS.items() if "pathlib" in str(annotation)}
    named |= {key for key in KEYS if key.endswith(("path", "python"))}
    file = tmp_path / "data.jsonl"
    file.write_text("{}\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    source = f"environment: gsm8k, train_path: {file}, held_out_path: {file}, pass_rate: {{episodes: {file}}}"
    of_dense = [f"tokenizer={tmp_path}", "vocabulary=tokenizer"]
    conversations = f"{{sources: {{s: {{path: {file}, validation_path: {file}}}}}}}"
    paths = [f"initial_weights={tmp_path}", f"tasks.sources={{s: {{{source}}}}}"]
    adapters = ["adapter={rank: 4}", f"initial_adapter={tmp_path}"]
    rl = load_config(CONFIGS / "rl/tiny_dense.yaml", RlConfig, [*paths, *of_dense])
    inputs = set(input_paths(rl))
    rl = load_config(
        CONFIGS / "rl/tiny_retool.yaml",
        RlConfig,
        [
            *paths,
            *adapters,
            f"vocabulary_data={conversations}",
            "tasks.sources.t={environment: retool}",
            f"algorithm.distillation={{teacher: {tmp_path}, teachers: {{t: {tmp_path}}}}}",
        ],
    )
    inputs |= {key.removesuffix(".t") for key in input_paths(rl)}
    teacher = f"loss={{type: distillation, teacher: {tmp_path}}}"
    sft = load_config(
        CONFIGS / "sft/tiny_retool.yaml", SftConfig, [*paths, f"data={conversations}", teacher]
    )
    inputs |= set(input_paths(sft))
    found = {key.replace("sources.s.", "sources.*.") for key in inputs}
    assert named - PATHS_WITHOUT_INPUT == found


def with_effect(keys: dict[str, Any], kind: type[RunConfig], effect: ResumeEffect) -> list[str]:
    skipped = ("tasks.sources.*", "data.sources.*", "vocabulary_data.", "algorithm.shaping.*")
    return [
        key
        for key in keys
        if find_rule(key, kind is RlConfig).effect is effect and not key.startswith(skipped)
    ]  # fmt: skip


REFUSED = sorted(
    key
    for key in with_effect(RL_KEYS, RlConfig, ResumeEffect.REJECTED)
    if not key.startswith(("model.", "adapter", "quantization", "chatml", "prompt", "vocabulary"))
    and not key.endswith("moment_dtype")
)


@pytest.mark.parametrize("key", REFUSED)
def test_change_of_a_rejected_key_is_rejected(key: str, data: Path, tmp_path: Path) -> None:
    before, after = changed(key, lambda *more: rl_config(data, f"output_dir={tmp_path}", *more))
    with pytest.raises(ConfigError, match="--resume cannot change") as refused:
        changes_since(make_run(before), after)
    assert key in str(refused.value)


# -- kept groups ----------------------------------------------------------------------------------


SAMPLING = sorted(key for key in RL_KEYS if find_rule(key).affects_sampling and ".*." not in key)


@pytest.mark.parametrize("key", [key for key in SAMPLING if key not in OF_CUSTOM_CODE])
def test_sampling_key_changes_the_digest(key: str, data: Path) -> None:
    before, after = changed(key, lambda *more: rl_config(data, *more))
    assert sampling_digest(before) != sampling_digest(after)


@pytest.mark.parametrize(
    "override", ["optimizer.lr=0.5", "rollout.workers=3", "training.steps=9", "evaluate_every=3"]
)
def test_other_keys_keep_the_digest(override: str, data: Path) -> None:
    assert sampling_digest(rl_config(data)) == sampling_digest(rl_config(data, override))


def test_another_judge_continues_a_run_with_new_episodes(data: Path, tmp_path: Path) -> None:
    place = f"output_dir={tmp_path}"
    judge = "tasks.sources.gsm8k.judge={url: 'http://one/v1', model: m, rubric: r}"
    before = rl_config(data, place, judge)
    after = rl_config(data, place, judge, "tasks.sources.gsm8k.judge.url=http://two/v1")
    for earlier, later in ((before, after), (rl_config(data, place), before)):
        assert sampling_digest(earlier) != sampling_digest(later)
    (change,) = changes_since(make_run(before), after)
    assert change.key == "tasks.sources.gsm8k.judge.url"


# -- the sequence of tasks ------------------------------------------------------------------------


class UnevenRunner:
    """A runner that delays every third group of a step until training reaches the step."""

    def __init__(self, groups_per_step: int) -> None:
        self.step = -1
        self._groups_per_step = groups_per_step
        self._late: list[AdmittedGroup] = []
        self._lock = RLock()

    def stream(self) -> GroupStream:
        return GroupStream(self._begin)

    def train(self, step: int) -> None:
        """Begin a step: end the groups that it waits for."""
        with self._lock:
            self.step = step
            late, self._late = self._late, []
            for admitted in late:
                self._begin(admitted)

    def _begin(self, admitted: AdmittedGroup) -> None:
        with self._lock:
            is_async = admitted.number // self._groups_per_step > self.step
            if is_async and admitted.number % 3 == 0:
                self._late.append(admitted)
            else:
                admitted.end(build_group(admitted, self.step))


def build_group(admitted: AdmittedGroup, version: int) -> TrajectoryGroup:
    episode = Trajectory(
        admitted.request.task.task_id,
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        rollout_log_probs=np.array([0, 0, -1, -1], np.float32),
        weight_versions=[WeightVersionSpan(2, 4, version)],
    )
    # Dynamic sampling replaces every fourth group, whose rewards are equal.
    has_signal = admitted.number % 4 > 0
    rewards = [float(has_signal and i % 2 == 0) for i in range(len(admitted.request.seeds))]
    episodes = [replace(episode, reward=r, reward_parts={"correct": r}) for r in rewards]
    return TrajectoryGroup(episode.task_id, episodes)


def train(
    config: RlConfig, directory: Path, state: RunState, is_over: Callable[[TaskMixture], bool]
) -> list[str]:
    """Train until ``is_over`` from a state and its saved groups.

    Returns:
        The ids of the tasks that were trained on or replaced.
    """
    tasks = build_tasks(config)
    if state.tasks is not None:
        tasks.continue_from(state.tasks)
    store = GroupStore(directory, 2, sampling_digest(config))
    rounds = config.algorithm.dynamic_sampling_rounds
    runner = UnevenRunner(rounds * config.rollout.tasks_per_step)
    collector = RolloutCollector(
        runner,
        TrainingRequests(tasks, config.rollout, config.seed),
        config.algorithm,
        steps=10**6,
        first_step=state.step,
        first_task=state.next_task,
        finished=store.load(state.step),
    )
    trained = []
    while not is_over(tasks):
        runner.train(state.step)
        collector.begin(state.step)
        batch = collector.collect(state.step)
        groups = [*batch.train, *(batch.replaced or [])]
        trained += [group.task_id for group in groups]
        tasks.add_groups(state.step, groups)
        state.next_task = batch.next_task
        state.step += 1
        state.tasks = tasks.cursor(state.next_task)
    store.save(state.step, collector.finished_groups())
    collector.close()
    return trained


def one_epoch(before: RlConfig, after: RlConfig, directory: Path) -> list[str]:
    """Train on one epoch, and resume in the middle with other settings."""
    state = RunState()
    trained = train(before, directory, state, lambda tasks: state.step == 7)
    state = RunState.from_checkpoint(json.loads(json.dumps(state.to_checkpoint())))

    def is_over(tasks: TaskMixture) -> bool:
        following = tasks.cursor(state.next_task + 1)
        return bool(following["sources"]["gsm8k"]["used_rows"] > ROWS)

    trained += train(after, directory, state, is_over)
    return trained


def check_each_task_once(trained: list[str], usable_in_both: int) -> None:
    repeated = [task for task, times in Counter(trained).items() if times > 1]
    assert not repeated, "trained on twice"
    rows = {int(task.rpartition("-")[2]) for task in trained}
    short = {i for i in range(ROWS) if i % 4 != 3}
    assert short <= rows, f"never trained on: {short - rows}"
    assert len(trained) >= usable_in_both


MAY_CHANGE_RL = sorted(
    key
    for key in with_effect(RL_KEYS, RlConfig, ResumeEffect.MAY_CHANGE)
    # Paths are compared by content, and this test has only one version of each file.
    if key not in ("initial_weights", "initial_adapter", "tokenizer", *OF_CUSTOM_CODE)
)


# Code that chooses tasks does not read these sections, so most of their keys are slow.
SLOW_SECTIONS = (
    "ablation.",
    "algorithm.correction.",
    "algorithm.critic.",
    "algorithm.distillation.loss.",
    "algorithm.kl.",
    "optimizer.",
    "rollout.engine.",
    "sandbox.",
)
FAST_KEYS = (
    "algorithm.distillation.loss.type",
    "algorithm.kl.coefficient",
    "optimizer.lr",
    "rollout.engine.type",
)
RL_CASES = [
    pytest.param(key, marks=pytest.mark.slow)
    if key.startswith(SLOW_SECTIONS) and key not in FAST_KEYS
    else key
    for key in MAY_CHANGE_RL
]


@pytest.mark.parametrize("key", RL_CASES)
def test_changed_key_repeats_and_loses_no_task(key: str, data: Path, tmp_path: Path) -> None:
    before, after = changed(key, lambda *more: rl_config(data, f"output_dir={tmp_path}", *more))
    assert changes_since(make_run(before), after), "the change is noticed and accepted"
    check_each_task_once(one_epoch(before, after, tmp_path / "async"), ROWS * 3 // 4)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(("first", "then"), [(250, 900), (900, 250), (900, 900)])
def test_other_filter_repeats_and_loses_no_task(
    first: int, then: int, rounds: int, data: Path, tmp_path: Path
) -> None:
    """``rollout.max_episode_tokens`` decides which prompts are short enough to answer."""
    options = [f"algorithm.dynamic_sampling_rounds={rounds}", "algorithm.max_staleness=2"]
    configs = [rl_config(data, *options, f"rollout.max_episode_tokens={n}") for n in (first, then)]
    usable = [len(build_tasks(config).sources["gsm8k"]._data or ()) for config in configs]
    assert usable == [{250: ROWS * 3 // 4, 900: ROWS}[n] for n in (first, then)]
    check_each_task_once(one_epoch(configs[0], configs[1], tmp_path), min(usable))


def test_unchanged_run_takes_tasks_as_if_never_interrupted(data: Path, tmp_path: Path) -> None:
    config = rl_config(data)
    state = RunState()
    whole = train(config, tmp_path / "whole", state, lambda tasks: state.step == 40)

    state = RunState()
    parts = train(config, tmp_path / "parts", state, lambda tasks: state.step == 17)
    state = RunState.from_checkpoint(state.to_checkpoint())
    parts += train(config, tmp_path / "parts", state, lambda tasks: state.step == 40)
    assert parts == whole


def has_steps(state: RunState, steps: int, tasks: TaskMixture) -> bool:
    return state.step == steps


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("rounds", [1, 2])
def test_resumed_run_skips_the_same_tasks(
    rounds: int, staleness: int, data: Path, tmp_path: Path
) -> None:
    """The pass rates of a run, not of its process, choose the tasks."""
    config = rl_config(
        data,
        "tasks.sources.gsm8k.pass_rate={retry: 0.2, minimum: 0.1}",
        f"algorithm.dynamic_sampling_rounds={rounds}",
        f"algorithm.max_staleness={staleness}",
    )
    state = RunState()
    whole = train(config, tmp_path / "whole", state, lambda tasks: state.step == 80)
    assert state.next_task > len(whole), "some task is skipped"

    state, parts = RunState(), []
    ends = iter((33, 34, 51, 80))
    while state.step < 80:
        end = next(ends)
        parts += train(config, tmp_path / "parts", state, partial(has_steps, state, end))
        state = RunState.from_checkpoint(json.loads(json.dumps(state.to_checkpoint())))
    assert parts == whole


def test_another_number_of_tasks_is_rejected(data: Path, tmp_path: Path) -> None:
    """Changed code of an environment may filter other rows, which changes the order."""
    config = rl_config(data)
    tasks = build_tasks(config)
    cursor = tasks.cursor(3)
    cursor["sources"]["gsm8k"]["tasks"] += 1
    with pytest.raises(
        ValueError, match=r"tasks\.sources\.gsm8k: the data has 24 tasks, but had 25"
    ):
        tasks.continue_from(cursor)


# -- the sequence of conversations ----------------------------------------------------------------


def learn(config: SftConfig, count: int, saved: Any) -> tuple[list[str], Any, bool]:
    from rl_loop.conversations.rejections import RejectionReport

    _, conversations = open_conversations(config)
    with conversations:
        stream = conversations.stream(RejectionReport(lambda _: None, lambda _: None, []), saved)
        names: list[str] = []
        while len(names) < count and not stream.exhausted:
            samples = stream.take(1)
            assert samples is not None
            names += samples.names
        return names, json.loads(json.dumps(stream.state())), stream.exhausted


def one_pass(before: SftConfig, after: SftConfig) -> list[str]:
    first, state, _ = learn(before, 9, None)
    rest, _, exhausted = learn(after, 10**6, state)
    assert exhausted
    return first + rest


def check_each_conversation_once(names: list[str]) -> None:
    assert [name for name, times in Counter(names).items() if times > 1] == []
    lines = {int(name.rpartition(" ")[2]) - 1 for name in names}
    assert {i for i in range(ROWS) if i % 4 != 3} <= lines


MAY_CHANGE_SFT = sorted(
    key
    for key in with_effect(SFT_KEYS, SftConfig, ResumeEffect.MAY_CHANGE)
    if key not in ("initial_weights", "initial_adapter", "tokenizer", "data")
)


@pytest.mark.parametrize("key", MAY_CHANGE_SFT)
def test_changed_key_repeats_and_loses_no_sample(key: str, data: Path, tmp_path: Path) -> None:
    options = [f"output_dir={tmp_path}", "data.sources.data.epochs=1"]
    before, after = changed(key, lambda *more: sft_config(data, *options, *more))
    assert changes_since(make_run(before), after), "the change is noticed and accepted"
    check_each_conversation_once(one_pass(before, after))


@pytest.mark.parametrize(("first", "then"), [(48, 300), (300, 48)])
def test_other_row_length_repeats_and_loses_no_sample(first: int, then: int, data: Path) -> None:
    """``training.max_tokens_per_micro_batch`` decides which samples are too long."""
    configs = [
        sft_config(data, "data.sources.data.epochs=1", f"training.max_tokens_per_micro_batch={n}")
        for n in (first, then)
    ]
    lengths = [len(learn(config, 10**6, None)[0]) for config in configs]
    assert lengths == [{48: ROWS * 3 // 4, 300: ROWS}[n] for n in (first, then)]
    check_each_conversation_once(one_pass(*configs))
