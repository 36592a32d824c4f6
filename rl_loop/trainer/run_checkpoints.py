"""Checkpoints of a run as its trainer ranks write and read them.

They consist of the policy's checkpoints, the critic's checkpoints, and the adapters that remain
when the policy's checkpoints are deleted.

The driver decides when to save (``trainer.checkpointer``). ``megatron_gptoss.checkpoint`` writes
and reads the files of one trainer, and ``trainer.adapter_archiver`` keeps adapters. This module
coordinates both. It defines the order of writing, the waiting, and the checkpoint for a resume.
"""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from converters.adapter_checkpoint import peft_base_name
from megatron_gptoss.checkpoint.directory import (
    checkpoint_step,
    earlier_checkpoints,
    find_checkpoint,
    latest_checkpoint,
)
from megatron_gptoss.checkpoint.errors import CheckpointError
from megatron_gptoss.checkpoint.loader import find_damage, load_checkpoint
from megatron_gptoss.checkpoint.writer import CheckpointWriter
from megatron_gptoss.critic import ValueTrainer
from megatron_gptoss.trainer import PolicyTrainer
from rl_loop.config.partial_configs import TrainerConfig
from rl_loop.tracking.run_directory import RunDirectory
from rl_loop.trainer.adapter_archiver import AdapterArchiver
from rl_loop.trainer.rank_state import ResumedState


class RunCheckpoints:
    """Saves policy and critic together, and loads the newest checkpoint with both intact.

    A checkpoint is written in the background: ``start`` begins it, ``publish_if_complete`` completes it
    between two updates, ``finish`` waits for it. Every method is collective.
    """

    def __init__(
        self, settings: TrainerConfig, policy: PolicyTrainer, critic: ValueTrainer | None
    ) -> None:
        """Save to the run directory of ``settings``, and resume from there.

        Args:
            settings: settings of the trainer.
            policy: trainer of the policy, which ``resume`` restores.
            critic: trainer of the critic, which ``resume`` restores. None without a critic.
        """
        self._run = RunDirectory(settings.directory)
        self._policy = policy
        self._critic = critic
        self._adapter_archiver: AdapterArchiver | None = None
        if settings.training.keep_adapters:
            base_name = peft_base_name(settings.initial_weights)
            self._adapter_archiver = AdapterArchiver(self._run, base_name)

        self._writers: list[tuple[CheckpointWriter, PolicyTrainer]] = []
        """Writers and their trainers, in the order in which they start and finish."""
        keep = settings.training.keep_checkpoints
        if critic is not None:
            # Keep one more than of the policy, which is written last and determines the latest
            # step.
            critic_writer = CheckpointWriter(self._run.critic_checkpoints, keep + 1)
            self._writers.append((critic_writer, critic))
        policy_writer = CheckpointWriter(self._run.checkpoints, keep, self._adapter_archiver)
        self._writers.append((policy_writer, policy))

    # -- saving -----------------------------------------------------------------------------------

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Copy everything to host memory and begin to write it.

        Finish an earlier checkpoint first.

        Args:
            step: number of completed steps, which names the checkpoint.
            state: JSON that ``resume`` returns.

        Raises:
            CheckpointError: this checkpoint or the one before cannot be written.
        """
        for writer, trainer in self._writers:
            writer.start(trainer, step, state)

    def publish_if_complete(self) -> None:
        """Make the started checkpoint the latest one if it is complete. Does not wait.

        It is complete once all ranks have written it and none reads an earlier one.

        Raises:
            CheckpointError: the checkpoint cannot be written.
        """
        for writer, _ in self._writers:
            writer.finish(block=False)

    def finish(self, block: bool) -> None:
        """Wait until the started checkpoint is complete, including its kept adapters.

        Without ``block``, wait only if adapters are known to be unwritten, which ends the run.

        Raises:
            CheckpointError: the checkpoint cannot be written, or it is complete, but the adapters
                of this or an earlier checkpoint cannot be written.
        """
        archiver = self._adapter_archiver
        if not block:
            has_failed = archiver is not None and archiver.has_failed()
            if not has_failed:
                return

        # An error of the adapters must not lose the steps up to here.
        for writer, _ in self._writers:
            writer.finish()
        if archiver is not None:
            archiver.finish()

    # -- resuming ---------------------------------------------------------------------------------

    def resume(self) -> ResumedState | None:
        """Load the newest undamaged checkpoint of the run.

        Kept adapters of later steps are deleted, and missing ones of earlier steps are written.

        Returns:
            The saved state, or None if no checkpoint was saved.

        Raises:
            CheckpointError: all checkpoints are damaged (the message names the files), or
                ``AdapterArchiver.write_missing`` failed.
        """
        newest = latest_checkpoint(self._run.checkpoints)
        if newest is None:
            self._keep_adapters_up_to(None)
            return None

        damages: list[str] = []
        # A damaged checkpoint costs the steps since the one before it, not the whole run.
        for path in (newest, *earlier_checkpoints(newest)):
            damage = self._damage(path)
            if damage is None:
                state = self._load(path)
                self._keep_adapters_up_to(path)
                return ResumedState(state, damages)
            damages.append(damage)
        raise CheckpointError(
            f"{self._run.path} has no checkpoint that can be loaded: {'; '.join(damages)}. "
            "Restore a file from a copy, or start again with --overwrite"
        )

    def _damage(self, path: Path) -> str | None:
        """Return the fault of a checkpoint of policy or critic, or None."""
        damage = find_damage(path)
        if damage is not None or self._critic is None:
            return damage
        critic_checkpoint = find_checkpoint(self._run.critic_checkpoints, path.name)
        if critic_checkpoint is None:
            return f"{self._run.critic_checkpoints / path.name}: missing or incomplete"
        return find_damage(critic_checkpoint)

    def _load(self, path: Path) -> dict[str, Any]:
        """Load policy and critic from undamaged files, and return the saved state."""
        # ``_damage`` has read all files. Another check would take as long as loading.
        if self._critic is not None:
            critic_checkpoint = find_checkpoint(self._run.critic_checkpoints, path.name)
            assert critic_checkpoint is not None, path
            load_checkpoint(critic_checkpoint, self._critic, is_checked=True)
        return load_checkpoint(path, self._policy, is_checked=True)

    def _keep_adapters_up_to(self, checkpoint: Path | None) -> None:
        """Keep the adapters of the checkpoints up to this one, or none for None."""
        # The directory is shared by all ranks.
        if dist.get_rank() == 0:
            step = 0 if checkpoint is None else checkpoint_step(checkpoint)
            self._run.delete_adapters_after(step)
        if self._adapter_archiver is not None and checkpoint is not None:
            self._adapter_archiver.write_missing(checkpoint)
