"""The tasks of a run: which ones a step trains on, which ones measure it, and demonstrations of them."""

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

from rl_loop.config.tasks import PassRateConfig, SourceConfig, TaskConfig
from rl_loop.config.training import DemonstrationConfig
from rl_loop.data.decontamination import SHARED_WORDS, find_giveaways
from rl_loop.environments import RewardConfig, Task, arithmetic, environment_class, make_environment
from rl_loop.environments.base import Split
from rl_loop.harmony.codec import Harmony
from rl_loop.harmony.conversation import content_text
from rl_loop.infrastructure import describe
from rl_loop.tasks.demonstrations import demonstrations_of
from rl_loop.tasks.evaluation_records import pass_rates, read_evaluation
from rl_loop.tasks.prompt_limit import PromptLimit, UnusablePrompt, prompt_of
from rl_loop.tasks.task_file import TaskData, TaskFileError

if TYPE_CHECKING:
    from megatron_gptoss.packing import Sample

logger = logging.getLogger(__name__)

BLOCK = 64  # training positions within which sources have exactly their shares


class TaskSource:
    """Random access by position, so that a resumed run goes on where it was. Raises TaskFileError for bad data."""

    def __init__(self, config: TaskConfig, harmony: Harmony, max_prompt_tokens: int | None = None) -> None:
        """``max_prompt_tokens``: tasks whose prompt is as long are left out; None where nothing is rolled out."""
        self.config = config
        self.harmony = harmony
        self.sources = {name: Source(name, source, config) for name, source in config.sources.items()}
        self.unusable: list[str] = []  # why tasks were left out, each once
        if max_prompt_tokens is not None:
            self._leave_out_unusable_prompts(max_prompt_tokens)
        self._held_out = [task for source in self.sources.values() for task in source.held_out]
        held_out = [_text(task) for task in self._held_out]
        for source in self.sources.values():
            if source.config.weight > 0:
                source.decontaminate(held_out)
        self._shares = _shares([source.config.weight for source in self.sources.values()])

    def train(self, position: int, count: int) -> list[Task]:
        """Training tasks from ``position`` on, without end: sources mixed by weight, data shuffled in each epoch."""
        return [self._train_task(i) for i in range(position, position + count)]

    def held_out(self) -> list[Task]:
        return self._held_out

    def reward_parts(self) -> set[str]:
        """The names of what rewards are made of, in the environments of all sources."""
        names = {"correct", "format_error", "score"}
        for source in self.sources.values():
            if source.held_out:
                environment = make_environment(source.held_out[0], arithmetic.interpret, RewardConfig())
                names |= set(environment.unfinished().reward_parts)
        return names

    def prompt_ids(self, task: Task) -> list[int]:
        environment = make_environment(task, arithmetic.interpret, RewardConfig())
        return self.harmony.render_prompt(environment.prompt(), environment.tools(), environment.builtin_tools())

    def canary(self) -> list[int]:
        """A real text of the domain: the first held-out prompt and its answer."""
        task = self._held_out[0]
        answer = self.harmony.vocabulary.encode_text(rf"\boxed{{{task.ground_truth}}}")
        return self.prompt_ids(task) + answer

    def demonstrations(self, position: int, count: int, mixture: DemonstrationConfig) -> "list[Sample]":
        """Demonstrations on ``count`` training tasks, as samples to learn from."""
        from megatron_gptoss.packing import Sample  # takes seconds to import; a mistake in task data should not wait

        samples: list[Sample] = []
        for i, task in enumerate(self.train(position, count), start=position):
            shown = demonstrations_of(task, self.harmony, mixture, f"{self.config.seed}/{i}")
            samples += [Sample(demonstration.token_ids, demonstration.loss_mask) for demonstration in shown]
        return samples

    def _leave_out_unusable_prompts(self, max_tokens: int) -> None:
        """From now on no task has a prompt that cannot be rendered or leaves no room to answer."""
        limit = PromptLimit(self.harmony, max_tokens)

        def is_usable(task: Task) -> bool:
            try:
                prompt = prompt_of(make_environment(task, arithmetic.interpret, RewardConfig()))
            except Exception as error:
                raise TaskFileError(f"task {task.task_id}: its prompt cannot be made: {describe(error)}") from error
            try:
                if not limit.surely_fits(prompt):
                    limit.render(task.task_id, prompt)
            except UnusablePrompt as reason:
                if str(reason) not in self.unusable:
                    self.unusable.append(str(reason))
                return False
            return True

        for source in self.sources.values():
            source.keep_usable(is_usable)
        if self.unusable:
            shown = "; ".join(self.unusable[:5]) + ("; ..." if len(self.unusable) > 5 else "")
            logger.warning("%d tasks are left out: %s", len(self.unusable), shown)

    def _train_task(self, position: int) -> Task:
        block, place = divmod(position, BLOCK)
        order = [number for number, share in enumerate(self._shares) for _ in range(share)]
        random.Random(f"{self.config.seed}/mixture/{block}").shuffle(order)
        number = order[place]
        index = block * self._shares[number] + order[:place].count(number)
        return list(self.sources.values())[number].train(index)


class Source:
    """The tasks of one entry of ``tasks.sources``."""

    def __init__(self, name: str, config: SourceConfig, tasks: TaskConfig) -> None:
        self.name, self.config, self.seed = name, config, tasks.seed
        self.environment = environment_class(config.environment)
        self.options = self.environment.Options.model_validate(config.options)
        self._excluded: frozenset[str] = frozenset()
        self._is_usable: Callable[[Task], bool] = lambda task: True
        self._data: TaskData | None = None
        if config.train_path is not None:
            self._data = self._read("train", config.train_path)
            if limits := config.pass_rate:
                self._data.keep(self._teaches(self._data, limits))
        if config.held_out_path is not None:
            data = self._read("held_out", config.held_out_path)
            self.held_out = list(islice(data, tasks.held_out_tasks))
        else:
            self.held_out = [self._generated("held_out", i) for i in range(tasks.held_out_tasks)]

    def keep_usable(self, is_usable: Callable[[Task], bool]) -> None:
        """From now on there are only tasks of which ``is_usable`` is true. Raises TaskFileError if hardly any are."""
        self._is_usable = is_usable
        self.held_out = [task for task in self.held_out if is_usable(task)]
        kept = [is_usable(task) for task in self._data] if self._data is not None else [True]
        if not self.held_out or not any(kept):
            reason = "no prompt leaves room to answer; raise rollout.max_tokens"
            raise TaskFileError(f"tasks.sources.{self.name}: {reason}")
        if self._data is not None:
            self._data.keep(kept)

    def decontaminate(self, held_out: list[str]) -> None:
        """From now on no training task has one of these prompts, and none of data shares SHARED_WORDS words in a row
        with one, unless they are the words of a form."""
        self._excluded = frozenset(held_out)
        if self._data is None:
            return

        giveaways = find_giveaways((_text(task) for task in self._data), held_out)
        if any(giveaways):
            count = f"{sum(giveaways)} of {len(giveaways)} training tasks are left out"
            reason = f"they have the prompt, or {SHARED_WORDS} words in a row, in common with a held-out task"
            logger.warning("tasks.sources.%s: %s: %s", self.name, count, reason)
        self._data.keep([not gives_away for gives_away in giveaways])

    def train(self, index: int) -> Task:
        if self._data is None:
            for attempt in range(1000):
                task = self._generated("train", index + (attempt << 32))
                if _text(task) not in self._excluded and self._is_usable(task):
                    return task
            few = "hardly any task that is not held out and whose prompt is shorter than rollout.max_tokens"
            raise TaskFileError(f"tasks.sources.{self.name}: the generator gives {few}")
        epoch, offset = divmod(index, len(self._data))
        return self._data[_order(len(self._data), f"{self.seed}/{epoch}")[offset]]

    def _read(self, split: Split, place: str) -> TaskData:
        """Task data whose ids are told from those of the other split and of other sources."""
        prefix = f"{self.name}-{split}-"
        return TaskData(place, self.config.environment, self.environment, self.options, prefix)

    def _generated(self, split: Split, index: int) -> Task:
        try:
            task = self.environment.generate(split, self.seed, index, self.options)
            return replace(task, task_id=f"{self.name}-{split}-{index}", environment=self.config.environment)
        except NotImplementedError as error:
            raise TaskFileError(f"tasks.sources.{self.name}: {error}") from None

    def _teaches(self, data: TaskData, limits: PassRateConfig) -> list[bool]:
        """Which training tasks have a pass rate within the limits, or were not evaluated.

        An evaluation of the same file names its tasks as held out; those of earlier versions have no split in their
        names."""
        rates = pass_rates(read_evaluation(limits.episodes))
        found = []
        for row in data.row_ids:
            names = (f"{self.name}-held_out-{row}", row, f"{self.name}-{row}")
            found.append(next((rates[name] for name in names if name in rates), None))
        if all(rate is None for rate in found):
            example = f"{self.name}-held_out-{data.row_ids[0]}"
            raise TaskFileError(
                f"{limits.episodes}: none of the training tasks of tasks.sources.{self.name} was evaluated there, such "
                f"as {example}: evaluate train_path as held_out_path of a source of the same name"
            )
        return [rate is None or limits.minimum <= rate <= limits.maximum for rate in found]


def _text(task: Task) -> str:
    """What is asked: all that the user and the assistant say. Instructions of the developer are those of many tasks."""
    asked = [message for message in task.messages if message["role"] not in ("system", "developer")]
    return "\n".join(content_text(message) for message in asked or task.messages)


@lru_cache(maxsize=8)
def _order(count: int, seed: str) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _shares(weights: list[float]) -> list[int]:
    """Whole numbers in proportion to ``weights`` that add up to BLOCK (largest remainders)."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    for i in sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])[: BLOCK - sum(shares)]:
        shares[i] += 1
    return shares
