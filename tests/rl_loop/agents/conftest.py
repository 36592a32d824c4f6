"""What the tests of agents share with those of the gateway."""

from tests.rl_loop.gateway.conftest import no_client_is_left

__all__ = ["no_client_is_left"]
