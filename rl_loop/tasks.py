"""The tasks of a run: which ones a step trains on, which ones measure it, and demonstrations of them."""

from __future__ import annotations

import random

from megatron_gptoss.packing import Sample
from rl_loop import arithmetic
from rl_loop.config import RunConfig
from rl_loop.demonstrations import DemonstrationConfig, demonstrate
from rl_loop.environments import Task, TaskFileError, read_tasks
from rl_loop.harmony import Harmony
from rl_loop.vocabulary import make_vocabulary


class TaskSource:
    """Random access by position, so that a resumed run goes on where it was. Raises TaskFileError for a bad file."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config.tasks
        vocabulary = make_vocabulary(config.vocabulary, config.model.vocab_size)
        self.harmony = Harmony(vocabulary, config.prompt)
        self._train: list[Task] = []
        if self.config.train_path is not None and self.config.held_out_path is not None:
            self._train = read_tasks(self.config.train_path)
            self._held_out = read_tasks(self.config.held_out_path)[: self.config.held_out_tasks]
            shared = {t.messages[-1]["content"] for t in self._train} & {
                t.messages[-1]["content"] for t in self._held_out
            }
            if shared:
                raise TaskFileError(
                    f"{len(shared)} tasks of {self.config.held_out_path} are in {self.config.train_path} too, such as "
                    f"{sorted(shared)[0][:80]!r}: accuracy on them would mean nothing"
                )
        else:
            count = self.config.held_out_tasks
            self._held_out = [self._task(arithmetic.problem("held_out", self.config.seed, i), i) for i in range(count)]

    def train(self, position: int, count: int) -> list[Task]:
        """Training tasks ``position`` .. ``position + count - 1`` without end. A file is shuffled each epoch."""
        return [self._train_task(i) for i in range(position, position + count)]

    def held_out(self) -> list[Task]:
        return self._held_out

    def prompt_ids(self, task: Task) -> list[int]:
        return self.harmony.render_prompt(task.messages)

    def canary(self) -> list[int]:
        """A real text of the domain: the first held-out prompt and its answer."""
        task = self._held_out[0]
        answer = self.harmony.vocabulary.encode_text(rf"\boxed{{{task.ground_truth}}}")
        return self.prompt_ids(task) + answer

    def demonstrations(self, position: int, count: int, mixture: DemonstrationConfig) -> list[Sample]:
        """Demonstrations on generated training problems, as samples to learn from."""
        samples = []
        for i in range(position, position + count):
            problem = arithmetic.problem("train", self.config.seed, i)
            prompt = self.prompt_ids(self._task(problem, i))
            demonstration = demonstrate(
                problem, prompt, self.harmony, mixture, random.Random(f"{self.config.seed}/{i}")
            )
            samples.append(Sample(demonstration.token_ids, demonstration.loss_mask))
        return samples

    def _train_task(self, position: int) -> Task:
        if not self._train:
            return self._task(arithmetic.problem("train", self.config.seed, position), position)
        epoch, offset = divmod(position, len(self._train))
        order = list(range(len(self._train)))
        random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return self._train[order[offset]]

    def _task(self, problem: arithmetic.Problem, index: int) -> Task:
        messages = [{"role": "user", "content": problem.text}]
        if self.config.instructions is not None:
            messages.insert(0, {"role": "developer", "content": self.config.instructions})
        return Task(f"{arithmetic.split_of(problem.expression)}-{index}", messages, str(problem.answer))
