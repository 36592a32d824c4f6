"""Fixtures that the tests of agents share with those of the gateway."""

from tests.support.rl_loop.gateway.clients import no_client_is_left

__all__ = ["no_client_is_left"]
