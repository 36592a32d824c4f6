"""Calls of training clients."""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from converters.adapter_checkpoint import write_peft
from megatron_gptoss.optimizer import AdamSettings
from rl_loop.tinker.datums import PassRequest, read_passes
from rl_loop.tinker.errors import ClientError, bad_request
from rl_loop.tinker.fields import read, read_metadata, read_optional
from rl_loop.tinker.futures import Answer, RequestFuture
from rl_loop.tinker.peft_export import TenantAdapters
from rl_loop.tinker.queue import TenantQueue, Work
from rl_loop.tinker.snapshots import Snapshot
from rl_loop.tinker.state import Sampler, Tenant, TinkerState
from rl_loop.tinker.store import CheckpointFacts, CheckpointName, Kind
from rl_loop.tinker.wire import read_message, write_output

FLAGS = {
    "train_attn": ("q", "k", "v", "o"),
    "train_mlp": ("experts",),
    "train_unembed": ("head",),
}
"""Targets of adapters by the flag of the API that asks for them."""
MAX_LIFETIME = 10 * 366 * 24 * 3600
"""Maximum of ``ttl_seconds``."""
MAX_NUMBER = 1e6
"""Maximum of each number of ``adam_params``. Larger ones overflow within a step."""
NUMBERS = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}
"""Numbers of ``adam_params`` with the SDK's defaults."""


class TrainingCalls:
    """Creation, passes and steps of tenants. Each call returns a future."""

    def __init__(self, state: TinkerState) -> None:
        """Serve a server's tenants."""
        self._state = state

    # -- tenants ----------------------------------------------------------------------------------

    def create_model(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Create a tenant with a new adapter."""
        state = self._state
        session_id = state.session(owner, body.get("session_id"))
        model_id = f"{session_id}:train:{read(body, 'model_seq_id', int)}"
        check_base_model(state, body.get("base_model"))
        settings = read_optional(body, "optimizer_config", dict) or {}
        if settings.get("type", "adamw") != "adamw":
            raise bad_request("optimizer_config: the only type is adamw")
        rank, seed = self._read_adapter(body)
        metadata = read_metadata(body)

        async def create() -> Answer:
            self._check_place(model_id)
            await state.run_on_policy_thread(state.policy.create, model_id, rank, seed)
            self._add_tenant(model_id, session_id, rank, metadata)
            return {"type": "create_model", "model_id": model_id}

        return self._single(f"{model_id}/0/create_model", session_id, create)

    def _read_adapter(self, body: Mapping[str, Any]) -> tuple[int, int]:
        """Return rank and seed of a new adapter. Raises ApiError."""
        model = self._state.model
        lora = read(body, "lora_config", dict, {"rank": model.max_rank})
        rank = read(lora, "rank", int)
        if not 1 <= rank <= model.max_rank:
            raise bad_request(f"rank {rank}: this server trains ranks 1 to {model.max_rank}")
        for flag, is_trained in model.has_adapters.items():
            if is_trained and not read(lora, flag, bool, True):
                raise bad_request(f"{flag}=False: this server trains these adapters. Leave it out")
        seed = read_optional(lora, "seed", int)
        return rank, secrets.randbits(31) if seed is None else seed

    def _check_place(self, model_id: str) -> None:
        """Raise ClientError if a tenant cannot be created."""
        if model_id in self._state.tenants:
            raise ClientError(f"{model_id} exists")
        if not self._state.make_room():
            limit = self._state.limits.max_models
            raise ClientError(
                f"this server trains up to {limit} models at a time (tinker.max_models). Close a "
                "client, or end its process and wait a minute"
            )

    def _add_tenant(
        self, model_id: str, session_id: str, rank: int, metadata: dict[str, str] | None
    ) -> None:
        """Add a tenant that the policy has created.

        Raises:
            ClientError: its session has ended.
        """
        state = self._state
        session = state.sessions.get(session_id)
        if session is None:
            state.thread.submit(state.policy.drop, model_id)
            raise ClientError("the session has ended")
        queue = TenantQueue(model_id, session_id)
        state.tenants[model_id] = Tenant(model_id, session.owner, rank, metadata, queue)

    def _single(self, request_id: str, session_id: str, work: Work) -> RequestFuture:
        """Run an operation that belongs to no queue, or return the future of an equal request."""
        known = self._state.futures.find(request_id)
        if known is not None:
            return known
        future = self._state.futures.add(request_id, session_id)
        self._state.scheduler.add_operation(work, future)
        return future

    def get_info(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a tenant."""
        tenant, name = (
            self._state.use_tenant(owner, body.get("model_id")),
            self._state.model.api_name,
        )
        return {
            "type": "get_info",
            "model_data": {"arch": "gpt_oss", "model_name": name, "tokenizer_id": name},
            "model_id": tenant.model_id,
            "is_lora": True,
            "lora_rank": tenant.rank,
            "model_name": name,
            "optimizer_config": {"type": "adamw"},
        }

    # -- passes and steps -------------------------------------------------------------------------

    def forward_backward(self, owner: str, content: bytes) -> RequestFuture:
        """Run a pass. The body is a message."""
        message = read_message("ForwardBackwardRequest", content)
        tenant = self._state.use_tenant(owner, message.model_id)
        kind = "forward" if message.forward_only else "forward_backward"
        work = _Pass(self._state, tenant.model_id, message)
        return self._enqueue(
            tenant, message.seq_id, kind, work, size=len(content), tokens=work.tokens
        )

    def optim_step(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Take an optimizer step."""
        tenant = self._state.use_tenant(owner, body.get("model_id"))
        if body.get("adam_params") is None:
            raise bad_request("adam_params is missing. The only optimizer is adamw")
        settings = read_adam_settings(read(body, "adam_params", dict))

        async def run() -> Answer:
            state = self._state
            step = state.policy.take_step
            return {"metrics": await state.run_on_policy_thread(step, tenant.model_id, settings)}

        return self._enqueue(tenant, body.get("seq_id"), "optim_step", run, ends_turn=True)

    def _enqueue(
        self, tenant: Tenant, number: object, kind: str, work: Work, **options: Any
    ) -> RequestFuture:
        state = self._state
        future = tenant.queue.add(number, kind, work, state.futures, **options)
        state.scheduler.notify(tenant.queue)
        return future

    # -- checkpoints ------------------------------------------------------------------------------

    def save_weights(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Save a tenant with its optimizer state."""
        tenant = self._state.use_tenant(owner, body.get("model_id"))
        return self._save_tensors(tenant, "weights", "save_weights", body, self._state.policy.copy)

    def save_weights_for_sampler(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Save a tenant's adapter, or keep a copy of it for a sampling session."""
        state = self._state
        tenant = state.use_tenant(owner, body.get("model_id"))
        if body.get("path") is None:
            return self._keep_snapshot(tenant, body)
        copy = state.policy.copy_adapter
        return self._save_tensors(tenant, "sampler_weights", "save_weights_for_sampler", body, copy)

    def save_weights_external(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Save a tenant's adapter in PEFT's format."""
        state = self._state
        tenant = state.use_tenant(owner, body.get("model_id"))
        if body.get("age_encryption_recipients"):
            raise bad_request(
                "age_encryption_recipients: files are not encrypted here. Leave it out"
            )
        name = CheckpointName(tenant.model_id, "external_weights", read(body, "path", str))
        facts = self._read_facts(tenant, body)

        def save() -> None:
            policy = state.policy
            factors = policy.copy_adapter(tenant.model_id)
            source = TenantAdapters(
                state.model.architecture,
                state.model.adapter,
                tenant.rank,
                policy.base_digest,
                factors,
            )

            def write(directory: Path) -> None:
                write_peft(directory, source, state.model.peft_base_name)

            state.store.save_files(name, facts(), factors, write)

        return self._saving(tenant, name, "save_weights_external", body.get("seq_id"), save)

    def _keep_snapshot(self, tenant: Tenant, body: Mapping[str, Any]) -> RequestFuture:
        """Keep a copy of a tenant's adapter for a sampling session."""
        state = self._state
        number = read(body, "sampling_session_seq_id", int)
        sampler_id = f"{tenant.session_id}:sample:{number}"

        def save() -> Snapshot:
            return state.snapshots.save(tenant.rank, state.policy.copy_adapter(tenant.model_id))

        async def run() -> Answer:
            snapshot = await state.run_on_policy_thread(save)
            sampler = Sampler(sampler_id, tenant.session_id, snapshot)
            # The session may have ended.
            if tenant.session_id in state.sessions:
                state.add_unnamed_sampler(tenant, sampler)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._enqueue(tenant, body.get("seq_id"), "save_weights_for_sampler", run)

    def _save_tensors(
        self,
        tenant: Tenant,
        kind: Kind,
        answer_type: str,
        body: Mapping[str, Any],
        copy: Callable[[str], dict[str, torch.Tensor]],
    ) -> RequestFuture:
        """Queue the saving of tensors in the store's format.

        Args:
            tenant: tenant to save.
            kind: kind of the checkpoint.
            answer_type: type of the answer.
            body: request of the client.
            copy: returns the tensors of a tenant.
        """
        name = CheckpointName(tenant.model_id, kind, read(body, "path", str))
        facts, overwrite = self._read_facts(tenant, body), read(body, "overwrite", bool, False)

        def save() -> None:
            self._state.store.save(name, facts(), copy(tenant.model_id), overwrite=overwrite)

        return self._saving(tenant, name, answer_type, body.get("seq_id"), save)

    def _saving(
        self,
        tenant: Tenant,
        name: CheckpointName,
        kind: str,
        number: object,
        save: Callable[[], None],
    ) -> RequestFuture:
        """Queue a function that writes a checkpoint."""

        async def run() -> Answer:
            await self._state.run_on_policy_thread(save)
            return {"type": kind, "path": str(name)}

        return self._enqueue(tenant, number, kind, run)

    def _read_facts(self, tenant: Tenant, body: Mapping[str, Any]) -> Callable[[], CheckpointFacts]:
        """Return a function for the data about a checkpoint that is written. Raises ApiError."""
        seconds = read_lifetime(body)
        metadata = read_metadata(body)

        def facts() -> CheckpointFacts:
            # An operation before the saving may load an adapter of another rank.
            now = time.time()
            return CheckpointFacts(
                owner=tenant.owner,
                base=self._state.model.base_digest,
                rank=tenant.rank,
                created=now,
                expires=None if seconds is None else now + seconds,
                user_metadata=metadata,
                run_metadata=tenant.user_metadata,
            )

        return facts

    def load_weights(self, owner: str, body: Mapping[str, Any]) -> RequestFuture:
        """Load a checkpoint into a tenant, or into a new one."""
        state = self._state
        name = CheckpointName.parse(body.get("path"))
        optimizer = read(body, "optimizer", bool)
        if optimizer and name.kind != "weights":
            raise bad_request(f"{name} has no optimizer state")
        own = state.tenants.get(name.model_id)
        # The saving of an own checkpoint may still wait.
        if own is None or own.owner != owner:
            state.checkpoint(owner, name)

        def load(model_id: str) -> int:
            facts, tensors = state.store.load(name, state.model.base_digest)
            if facts.rank > state.model.max_rank:
                raise ClientError(f"{name} has rank {facts.rank}, above {state.model.max_rank}")
            state.policy.load(model_id, facts.rank, tensors, optimizer=optimizer)
            return facts.rank

        if body.get("session_id") is not None:
            session_id = state.session(owner, body["session_id"])
            model_id = f"{session_id}:train:{read(body, 'model_seq_id', int)}"
            metadata = read_metadata(body)

            async def create() -> Answer:
                self._check_place(model_id)
                rank = await state.run_on_policy_thread(load, model_id)
                self._add_tenant(model_id, session_id, rank, metadata)
                return {"type": "load_weights", "path": str(name), "model_id": model_id}

            return self._single(f"{model_id}/0/load_weights", session_id, create)

        tenant = state.use_tenant(owner, body.get("model_id"))

        async def replace() -> Answer:
            tenant.rank = await state.run_on_policy_thread(load, tenant.model_id)
            return {"type": "load_weights", "path": str(name), "model_id": tenant.model_id}

        return self._enqueue(tenant, body.get("seq_id"), "load_weights", replace)


class _Pass:
    """A pass, which runs in parts."""

    def __init__(self, state: TinkerState, tenant: str, message: Any) -> None:
        """Prepare the pass of a ``ForwardBackwardRequest``."""
        self._state = state
        self._tenant = tenant
        self._message = message
        chunks = [chunk for datum in message.data for chunk in datum.model_input]
        self.tokens = sum(len(chunk.encoded_text.tokens) // 4 for chunk in chunks)
        """Tokens of the pass."""
        self._parts: list[PassRequest] | None = None
        self._done = 0
        self._loss = 0.0
        self._log_probs: list[np.ndarray] = []

    async def __call__(self) -> Answer | None:
        """Run the next part. Returns None before the last one."""
        return await self._state.run_on_policy_thread(self._run)

    def _run(self) -> bytes | None:
        state = self._state
        try:
            if self._parts is None:
                limit = state.limits.turn_tokens
                model = state.model
                self._parts = read_passes(
                    self._message, model.vocabulary_size, model.max_tokens, limit
                )
            part = self._parts[self._done]
            result = state.policy.run_pass(self._tenant, part)
        except Exception as error:
            # The client may have sent the step already. It must not apply a part of a batch.
            if not self._message.forward_only:
                state.policy.fail_step(self._tenant, str(error))
            raise
        self._loss += result.loss
        self._log_probs += part.split(result.log_probs)
        self._done += 1
        if self._done < len(self._parts):
            return None
        return write_output(self._log_probs, {"loss:sum": self._loss})


def check_base_model(state: TinkerState, name: object) -> None:
    """Raise ApiError if a request names another base than this server's."""
    if name != state.model.api_name:
        raise bad_request(f"this server has {state.model.api_name}, not {str(name)[:128]!r}")


def read_lifetime(body: Mapping[str, Any]) -> int | None:
    """Return ``ttl_seconds``. Raises ApiError."""
    seconds = read_optional(body, "ttl_seconds", int)
    if seconds is not None and not 1 <= seconds <= MAX_LIFETIME:
        raise bad_request(f"ttl_seconds must be from 1 to {MAX_LIFETIME}")
    return seconds


def read_adam_settings(numbers: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of an optimizer step. Raises ApiError."""
    values = {name: read(numbers, name, float, default) for name, default in NUMBERS.items()}
    for name, value in values.items():
        if not 0 <= value <= MAX_NUMBER or (name.startswith("beta") and value >= 1):
            raise bad_request(f"adam_params.{name} ({value:g}) is out of range")
    # A limit of 0 means no limit. With infinity, the norm is still measured.
    clip = values.pop("grad_clip_norm") or math.inf
    return AdamSettings(**values, clip_grad=clip)
