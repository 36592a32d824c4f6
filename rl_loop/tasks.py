"""The tasks of a run: which ones a step trains on, which ones measure it, and demonstrations of them."""

import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from megatron_gptoss.packing import Sample
from rl_loop import arithmetic
from rl_loop.config import RlConfig, RunConfig, SourceConfig, TaskConfig
from rl_loop.demonstrations import DemonstrationConfig, demonstrations_of, harmony_of
from rl_loop.environments import RewardConfig, Task, TaskFileError, environment_class, make_environment
from rl_loop.environments.task_file import TaskData
from rl_loop.infrastructure import describe
from rl_loop.prompt_limit import PromptLimit, UnusablePrompt, prompt_of
from rl_loop.scores import pass_rates, read_evaluation

BLOCK = 64  # training positions within which sources have exactly their shares
SHARED_WORDS = 13
"""As many words in a row in a held-out prompt contaminate a training task (the n-gram of GPT-3, arXiv 2005.14165)."""


class TaskSource:
    """Random access by position, so that a resumed run goes on where it was. Raises TaskFileError for bad data."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.tasks
        self.harmony = harmony_of(config)
        self.sources = {name: Source(name, source, config.tasks) for name, source in config.tasks.sources.items()}
        self.unusable: list[str] = []  # why tasks were left out, each once
        if isinstance(config, RlConfig):
            self._leave_out_unusable_prompts(config.rollout.max_tokens)
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

    def demonstrations(self, position: int, count: int, mixture: DemonstrationConfig) -> list[Sample]:
        """Demonstrations on ``count`` training tasks, as samples to learn from."""
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
            print(f"warning: {len(self.unusable)} tasks are left out: {shown}", flush=True)

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
            self._data = TaskData(config.train_path, name, self.environment, self.options)
            if limits := config.pass_rate:
                rates = pass_rates(read_evaluation(limits.episodes))
                wanted = (rates.get(task_id, limits.minimum) for task_id in self._data.task_ids)
                self._data.keep([limits.minimum <= rate <= limits.maximum for rate in wanted])
        if config.held_out_path is not None:
            data = TaskData(config.held_out_path, name, self.environment, self.options)
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
        with one, unless so many do that the words are those of a form."""
        self._excluded = frozenset(held_out)
        if self._data is None:
            return
        theirs = {run for prompt in held_out for run in _runs_of_words(prompt)}
        texts = [_text(task) for task in self._data]
        shared = [_runs_of_words(text) & theirs for text in texts]
        counts = Counter(run for runs in shared for run in runs)
        rare = {run for run, count in counts.items() if count <= max(10, len(texts) // 100)}
        self._data.keep([t not in self._excluded and rare.isdisjoint(s) for t, s in zip(texts, shared, strict=True)])

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

    def _generated(self, split: str, index: int) -> Task:
        try:
            task = self.environment.generate(split, self.seed, index, self.options)  # type: ignore[arg-type]
            return replace(task, task_id=f"{self.name}-{task.task_id}", environment=self.config.environment)
        except NotImplementedError as error:
            raise TaskFileError(f"tasks.sources.{self.name}: {error}") from None


def _runs_of_words(text: str) -> set[str]:
    """All runs of SHARED_WORDS words; of a shorter text, the text."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return {" ".join(words[i : i + SHARED_WORDS]) for i in range(max(1, len(words) - SHARED_WORDS + 1))}


def _text(task: Task) -> str:
    return task.messages[-1]["content"]


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
