"""Calls of the SDK's REST client: tenants and checkpoints."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from rl_loop.tinker.errors import bad_request, not_found
from rl_loop.tinker.state import TinkerState
from rl_loop.tinker.store import CheckpointFacts, CheckpointName


class CheckpointCalls:
    """Lists, descriptions and deletion of checkpoints."""

    def __init__(self, state: TinkerState) -> None:
        """Serve a server's checkpoints."""
        self._state = state

    def weights_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a checkpoint for a client that will load it."""
        name = CheckpointName.parse(body.get("tinker_path"))
        facts = self._facts(name)
        return {
            "base_model": self._state.model.name,
            "is_lora": True,
            "lora_rank": facts.rank,
            "optimizer_config": {"type": "adamw"},
            **self._state.model.trained,
        }

    def list_checkpoints(self, model_id: str) -> dict[str, Any]:
        """List the checkpoints of a tenant, which may have left."""
        found = self._state.store.list(model_id)
        return {"checkpoints": [self._describe(name, facts) for name, facts in found]}

    def list_all_checkpoints(self, query: Mapping[str, str]) -> dict[str, Any]:
        """List the checkpoints of all tenants, newest first."""
        found = [self._describe(name, facts) for name, facts in self._state.store.list()]
        return _page("checkpoints", found[::-1], query)

    def list_runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        """List all tenants that are trained or have checkpoints."""
        saved = [name.model_id for name, _ in self._state.store.list()]
        runs = [self._run(model_id) for model_id in dict.fromkeys([*self._state.tenants, *saved])]
        return _page("training_runs", runs, query)

    def describe_run(self, model_id: str) -> dict[str, Any]:
        """Describe a tenant, which may have left."""
        if model_id not in self._state.tenants and not self._state.store.list(model_id):
            raise not_found(f"there is no model {model_id[:128]!r}")
        return self._run(model_id)

    def delete(self, model_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint."""
        name = CheckpointName.parse(f"tinker://{model_id}/{checkpoint_id}")
        if not self._state.store.delete(name):
            raise not_found(f"there is no checkpoint {name}")

    def _run(self, model_id: str) -> dict[str, Any]:
        tenant = self._state.tenants.get(model_id)
        checkpoints = self._state.store.list(model_id)
        described = {name.kind: self._describe(name, facts) for name, facts in checkpoints}
        last = tenant.last_request if tenant is not None else checkpoints[-1][1].created
        metadata = tenant.user_metadata if tenant is not None else checkpoints[-1][1].run_metadata
        return {
            "training_run_id": model_id,
            "base_model": self._state.model.name,
            "model_owner": "owner",
            "is_lora": True,
            "lora_rank": tenant.rank if tenant is not None else checkpoints[-1][1].rank,
            "last_request_time": _time(last),
            "last_checkpoint": described.get("weights"),
            "last_sampler_checkpoint": described.get("sampler_weights"),
            "user_metadata": metadata,
        }

    def _facts(self, name: CheckpointName) -> CheckpointFacts:
        facts = self._state.store.facts(name)
        if facts is None:
            raise not_found(f"there is no checkpoint {name}")
        return facts

    def _describe(self, name: CheckpointName, facts: CheckpointFacts) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{name.kind}/{name.name}",
            "checkpoint_type": "training" if name.kind == "weights" else "sampler",
            "time": _time(facts.created),
            "tinker_path": str(name),
            "size_bytes": self._state.store.size(name),
            "user_metadata": facts.user_metadata,
            "expires_at": None if facts.expires is None else _time(facts.expires),
        }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(name: str, items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the requested part of a list. Raises ApiError."""
    try:
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 20))
    except ValueError:
        raise bad_request("offset and limit must be integers") from None
    if offset < 0 or limit < 0:
        raise bad_request("offset and limit must not be negative")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}
