"""SGLang as a rollout engine: servers, their clients and their weights."""
