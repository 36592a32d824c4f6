"""Calls of the SDK's REST client: sessions, tenants and checkpoints."""

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from rl_loop.tinker.downloads import Downloads
from rl_loop.tinker.errors import bad_request, not_found
from rl_loop.tinker.state import TinkerState
from rl_loop.tinker.store import SCHEME, CheckpointFacts, CheckpointName
from rl_loop.tinker.training_calls import read_lifetime

TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Type of a checkpoint in the API by kind."""


class CheckpointCalls:
    """Lists, descriptions, lifetimes, downloads and deletion of checkpoints."""

    def __init__(self, state: TinkerState, downloads: Downloads) -> None:
        """Serve a server's checkpoints. ``downloads`` signs URLs."""
        self._state = state
        self._downloads = downloads

    # -- sessions and tenants ---------------------------------------------------------------------

    def list_sessions(self, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        """List the sessions of an owner, newest first."""
        found = [name for name, one in self._state.sessions.items() if one.owner == owner]
        return {"sessions": _page("sessions", found[::-1], query)["sessions"]}

    def describe_session(self, owner: str, session_id: str) -> dict[str, Any]:
        """Describe a session with its tenants and samplers."""
        state = self._state
        session_id = state.session(owner, session_id)
        return {
            "training_run_ids": [
                name for name, one in state.tenants.items() if one.session_id == session_id
            ],
            "sampler_ids": [
                name for name, one in state.samplers.items() if one.session_id == session_id
            ],
            "user_metadata": state.sessions[session_id].user_metadata,
        }

    def list_runs(self, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        """List all tenants of an owner that are trained or have checkpoints."""
        state = self._state
        trained = [name for name, one in state.tenants.items() if one.owner == owner]
        saved = [name.model_id for name, _ in state.store.list(owner)]
        runs = [self._run(owner, model_id) for model_id in dict.fromkeys([*trained, *saved])]
        return _page("training_runs", runs, query)

    def describe_run(self, owner: str, model_id: str) -> dict[str, Any]:
        """Describe a tenant, which may have left."""
        tenant = self._state.tenants.get(model_id)
        is_trained = tenant is not None and tenant.owner == owner
        if not is_trained and not self._state.store.list(owner, model_id):
            raise not_found(f"there is no model {model_id[:128]!r}")
        return self._run(owner, model_id)

    def _run(self, owner: str, model_id: str) -> dict[str, Any]:
        tenant = self._state.tenants.get(model_id)
        checkpoints = self._state.store.list(owner, model_id)
        described = {name.kind: self._describe(name, facts) for name, facts in checkpoints}
        last = tenant.last_request if tenant is not None else checkpoints[-1][1].created
        metadata = tenant.user_metadata if tenant is not None else checkpoints[-1][1].run_metadata
        return {
            "training_run_id": model_id,
            "base_model": self._state.model.api_name,
            "model_owner": owner,
            "is_lora": True,
            "lora_rank": tenant.rank if tenant is not None else checkpoints[-1][1].rank,
            "last_request_time": _time(last),
            "last_checkpoint": described.get("weights"),
            "last_sampler_checkpoint": described.get("sampler_weights"),
            "user_metadata": metadata,
        }

    # -- checkpoints ------------------------------------------------------------------------------

    def weights_info(self, owner: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Describe a checkpoint for a client that will load it."""
        facts = self._state.checkpoint(owner, CheckpointName.parse(body.get("tinker_path")))
        return {
            "base_model": self._state.model.api_name,
            "is_lora": True,
            "lora_rank": facts.rank,
            "optimizer_config": {"type": "adamw"},
            **self._state.model.has_adapters,
        }

    def list_checkpoints(self, owner: str, model_id: str) -> dict[str, Any]:
        """List the checkpoints of a tenant, which may have left."""
        found = self._state.store.list(owner, model_id)
        return {"checkpoints": [self._describe(name, facts) for name, facts in found]}

    def list_all_checkpoints(self, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        """List the checkpoints of all tenants of an owner, newest first."""
        found = [self._describe(name, facts) for name, facts in self._state.store.list(owner)]
        return _page("checkpoints", found[::-1], query)

    def delete(self, owner: str, model_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint."""
        name = _checkpoint_name(model_id, checkpoint_id)
        self._state.checkpoint(owner, name)
        self._state.store.delete(name)

    def set_lifetime(
        self, owner: str, model_id: str, checkpoint_id: str, body: Mapping[str, Any]
    ) -> None:
        """Change the time to live of a checkpoint. None keeps it."""
        name = _checkpoint_name(model_id, checkpoint_id)
        facts = self._state.checkpoint(owner, name)
        seconds = read_lifetime(body)
        expires = None if seconds is None else time.time() + seconds
        self._state.store.set_expiry(name, replace(facts, expires=expires))

    def download_urls(
        self, owner: str, model_id: str, checkpoint_id: str, origin: str
    ) -> dict[str, Any]:
        """Return URLs of the files of an adapter in PEFT's format.

        Args:
            owner: owner of the checkpoint.
            model_id: tenant that saved the checkpoint.
            checkpoint_id: kind and name of the checkpoint.
            origin: beginning of URLs of this server.
        """
        name = _checkpoint_name(model_id, checkpoint_id)
        self._state.checkpoint(owner, name)
        if name.kind != "external_weights":
            raise bad_request(f"{name} is not in PEFT's format. Use save_weights_external")
        expires, paths = self._downloads.sign(name)
        urls = {file: origin + path for file, path in paths.items()}
        return {"urls": urls, "expires": _time(expires)}

    def _describe(self, name: CheckpointName, facts: CheckpointFacts) -> dict[str, Any]:
        return {
            "checkpoint_id": f"{name.kind}/{name.name}",
            "checkpoint_type": TYPES[name.kind],
            "time": _time(facts.created),
            "tinker_path": str(name),
            "size_bytes": self._state.store.size(name),
            "user_metadata": facts.user_metadata,
            "expires_at": None if facts.expires is None else _time(facts.expires),
        }


def _checkpoint_name(model_id: str, checkpoint_id: str) -> CheckpointName:
    return CheckpointName.parse(f"{SCHEME}{model_id}/{checkpoint_id}")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _page(name: str, items: list[Any], query: Mapping[str, str]) -> dict[str, Any]:
    """Return the requested part of a list. Raises ApiError."""
    try:
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 20))
    except ValueError:
        raise bad_request("offset and limit must be integers") from None
    if offset < 0 or limit < 0:
        raise bad_request("offset and limit must not be negative")
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}
