"""Training tasks, held-out tasks and demonstrations of a run."""

import logging
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count as count_from
from itertools import islice
from typing import Any

from megatron_gptoss.samples import TrainingSamples
from rl_loop.chat.codec import ChatCodec
from rl_loop.config.tasks import SourceConfig, TaskConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.data.decontamination import SHARED_WORDS, find_contaminated
from rl_loop.data.mixture import SourceMixture
from rl_loop.data.trajectory import TrajectoryGroup
from rl_loop.environments import Task, environment_class, make_offline_environment
from rl_loop.environments.base import InvalidRowError, Split
from rl_loop.harmony.conversation import content_text
from rl_loop.rewards.judge_config import SCORE_PART, UNSCORED_PART
from rl_loop.tasks.demonstrations import build_demonstrations
from rl_loop.tasks.episode_prompts import EpisodePromptRenderer, build_prompt, unusable_reason
from rl_loop.tasks.pass_rates import TaskSelection, evaluated_within
from rl_loop.tasks.task_file import TaskData, TaskFileError

logger = logging.getLogger(__name__)

ATTEMPTS = 1000
"""Maximum number of generated tasks to try for a usable one: not held out and not too long."""
NAME_IN_TEXT = re.compile(r"\{(\w+)\}")
NAMED_TASKS = 5
"""Maximum number of tasks that the warning about unusable tasks names."""


class TaskMixture:
    """All tasks of a run.

    Tasks are accessed by position, so that a resumed run continues at its last position.
    """

    def __init__(
        self,
        config: TaskConfig,
        codec: ChatCodec,
        max_prompt_tokens: int | None = None,
        max_staleness: int = 0,
    ) -> None:
        """Read and check the data of all sources.

        Args:
            config: ``tasks`` of the configuration.
            codec: chat format of the model.
            max_prompt_tokens: tasks whose prompt has this many tokens or more are left out. None for
                no limit, in runs without rollouts.
            max_staleness: number of steps that may begin before a step has ended.

        Raises:
            TaskFileError: if data cannot be used.
        """
        self.config = config
        self.codec = codec
        self.sources: dict[str, TaskSource] = {}
        for name, source_config in config.sources.items():
            self.sources[name] = TaskSource(name, source_config, config, max_staleness)

        self.unusable: list[str] = []
        """Distinct reasons why tasks were left out."""
        # Before decontamination, because copies of unusable held-out prompts may be trained on.
        if max_prompt_tokens is not None:
            self._leave_out_unusable_prompts(max_prompt_tokens)

        self._held_out = [task for source in self.sources.values() for task in source.held_out]
        held_out_texts = [prompt_text(task) for task in self._held_out]
        for source in self.sources.values():
            # Sources with weight 0 are only evaluated.
            if source.config.weight > 0:
                source.decontaminate(held_out_texts)

        weights = [source.config.weight for source in self.sources.values()]
        # The order of the data has the same seed. The suffix makes the order of the sources
        # independent of it.
        self._mixture = SourceMixture(weights, f"{config.seed}/mixture")

    def train(self, position: int, count: int) -> list[Task]:
        """Return ``count`` training tasks, starting at ``position``. Positions have no upper limit.

        Sources are mixed by weight. Data is shuffled in each epoch.
        """
        return [self._train_task(i) for i in range(position, position + count)]

    def select(self, position: int, count: int, step: int) -> list[int]:
        """Return the positions of the next ``count`` tasks of a step, from ``position`` on.

        Tasks that ``pass_rate.retry`` skips are left out.
        """
        used = (i for i in count_from(position) if not self._is_skipped(i, step))
        return list(islice(used, count))

    def _is_skipped(self, position: int, step: int) -> bool:
        """Return True if a step leaves out the task at a training position."""
        selection = self._source_at(position).selection
        if selection is None:
            return False
        return selection.skips(self._train_task(position).task_id, position, step)

    def add_groups(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the pass rates of the groups of a step that has ended."""
        for source in self.sources.values():
            if source.selection is not None:
                prefix = source.train_prefix
                source_groups = [group for group in groups if group.task_id.startswith(prefix)]
                source.selection.add_groups(step, source_groups)

    @property
    def selects_tasks(self) -> bool:
        """True if pass rates of this run decide which tasks are used."""
        return any(source.selection is not None for source in self.sources.values())

    def cursor(self, position: int) -> dict[str, Any]:
        """Return the state of the data before the task at ``position``, as JSON for a checkpoint.

        The state counts rows in the order of the data. A resumed run uses every task once, even if
        it leaves out other tasks than before.
        """
        sources: dict[str, dict[str, Any]] = {}
        for number, (name, source) in enumerate(self.sources.items()):
            if source.total is not None:
                # Positions and rows include tasks that are left out.
                used = self._mixture.count_before(position, number)
                sources[name] = {"tasks": source.total, "used_rows": source.used_rows(used)}
                if source.selection is not None:
                    sources[name]["pass_rates"] = source.selection.state()
        return {"position": position, "sources": sources}

    def continue_from(self, cursor: Mapping[str, Any]) -> None:
        """Continue at a cursor of an earlier run.

        Raises:
            TaskFileError: if a source has a different number of tasks.
        """
        for number, (name, source) in enumerate(self.sources.items()):
            saved = cursor["sources"].get(name)
            before = None if saved is None else saved["tasks"]
            if source.total != before:
                raise TaskFileError(
                    f"tasks.sources.{name}: the data has {source.total} tasks, but had {before} "
                    "when the checkpoint was saved, so some tasks would be used twice. Restore "
                    "the data, or start another run"
                )
            if saved is not None:
                used = self._mixture.count_before(cursor["position"], number)
                source.continue_from(used, saved["used_rows"])
                if source.selection is not None:
                    source.selection.restore(saved["pass_rates"])

    def held_out(self) -> list[Task]:
        """Return the tasks for evaluation."""
        return self._held_out

    def reward_parts(self) -> set[str]:
        """Return the names of the reward parts in all sources' environments."""
        # The base class of environments adds these parts.
        names = {"correct", "format_error", "score"}
        for source in self.sources.values():
            if source.held_out:
                # Only results of an environment name its parts. ``end_truncated`` needs no turn.
                environment = make_offline_environment(source.held_out[0])
                names |= environment.end_truncated().reward_parts.keys()
            if source.config.judge is not None:
                names |= {SCORE_PART, UNSCORED_PART}
        return names

    def prompt_ids(self, task: Task) -> list[int]:
        """Render the prompt of a task."""
        # Offline, because a prompt needs neither a sandbox nor a server of tools.
        prompt = build_prompt(make_offline_environment(task))
        return self.codec.render_prompt(prompt.messages, prompt.tools, prompt.builtin_tools)

    def canary(self) -> list[int]:
        """Return the tokens of a real text: the first held-out prompt and its answer."""
        task = self._held_out[0]
        answer = make_offline_environment(task).reference_answer()
        return self.prompt_ids(task) + self.codec.vocabulary.encode_text(answer)

    def check_demonstrations(self) -> None:
        """Run a correct and a faulty demonstration of the first task of every source.

        Raises:
            TaskFileError: if no script can solve a source's tasks.
        """
        # Only sources that are trained on need demonstrations.
        for source in self.sources.values():
            if source.config.weight == 0:
                continue
            # A script may be able to write only one of the two kinds.
            for correct_fraction in (1.0, 0.0):
                mixture = DemonstrationConfig(correct_fraction=correct_fraction)
                try:
                    build_demonstrations(source.train(0), self.codec, mixture, "check")
                except NotImplementedError as error:
                    raise TaskFileError(
                        f"tasks.sources.{source.name}: its tasks have no demonstrations: "
                        f"{error}. Fine-tune on conversations instead (data)"
                    ) from None

    def demonstrations(
        self, position: int, count: int, mixture: DemonstrationConfig
    ) -> TrainingSamples:
        """Return demonstrations on ``count`` training tasks as training samples."""
        sequences = []
        names = []
        for i, task in enumerate(self.train(position, count), start=position):
            seed = f"{self.config.seed}/{i}"
            for demonstration in build_demonstrations(task, self.codec, mixture, seed):
                ids, mask = demonstration.token_ids, demonstration.loss_mask
                sequences.append({"token_ids": ids, "loss_mask": mask})
                # Names for messages about a sample, such as one that is too long.
                names.append(task.task_id)
        return TrainingSamples.join(sequences, names)

    def _leave_out_unusable_prompts(self, max_tokens: int) -> None:
        """Leave out tasks whose prompt is too long or cannot be rendered, and log a warning."""
        renderer = EpisodePromptRenderer(self.codec, max_tokens)

        def is_usable(task: Task) -> bool:
            reason = unusable_reason(task, renderer)
            if reason is not None and reason not in self.unusable:
                self.unusable.append(reason)
            return reason is None

        # Check all tasks at the start. Otherwise an unusable task could end the run after hours.
        for source in self.sources.values():
            source.keep_usable(is_usable)

        if self.unusable:
            shown = "; ".join(self.unusable[:NAMED_TASKS])
            if len(self.unusable) > NAMED_TASKS:
                shown += "; ..."
            logger.warning("%d tasks are left out: %s", len(self.unusable), shown)

    def _train_task(self, position: int) -> Task:
        """Return the task at a training position."""
        source = self._source_at(position)
        # Index in the source: how often the mixture chose the source before this position.
        return source.train(self._mixture.earlier(position))

    def _source_at(self, position: int) -> "TaskSource":
        return list(self.sources.values())[self._mixture.source_at(position)]


class TaskSource:
    """Tasks of one ``tasks.sources`` item.

    The index of a training task counts the tasks of this source that a run trains on. The number of
    used rows also counts rows that are left out. Both count over all epochs.
    """

    def __init__(
        self, name: str, config: SourceConfig, tasks: TaskConfig, max_staleness: int
    ) -> None:
        """Read data, if any, and held-out tasks. Raises TaskFileError if that fails."""
        self.name = name
        self.config = config
        self.seed = tasks.seed
        self.environment = environment_class(config.environment)
        self.options = self.environment.Options.model_validate(config.options)

        self._excluded: frozenset[str] = frozenset()
        """Held-out prompts. No training task may have one."""
        self._is_usable: Callable[[Task], bool] = lambda task: True
        self._data: TaskData | None = None
        """Training tasks. None if they are generated."""
        self._used_rows_at_start = 0
        """Used rows when the run was resumed, over all epochs."""
        self._kept_orders: dict[int, list[int]] = {}
        """Results of ``_kept_order`` by epoch."""
        self.train_prefix = f"{name}-train-"
        """Begin of the id of every training task."""
        self.selection: TaskSelection | None = None
        """Selection by the pass rates of this run. None to use every task."""
        self._offset = 0
        """Task ``index`` has the number ``index`` + offset among the tasks that are not left out."""

        if config.train_path is not None:
            self._data = self._read("train", config.train_path)
            self._select_by_pass_rate(self._data, max_staleness)

        if config.held_out_path is not None:
            data = self._read("held_out", config.held_out_path)
            # The first tasks of the file, so that every run with this file has the same evaluation.
            held_out = list(islice(data, tasks.held_out_tasks))
        else:
            held_out = [self._generate("held_out", i) for i in range(tasks.held_out_tasks)]
        self.held_out = [self._with_rubric(task) for task in held_out]

    def keep_usable(self, is_usable: Callable[[Task], bool]) -> None:
        """Leave out tasks for which ``is_usable`` is false.

        Raises:
            TaskFileError: if no task is left.
        """
        self._is_usable = is_usable
        self.held_out = [task for task in self.held_out if is_usable(task)]
        mask = [True]
        if self._data is not None:
            mask = [is_usable(self._trained(task)) for task in self._data]
        if not self.held_out or not any(mask):
            kind = "training" if self.held_out else "held-out"
            raise TaskFileError(
                f"tasks.sources.{self.name}: no {kind} task is usable. All prompts have "
                "rollout.max_episode_tokens or more tokens, or cannot be rendered. Increase "
                "rollout.max_episode_tokens, or correct the prompts"
            )

        if self._data is not None:
            self._data.filter(mask)
            # The cached orders contain the tasks that are left out now.
            self._kept_orders = {}

    def decontaminate(self, held_out: list[str]) -> None:
        """Leave out training tasks that contain one of these prompts, and log their number.

        A generated task is left out if its prompt equals a held-out prompt. A task of a file is also
        left out if ``find_contaminated`` finds that its question contains a held-out prompt, or that
        a held-out prompt contains its question.
        """
        self._excluded = frozenset(held_out)
        # Generated tasks are compared when they are generated.
        if self._data is None:
            return

        contaminated = find_contaminated((prompt_text(task) for task in self._data), held_out)
        if any(contaminated):
            logger.warning(
                "tasks.sources.%s: %d of %d training tasks are left out, because they share %d words in "
                "a row, or a shorter question, with a held-out task",
                self.name,
                sum(contaminated),
                len(contaminated),
                SHARED_WORDS,
            )
        self._data.filter([not is_copy for is_copy in contaminated])
        self._kept_orders = {}

    @property
    def total(self) -> int | None:
        """Number of tasks in the data, including those left out. None if they are generated."""
        return None if self._data is None else self._data.total

    def find_place(self, index: int) -> int:
        """Return the place of training task ``index`` in the data: a number for ``task_at``."""
        assert self._data is not None
        # An epoch has every task once, except those that are left out.
        epoch, rank = divmod(index + self._offset, len(self._data))
        return self._kept_order(epoch)[rank]

    def used_rows(self, index: int) -> int:
        """Return the number of rows that are used before task ``index``, over all epochs."""
        if index + self._offset == 0:
            return self._used_rows_at_start
        assert self._data is not None
        epoch = (index - 1 + self._offset) // len(self._data)
        # All rows up to the last used task are used, including rows that are left out.
        last = self._order(epoch).index(self.find_place(index - 1))
        # Rows after the last used task may be used, too, if they were used before the resume and are
        # left out now.
        return max(self._used_rows_at_start, epoch * self._data.total + last + 1)

    def continue_from(self, index: int, used_rows: int) -> None:
        """Make task ``index`` the first task after ``used_rows`` rows that is not left out."""
        assert self._data is not None
        epoch, used_in_epoch = divmod(used_rows, self._data.total)
        kept = set(self._data.places)
        # Number of used tasks in the epoch that are not left out.
        rank = sum(place in kept for place in self._order(epoch)[:used_in_epoch])
        self._used_rows_at_start = used_rows
        self._offset = epoch * len(kept) + rank - index

    def _order(self, epoch: int) -> list[int]:
        """Return the places of all tasks in the order of an epoch, including those left out."""
        assert self._data is not None
        return _shuffle(self._data.total, f"{self.seed}/{epoch}")

    def _kept_order(self, epoch: int) -> list[int]:
        """Return the places of the tasks that are not left out, in the order of an epoch."""
        assert self._data is not None
        if epoch not in self._kept_orders:
            kept = set(self._data.places)
            order = [place for place in self._order(epoch) if place in kept]
            # Asynchronous steps use at most two epochs at a time.
            self._kept_orders = dict([*self._kept_orders.items(), (epoch, order)][-2:])
        return self._kept_orders[epoch]

    def train(self, index: int) -> Task:
        """Return training task ``index``. Data is shuffled again after its last task.

        Raises:
            TaskFileError: if ATTEMPTS generated tasks in a row cannot be used.
        """
        if self._data is not None:
            return self._trained(self._data.task_at(self.find_place(index)))

        for attempt in range(ATTEMPTS):
            # A retry uses an index far above the indices of other tasks, so that no task occurs twice.
            task = self._trained(self._generate("train", index + (attempt << 32)))
            if prompt_text(task) not in self._excluded and self._is_usable(task):
                return task
        raise TaskFileError(
            f"tasks.sources.{self.name}: {ATTEMPTS} generated tasks in a row were equal to held-out tasks, "
            "or had prompts of rollout.max_episode_tokens or more tokens. Use options that generate more "
            "different tasks, or increase rollout.max_episode_tokens"
        )

    def _select_by_pass_rate(self, data: TaskData, max_staleness: int) -> None:
        """Leave out the tasks that ``pass_rate`` excludes, and prepare the selection of others."""
        limits = self.config.pass_rate
        if limits is None:
            return

        within = [True] * len(data)
        if limits.episodes is not None:
            within = evaluated_within(limits, self.name, data.row_ids)
        if limits.retry is None:
            data.filter(within)
            return
        seed = f"{self.seed}/{self.name}/pass_rate"
        self.selection = TaskSelection(limits, seed, max_staleness)
        rows = zip(data.row_ids, within, strict=True)
        self.selection.mark_outside(f"{self.train_prefix}{row}" for row, is_in in rows if not is_in)

    def _read(self, split: Split, place: str) -> TaskData:
        """Read task data. Ids contain the source and the split, so they are unique in a run."""
        prefix = f"{self.name}-{split}-"
        config = self.config
        return TaskData(
            place, config.environment, self.environment, self.options, prefix, config.columns
        )

    def _generate(self, split: Split, index: int) -> Task:
        """Generate a task. Raises TaskFileError if the environment cannot generate it."""
        try:
            task = self.environment.generate(split, self.seed, index, self.options)
        except (NotImplementedError, InvalidRowError) as error:
            raise TaskFileError(f"tasks.sources.{self.name}: {error}") from None
        return replace(
            task,
            task_id=f"{self.name}-{split}-{index}",
            environment=self.config.environment,
        )

    def _trained(self, task: Task) -> Task:
        """Return a training task with its source, hint and rubric. Raises TaskFileError."""
        template = self.config.teacher_hint
        hint = (
            None
            if template is None
            else self._fill(f"tasks.sources.{self.name}.teacher_hint", template, task)
        )
        return replace(self._with_rubric(task), teacher_hint=hint)

    def _with_rubric(self, task: Task) -> Task:
        """Return a task with its source and the rubric for its judge. Raises TaskFileError."""
        judge = self.config.judge
        rubric = (
            None
            if judge is None
            else self._fill(f"tasks.sources.{self.name}.judge.rubric", judge.rubric, task)
        )
        return replace(task, source=self.name, rubric=rubric)

    def _fill(self, key: str, template: str, task: Task) -> str:
        """Return a text of this source with the values of a task.

        Args:
            key: full key of the text, for errors.
            template: text with names in braces.
            task: task with the values.

        Raises:
            TaskFileError: the task has no value for a name in the text.
        """
        values = {**task.metadata, "ground_truth": task.ground_truth}
        unknown = sorted(set(NAME_IN_TEXT.findall(template)) - values.keys())
        if unknown:
            raise TaskFileError(
                f"{key}: task {task.task_id} has no {', '.join(unknown)}. Known names: "
                f"{', '.join(values)}"
            )
        return NAME_IN_TEXT.sub(lambda name: str(values[name[1]]), template)


def prompt_text(task: Task) -> str:
    """Return the text of the user's and the assistant's messages."""
    # Developer messages are left out, because many tasks have the same ones.
    messages = [
        message for message in task.messages if message["role"] not in ("system", "developer")
    ]
    return "\n".join(content_text(message) for message in messages or task.messages)


@lru_cache(maxsize=8)
def _shuffle(count: int, seed: str) -> list[int]:
    """Return the order of ``count`` tasks in an epoch."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
