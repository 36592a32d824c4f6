"""The checkpoints of a run as its trainer ranks write and read them: the policy's, the critic's
beside them, and the adapters that stay when the policy's are deleted.

The driver says when one is due (``trainer.checkpointer``). How the files of one trainer are written
and read is in ``megatron_gptoss.checkpoint``, how adapters are kept in ``trainer.adapter_keeper``.
This module holds what spans them: in which order they are written, what is waited for and when,
and which checkpoint a resumed run goes on from.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from converters.adapter_checkpoint import peft_base_name
from megatron_gptoss.checkpoint.directory import (
    earlier_checkpoints,
    find_checkpoint,
    latest_checkpoint,
    step_of,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import find_damage, load_checkpoint
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.critic import ValueTrainer
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.config.parts import TrainerConfig
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.trainer.adapter_keeper import AdapterKeeper
from rl_loop.trainer.rank_answers import Resumed


class RunCheckpoints:
    """Saves policy and critic together, and loads the newest checkpoint of which both are intact.

    A checkpoint is written in the background: ``start`` begins it, ``publish_written`` completes it
    between two updates, ``finish`` waits for it. Every method is collective.
    """

    def __init__(
        self, settings: TrainerConfig, policy: PolicyTrainer, critic: ValueTrainer | None
    ) -> None:
        """``policy``, ``critic``: what is saved, and what ``resume`` loads into."""
        self._run = RunDirectory(settings.directory)
        self._policy = policy
        self._critic = critic
        self._adapter_keeper: AdapterKeeper | None = None
        if settings.training.keep_adapters:
            base_name = peft_base_name(settings.initial_weights)
            self._adapter_keeper = AdapterKeeper(self._run, base_name)

        self._writers: list[tuple[CheckpointWriter, PolicyTrainer]] = []
        """Each with what it writes, in the order in which they are started and finished."""
        keep = settings.training.keep_checkpoints
        if critic is not None:
            # One more than of the policy, which is written last and decides what is the latest.
            of_critic = CheckpointWriter(self._run.critic_checkpoints, keep + 1)
            self._writers.append((of_critic, critic))
        of_policy = CheckpointWriter(self._run.checkpoints, keep, self._adapter_keeper)
        self._writers.append((of_policy, policy))

    # -- saving -----------------------------------------------------------------------------------

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything to host memory and begin to write it. One that was started before is
        finished first.

        Args:
            step: number of finished steps, which names the checkpoint.
            state: what ``resume`` is to return, as JSON.

        Raises:
            CheckpointError: if this one, or the one before, cannot be written.
        """
        for writer, trainer in self._writers:
            writer.start(trainer, step, state)

    def publish_written(self) -> None:
        """Make what was started the latest checkpoint if all ranks have written it and none reads
        an earlier one; wait for nothing otherwise.

        Raises:
            CheckpointError: if it cannot be written.
        """
        for writer, _ in self._writers:
            writer.finish(block=False)

    def finish(self, block: bool) -> None:
        """Wait until what was started is complete, its kept adapters included. Without ``block``,
        only if adapters are known not to have been written, which ends the run.

        Raises:
            CheckpointError: if it cannot be written; if it is complete, but the kept adapters of
                this or an earlier checkpoint cannot be written.
        """
        keeper = self._adapter_keeper
        if not block:
            has_failed = keeper is not None and keeper.has_failed()
            if not has_failed:
                return

        # A run that ends with an error must not lose the steps up to here.
        for writer, _ in self._writers:
            writer.finish()
        if keeper is not None:
            keeper.finish()

    # -- resuming ---------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """Load the newest checkpoint of the run whose files are as they were written; None if none
        was saved. Kept adapters become those of the steps up to it.

        Raises:
            CheckpointError: naming the damaged files if there is no such checkpoint; as
                ``AdapterKeeper.write_missing`` does.
        """
        newest = latest_checkpoint(self._run.checkpoints)
        if newest is None:
            self._go_on_with_adapters_of(None)
            return None

        damages: list[str] = []
        for path in (newest, *earlier_checkpoints(newest)):
            damage = self._damage(path)
            if damage is None:
                state = self._load(path)
                self._go_on_with_adapters_of(path)
                return Resumed(state, damages)
            damages.append(damage)
        raise CheckpointError(
            f"{self._run.path} has no checkpoint that can be loaded: {'; '.join(damages)}. Restore "
            "a file from a copy, or begin again with --overwrite"
        )

    def _damage(self, path: Path) -> str | None:
        """Say what is wrong with a checkpoint of the policy, and of the critic beside it."""
        damage = find_damage(path)
        if damage is not None or self._critic is None:
            return damage
        of_critic = find_checkpoint(self._run.critic_checkpoints, path.name)
        if of_critic is None:
            return f"{self._run.critic_checkpoints / path.name}: missing or incomplete"
        return find_damage(of_critic)

    def _load(self, path: Path) -> dict[str, Any]:
        """Load policy and critic, in which ``_damage`` has found nothing. Returns the state that
        was saved with them."""
        if self._critic is not None:
            of_critic = find_checkpoint(self._run.critic_checkpoints, path.name)
            assert of_critic is not None, path
            load_checkpoint(of_critic, self._critic, is_checked=True)
        return load_checkpoint(path, self._policy, is_checked=True)

    def _go_on_with_adapters_of(self, checkpoint: Path | None) -> None:
        """Make the kept adapters those of the checkpoints up to this one; of none for None."""
        if dist.get_rank() == 0:
            step = 0 if checkpoint is None else step_of(checkpoint)
            self._run.delete_adapters_after(step)
        if self._adapter_keeper is not None and checkpoint is not None:
            self._adapter_keeper.write_missing(checkpoint)
