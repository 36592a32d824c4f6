"""Calls of training clients."""

import math
import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from megatron_gptoss.optimizer import AdamSettings
from rl_loop.tinker.datums import read_pass
from rl_loop.tinker.errors import ClientError, bad_request
from rl_loop.tinker.fields import read, read_metadata, read_optional
from rl_loop.tinker.futures import Answer, RequestFuture
from rl_loop.tinker.policy import Snapshot
from rl_loop.tinker.queue import TenantQueue, Work
from rl_loop.tinker.state import Sampler, Tenant, TinkerState
from rl_loop.tinker.store import CheckpointFacts, CheckpointName
from rl_loop.tinker.wire import read_message

FLAGS = {
    "train_attn": ("q", "k", "v", "o"),
    "train_mlp": ("experts",),
    "train_unembed": ("head",),
}
"""Targets of adapters by the flag of the API that asks for them."""
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
    """Creation, passes, steps and checkpoints of tenants. Each call returns a future."""

    def __init__(self, state: TinkerState) -> None:
        """Serve a server's tenants."""
        self._state = state

    # -- tenants ----------------------------------------------------------------------------------

    def create_model(self, body: Mapping[str, Any]) -> RequestFuture:
        """Create a tenant with a new adapter."""
        state = self._state
        session_id = state.session(body.get("session_id"))
        model_id = f"{session_id}:train:{read(body, 'model_seq_id', int)}"
        check_base_model(state, body.get("base_model"))
        settings = read_optional(body, "optimizer_config", dict) or {}
        if settings.get("type", "adamw") != "adamw":
            raise bad_request("optimizer_config: the only type is adamw")
        lora = read(body, "lora_config", dict, {"rank": state.model.max_rank})
        rank = read(lora, "rank", int)
        if not 1 <= rank <= state.model.max_rank:
            raise bad_request(f"rank {rank}: this server trains ranks 1 to {state.model.max_rank}")
        for flag, is_trained in state.model.trained.items():
            if is_trained and not read(lora, flag, bool, True):
                raise bad_request(f"{flag}=False: this server trains these adapters. Leave it out")
        seed = read_optional(lora, "seed", int)
        if seed is None:
            seed = secrets.randbits(31)
        metadata = read_metadata(body)

        async def create() -> Answer:
            self._check_place(model_id)
            await state.on_thread(state.policy.create, rank, seed)
            self._add_tenant(model_id, session_id, rank, metadata)
            return {"type": "create_model", "model_id": model_id}

        return self._single(f"{model_id}/0/create_model", session_id, create)

    def _check_place(self, model_id: str) -> None:
        """Raise ClientError if another tenant occupies the server."""
        other = self._state.blocking_tenant()
        if other is not None:
            raise ClientError(
                f"this server trains one model at a time, and {other.model_id} is in use. Close its "
                "client, or end its process and wait a minute"
            )

    def _add_tenant(
        self, model_id: str, session_id: str, rank: int, metadata: dict[str, str] | None
    ) -> None:
        queue = TenantQueue(model_id, session_id)
        self._state.tenants[model_id] = Tenant(model_id, session_id, rank, metadata, queue)

    def _single(self, request_id: str, session_id: str, work: Work) -> RequestFuture:
        """Run an operation that belongs to no queue, or return the future of an equal request."""
        known = self._state.futures.find(request_id)
        if known is not None:
            return known
        future = self._state.futures.add(request_id, session_id)
        self._state.scheduler.add_single(work, future)
        return future

    def get_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a tenant."""
        tenant, name = self._state.tenant(body.get("model_id")), self._state.model.name
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

    def forward_backward(self, content: bytes) -> RequestFuture:
        """Run a pass. The body is a message."""
        state = self._state
        message = read_message("ForwardBackwardRequest", content)
        tenant = state.tenant(message.model_id)

        async def run() -> Answer:
            return await state.on_thread(self._run_pass, message)

        kind = "forward" if message.forward_only else "forward_backward"
        return self._enqueue(tenant, message.seq_id, kind, run, size=len(content))

    def _run_pass(self, message: Any) -> bytes:
        """Run the pass of a message, on the thread of the policy."""
        state = self._state
        try:
            request = read_pass(message, state.model.vocabulary_size, state.model.max_tokens)
            return state.policy.run_pass(request)
        except ClientError as error:
            # The client may have sent the step already. It must not apply a part of a batch.
            if not message.forward_only:
                state.policy.fail_step(str(error))
            raise

    def optim_step(self, body: Mapping[str, Any]) -> RequestFuture:
        """Take an optimizer step."""
        tenant = self._state.tenant(body.get("model_id"))
        if body.get("adam_params") is None:
            raise bad_request("adam_params is missing. The only optimizer is adamw")
        settings = read_adam_settings(read(body, "adam_params", dict))

        async def run() -> Answer:
            state = self._state
            return {"metrics": await state.on_thread(state.policy.take_step, settings)}

        return self._enqueue(tenant, body.get("seq_id"), "optim_step", run, ends_turn=True)

    def _enqueue(
        self, tenant: Tenant, number: object, kind: str, work: Work, **options: Any
    ) -> RequestFuture:
        state = self._state
        future = tenant.queue.add(number, kind, work, state.futures, **options)
        state.scheduler.notify(tenant.queue)
        return future

    # -- checkpoints ------------------------------------------------------------------------------

    def save_weights(self, body: Mapping[str, Any]) -> RequestFuture:
        """Save a tenant with its optimizer state."""
        state = self._state
        tenant = state.tenant(body.get("model_id"))
        name = CheckpointName(tenant.model_id, "weights", read(body, "path", str))
        save = self._saving(tenant, name, body)

        async def run() -> Answer:
            await state.on_thread(lambda: save(state.policy.copy()))
            return {"type": "save_weights", "path": str(name)}

        return self._enqueue(tenant, body.get("seq_id"), "save_weights", run)

    def save_weights_for_sampler(self, body: Mapping[str, Any]) -> RequestFuture:
        """Save a tenant's adapter, or keep a copy of it for a sampling session."""
        state = self._state
        tenant = state.tenant(body.get("model_id"))
        if body.get("path") is not None:
            name = CheckpointName(tenant.model_id, "sampler_weights", read(body, "path", str))
            save = self._saving(tenant, name, body)

            async def run() -> Answer:
                await state.on_thread(lambda: save(state.policy.copy_adapter()))
                return {"type": "save_weights_for_sampler", "path": str(name)}

        else:
            number = read(body, "sampling_session_seq_id", int)
            sampler_id = f"{tenant.session_id}:sample:{number}"

            async def run() -> Answer:
                tensors = await state.on_thread(state.policy.copy_adapter)
                snapshot = Snapshot(tenant.rank, tensors)
                state.samplers[sampler_id] = Sampler(sampler_id, tenant.session_id, snapshot)
                return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return self._enqueue(tenant, body.get("seq_id"), "save_weights_for_sampler", run)

    def _saving(
        self, tenant: Tenant, name: CheckpointName, body: Mapping[str, Any]
    ) -> Callable[[Mapping[str, torch.Tensor]], None]:
        """Return the function that writes tensors to a checkpoint."""
        seconds = read_optional(body, "ttl_seconds", int)
        if seconds is not None and seconds < 1:
            raise bad_request("ttl_seconds must be at least 1")
        now = time.time()
        facts = CheckpointFacts(
            base=self._state.model.base,
            rank=tenant.rank,
            created=now,
            expires=None if seconds is None else now + seconds,
            user_metadata=read_metadata(body),
            run_metadata=tenant.user_metadata,
        )
        overwrite = read(body, "overwrite", bool, False)
        return partial(self._state.store.save, name, facts, overwrite=overwrite)

    def load_weights(self, body: Mapping[str, Any]) -> RequestFuture:
        """Load a checkpoint into a tenant, or into a new one."""
        state = self._state
        name = CheckpointName.parse(body.get("path"))
        optimizer = read(body, "optimizer", bool)
        if optimizer and name.kind != "weights":
            raise bad_request(f"{name} has no optimizer state")

        def load() -> CheckpointFacts:
            facts, tensors = state.store.load(name, state.model.base)
            if facts.rank > state.model.max_rank:
                raise ClientError(f"{name} has rank {facts.rank}, above {state.model.max_rank}")
            state.policy.load(facts.rank, tensors, optimizer=optimizer)
            return facts

        if body.get("session_id") is not None:
            session_id = state.session(body["session_id"])
            model_id = f"{session_id}:train:{read(body, 'model_seq_id', int)}"
            metadata = read_metadata(body)

            async def create() -> Answer:
                self._check_place(model_id)
                facts = await state.on_thread(load)
                self._add_tenant(model_id, session_id, facts.rank, metadata)
                return {"type": "load_weights", "path": str(name), "model_id": model_id}

            return self._single(f"{model_id}/0/load_weights", session_id, create)

        tenant = state.tenant(body.get("model_id"))

        async def replace() -> Answer:
            tenant.rank = (await state.on_thread(load)).rank
            return {"type": "load_weights", "path": str(name), "model_id": tenant.model_id}

        return self._enqueue(tenant, body.get("seq_id"), "load_weights", replace)


def check_base_model(state: TinkerState, name: object) -> None:
    """Raise ApiError if a request names another base than this server's."""
    if name != state.model.name:
        raise bad_request(f"this server has {state.model.name}, not {str(name)[:128]!r}")


def read_adam_settings(numbers: Mapping[str, Any]) -> AdamSettings:
    """Return the settings of an optimizer step. Raises ApiError."""
    values = {name: read(numbers, name, float, default) for name, default in NUMBERS.items()}
    for name, value in values.items():
        if not math.isfinite(value) or value < 0 or (name.startswith("beta") and value >= 1):
            raise bad_request(f"adam_params.{name} ({value:g}) is out of range")
    # A limit of 0 means no limit. With infinity, the norm is still measured.
    clip = values.pop("grad_clip_norm") or math.inf
    return AdamSettings(**values, clip_grad=clip)
